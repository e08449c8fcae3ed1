"""Check, when the optimizer is built, that a plan's step can be captured as a CUDA graph."""

from collections.abc import Iterable
from importlib.util import find_spec

import torch
import torch.distributed as dist

from opt_config import ConfigError
from opt_distributed.buffers.stored import FP8
from opt_distributed.comm import device as devices
from opt_distributed.comm.collectives import Comm, group_of
from opt_distributed.comm.graph import GraphError
from opt_distributed.step.mains import Numbers
from opt_kernels.hooks import bare, hooks_of
from opt_stack.planning.plan import Plan

_FIELD = "optimizer_cuda_graph=True"
_ON_DEVICE = (None, "triton")


def check_graphs(plan: Plan, device: torch.device, comms: Iterable[Comm]) -> None:
    """Raise ConfigError if `optimizer_cuda_graph` is set and the device, a rule or a group does not support capture."""
    if not plan.config.optimizer_cuda_graph:
        return
    try:
        devices.device_of(device).graph()
    except GraphError as error:
        raise ConfigError(f"{_FIELD}: {error}") from error
    if any(buffer.dtype is FP8 for buffer in plan.buffers):
        raise ConfigError(f"{_FIELD} with parameters in fp8, which are quantised after the update; set it to False")
    for unit in plan.units:
        rule = bare(unit.rule)
        if not getattr(rule, "capturable", False):
            raise ConfigError(
                f"{_FIELD} with optimizer={rule.name!r}: its update reads values on the host, or the rule does not "
                "declare capturable=True; use another rule, or set it to False"
            )
        if rule is not unit.rule:
            raise ConfigError(
                f"{_FIELD} with hooks {hooks_of(unit.rule)!r} of {rule.name!r}, which allocate memory in every "
                "step; use hooks that are part of a formula (CautiousDecay, CoupledDecay or LrDecoupledDecay of an "
                "elementwise rule), or set it to False"
            )
        if Numbers.FP16_SCALED in unit.numbers.values():
            raise ConfigError(
                f"{_FIELD} with main_params_dtype={plan.config.main_params_dtype}, whose values are decoded to new "
                "memory at every step; use remainders or fp32 main values, or set it to False"
            )
        backend = getattr(rule, "backend", None)
        if backend not in _ON_DEVICE:
            raise ConfigError(f"{_FIELD} with backend={backend!r} of {rule.name!r}: only 'triton' can be captured")
    if device.type == "cuda" and find_spec("triton") is None:
        raise ConfigError(f"{_FIELD}: updates without Triton kernels read values on the host; install triton")
    for comm in comms:
        group = group_of(comm)
        if device.type == "cuda" and group is not None and comm.size > 1 and "nccl" not in dist.get_backend(group):
            raise ConfigError(
                f"{_FIELD} with process groups over {dist.get_backend(group)}: only NCCL's collectives can be captured"
            )
