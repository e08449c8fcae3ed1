"""The world that a launcher announces in the environment: torchrun, srun or mpirun."""

import logging
import os
import warnings
from collections.abc import Iterable

import torch.distributed as dist

from opt_config import ConfigError

logger = logging.getLogger("opt_distributed")

WORLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets, and that torch's `env://` rendezvous reads."""

MPI_SIZES = ("OMPI_COMM_WORLD_SIZE", "MV2_COMM_WORLD_SIZE", "PMI_SIZE")
"""The variables in which MPI launchers announce the number of their tasks, and `srun --mpi=pmi2` too."""


def join_launched_world(devices: Iterable[str]) -> None:
    """Initialise `torch.distributed` if a launcher started several processes and it is not initialised yet.

    Warns if srun or mpirun started several tasks and nothing tells them of each other: each trains alone.

    `devices` are the device types of this rank's model; a backend is chosen for each of them and for the CPU.

    Raises:
        ConfigError: `WORLD_SIZE` is not a positive number, or is above 1 and other variables of the rendezvous are
            missing.
    """
    if not dist.is_available() or dist.is_initialized():
        return
    size = os.environ.get("WORLD_SIZE")
    if not size:
        _warn_of_lone_tasks()
        return
    if not size.isdecimal() or int(size) < 1:
        raise ConfigError(
            f"WORLD_SIZE={size!r} in the environment; it must be a number of ranks, 1 or more: correct or unset it"
        )
    if int(size) == 1:
        return
    missing = [name for name in WORLD if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={size} in the environment, but torch.distributed is not initialised and "
            f"these variables are not set: {', '.join(missing)}; start the script with torchrun, call "
            "torch.distributed.init_process_group first, or unset WORLD_SIZE to train in one process"
        )
    backends = {kind: dist.get_default_backend_for_device(kind) for kind in dict.fromkeys(("cpu", *devices))}
    dist.init_process_group(",".join(f"{kind}:{backend}" for kind, backend in backends.items()))
    logger.info(
        "initialised torch.distributed as rank %d of %d (%s) from the launcher's environment",
        dist.get_rank(),
        dist.get_world_size(),
        ", ".join(backends.values()),
    )


def _warn_of_lone_tasks() -> None:
    """Warn if a launcher announces several tasks. Called where no world is announced."""
    name = _announced_in()
    num_tasks = os.environ.get(name, "")
    if num_tasks.isdecimal() and int(num_tasks) > 1:
        warnings.warn(
            f"{num_tasks} tasks were announced ({name}={num_tasks}), but torch.distributed is not initialised and "
            "WORLD_SIZE is not set: each task trains a model of its own; start the script with torchrun (one task per "
            f"node), call torch.distributed.init_process_group first, or unset {name} if this process is to train "
            "alone",
            RuntimeWarning,
            stacklevel=1,  # one place, so that several chunks and optimizers warn once
        )


def _announced_in() -> str:
    """Return the variable that holds the number of tasks of the innermost launcher; empty if there is none.

    An interactive allocation announces the tasks that it may start, and is none of them: its shell has no
    `SLURM_PROCID`, or that of a shell. `SLURM_STEP_NUM_TASKS` counts the tasks that one srun started.
    """
    for name in MPI_SIZES:
        if os.environ.get(name):
            return name
    if not os.environ.get("SLURM_PROCID") or os.environ.get("SLURM_PTY_PORT"):
        return ""
    if os.environ.get("SLURM_STEP_NUM_TASKS"):
        return "SLURM_STEP_NUM_TASKS"
    is_interactive = os.environ.get("SLURM_JOB_NAME") in ("interactive", "bash")
    return "" if is_interactive else "SLURM_NTASKS"
