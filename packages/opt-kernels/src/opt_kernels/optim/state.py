"""A parameter's state as it is saved: in plain numbers, whatever codec or main kept it."""

from collections.abc import Mapping

import torch
from torch import Tensor

from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.dtensor import distributed_like, local
from opt_kernels.ops.elements import flat
from opt_kernels.optim.mains import MAIN, REMAINDER, Mains, init_main, load_main_, saved_main
from opt_kernels.rules.base import Rule

STEP = "step"


class StateDictError(ValueError):
    """A state_dict does not fit the optimizer that loads it."""


def init_state(rule: Rule, mains: Mains, param: Tensor) -> dict[str, Tensor]:
    """Everything kept for `param`, as it is before the first step; for a DTensor, of its local shard."""
    shard = local(param).detach()
    return {STEP: torch.zeros(())} | rule.init_state(shard) | init_main(mains, shard)


def saved_state(codecs: Mapping[str, StateCodec], param: Tensor, state: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """`state` in torch's form: block codecs decoded, a remainder joined to a `main`, DTensors like `param`."""
    shard = local(param).detach()
    saved = {name: tensor for name, tensor in state.items() if name != REMAINDER}
    saved[STEP] = state[STEP].clone()  # an element of what the roster counts in
    for name, codec in codecs.items():
        if codec.block:
            values = torch.empty_like(shard, dtype=torch.float32)
            codec.decode_(flat(values, shard, name), flat(state[name], shard, name), saved.pop(scale_name(name)))
            saved[name] = values
    main = saved_main(shard, dict(state))
    if main is not None:
        saved[MAIN] = main
    return {name: tensor if name == STEP else distributed_like(tensor, param) for name, tensor in saved.items()}


@torch.no_grad()
def loaded_state(
    rule: Rule, codecs: Mapping[str, StateCodec], mains: Mains, param: Tensor, saved: Mapping[str, Tensor | float]
) -> dict[str, Tensor]:
    """`saved`, in torch's form, as this optimizer keeps it; each state keeps its own dtype, not the parameter's.

    Where `saved` has a `main`, `param` is set to it, rounded; where it has none, the main starts from `param`. Raises
    StateDictError where a state is missing, or has another shape.
    """
    shard = local(param).detach()
    state = init_state(rule, mains, param)
    state[STEP].fill_(_step(saved))
    scales = {scale_name(name) for name, codec in codecs.items() if codec.block}
    for name in state.keys() - scales - {STEP, MAIN, REMAINDER}:
        tensor = _fitting(name, saved, state[name])
        if name in codecs and codecs[name].block:
            values = torch.empty_like(shard, dtype=torch.float32).copy_(tensor)
            codecs[name].encode_(flat(state[name], shard, name), state[scale_name(name)], flat(values, shard, name))
        else:
            state[name].copy_(tensor)
    if MAIN in saved:
        load_main_(shard, state, _fitting(MAIN, saved, shard))
    return state


def _step(saved: Mapping[str, Tensor | float]) -> float:
    if STEP not in saved and "momentum_buffer" in saved:
        # torch.optim.SGD counts no steps; all that matters is that the first is over.
        return 1.0
    if STEP not in saved:
        raise StateDictError(f"state 'step' is missing: the state_dict has {sorted(saved)}; load one that counts steps")
    return float(saved[STEP])


def _fitting(name: str, saved: Mapping[str, Tensor | float], wanted: Tensor) -> Tensor:
    found = saved.get(name)
    if not isinstance(found, Tensor):
        raise StateDictError(
            f"state {name!r} is missing: the state_dict has {sorted(saved)}; load one that was saved by the same rule"
        )
    if local(found).shape != wanted.shape:
        raise StateDictError(
            f"state {name!r} has shape {tuple(local(found).shape)} where {tuple(wanted.shape)} is wanted; "
            "load a state_dict of the same parameters, in the same order and sharded alike"
        )
    return local(found)
