"""Initialise `torch.distributed` from a launcher's environment, if the script has not done so."""

import logging
import os
from collections.abc import Iterable

import torch.distributed as dist

from opt_config import ConfigError

logger = logging.getLogger("opt_distributed")

WORLD = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
"""The variables that torchrun sets, and that torch's `env://` rendezvous reads."""


def join_launched_world(devices: Iterable[str]) -> None:
    """Initialise `torch.distributed` if a launcher started several processes and it is not initialised yet.

    `devices` are the device types of this rank's model; a backend is chosen for each of them and for the CPU.

    Raises:
        ConfigError: `WORLD_SIZE` is not a positive number, or is above 1 and other variables of the rendezvous are
            missing.
    """
    if not dist.is_available() or dist.is_initialized() or _world_size() == 1:
        return
    missing = [name for name in WORLD if not os.environ.get(name)]
    if missing:
        raise ConfigError(
            f"WORLD_SIZE={os.environ['WORLD_SIZE']} in the environment, but torch.distributed is not initialised and "
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


def _world_size() -> int:
    text = os.environ.get("WORLD_SIZE") or "1"
    if not text.isdecimal() or int(text) < 1:
        raise ConfigError(
            f"WORLD_SIZE={text!r} in the environment; it must be a number of ranks, 1 or more: correct or unset it"
        )
    return int(text)
