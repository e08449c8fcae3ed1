"""The public names of this package, gathered from the modules that define them.

`opt_distributed.NAME` imports this module at its first use, so that `import opt_distributed` alone is fast.
"""

from opt_distributed.buffers.data_parallel import DistributedDataParallel, share_launch_order
from opt_distributed.buffers.main_grad import GradientError, UnusableGradientError
from opt_distributed.buffers.storage import ParamAndGradBuffer
from opt_distributed.buffers.stored import ReplicaError, StorageError
from opt_distributed.buffers.wires import CollectiveError
from opt_distributed.comm.collectives import Alone, Comm, ProcessGroupError, TorchComm
from opt_distributed.comm.groups import ProcessGroupCollection, ProcessGroups
from opt_distributed.comm.threads import run_threads
from opt_distributed.finalize import finalize_model_grads
from opt_distributed.layout import (
    ComputeLayout,
    Layout,
    LayoutError,
    ParamShape,
    compute_layout,
    flat_layout,
    replicated_layout,
    whole_layout,
)
from opt_distributed.saving import StateError
from opt_distributed.step.group_guards import HyperError
from opt_distributed.step.outcome import StepResult
from opt_distributed.step.stepper import Stepper

__all__ = [
    "Alone", "CollectiveError", "Comm", "ComputeLayout", "DistributedDataParallel", "GradientError", "HyperError",
    "Layout", "LayoutError", "ParamAndGradBuffer", "ParamShape", "ProcessGroupCollection",
    "ProcessGroupError", "ProcessGroups", "ReplicaError", "StateError", "StepResult", "Stepper", "StorageError",
    "TorchComm", "UnusableGradientError", "compute_layout", "finalize_model_grads", "flat_layout", "replicated_layout",
    "run_threads", "share_launch_order", "whole_layout",
]  # fmt: skip
