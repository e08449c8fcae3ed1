"""Saves and loads a run of the fuzz through opt_checkpoint: ranks as processes together, ranks as threads as one."""

import threading
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from fuzz.cases import Case, Param, cut_of, is_copy
from fuzz.rank import Run
from opt_checkpoint import ShardedBase, ShardedTensor, ShardedTensorFactory, load, save, sharded_model
from opt_distributed.comm import Comm

_ONE_AT_A_TIME = threading.Lock()  # a load of one process, without torch.distributed, is not made for threads


def save_run(run: Run, path: str, everyone: Comm | None) -> None:
    """All ranks call it together. `everyone`: the ranks, where they are threads."""
    mine = sharded(run)
    if everyone is None:
        save(mine, path)
        return
    by_rank = everyone.gather_objects(mine)
    if everyone.rank == 0:
        save(_joined(by_rank), path)
    everyone.gather_objects("saved")


def load_run(run: Run, path: str, everyone: Comm | None) -> None:
    mine = sharded(run)
    dtype: Any = "exact" if run.case.resume_numbers is None else "cast"
    if everyone is None:
        run.optimizer.load_state_dict(load(mine, path, dtype=dtype).state["optimizer"])
        return
    with _ONE_AT_A_TIME:
        loaded = load(_joined([mine]), path, dtype=dtype).state
    optimizer = {**loaded["optimizer"], "state": loaded["tensors"]["0"]["optimizer"]}
    run.optimizer.load_state_dict(optimizer)


def _joined(by_rank: list[dict[str, Any]]) -> dict[str, Any]:
    """The state of one process that holds every rank's part: tensors of all ranks, plain values of the first."""
    plain = {key: value for key, value in by_rank[0]["optimizer"].items() if key != "state"}
    tensors = {
        str(rank): {"model": state["model"], "optimizer": state["optimizer"]["state"]}
        for rank, state in enumerate(by_rank)
    }
    return {"tensors": tensors, "optimizer": plain}


def sharded(run: Run) -> dict[str, Any]:
    """A model that is not DTensors is described by the parameters' attributes or by hand: one by the run that saves,
    the other by the run that loads, which is possible where no experts are stacked by hand."""
    stacks, is_resumed = _stacked(run.case), run.setup is run.case.resume
    if run.setup.layout != "plain" or (run.case.seed + (is_resumed and not stacks)) % 2:
        model = {name: value for net in run.nets for name, value in sharded_model(net).items()}
    else:
        held = [param for param in run.case.params if run.holds(param)]
        model = {param.name: _sharded(run, param, stacks.get(param.name)) for param in held}
    return {"model": model, "optimizer": run.optimizer.sharded_state_dict(model)}


def _stacked(case: Case) -> Mapping[str, tuple[str, int, int]]:
    """Experts of a layer with equal shapes are saved as one stack: by parameter its key, its place and their number."""
    found = {}
    for param in case.params:
        layer = [other for other in case.params if other.number == param.number]
        if param.expert is not None and len(layer) > 1 and len({_kind(case, other) for other in layer}) == 1:
            found[param.name] = (f"experts{param.number}", layer.index(param), len(layer))
    return found


def _kind(case: Case, param: Param) -> Any:
    return (param.shape, param.wide, param.cut, param.frozen, param.left_out, case.rule_of(param))


def _sharded(run: Run, param: Param, stacked: tuple[str, int, int] | None) -> ShardedBase:
    """Fused matrices are built from two halves of one key, as Megatron-Core describes its own."""
    weight, place = run.weight(param), run.place
    index, count = cut_of(param, place, run.setup.grid)
    peer, copies = (place.tp, place.replica) if param.expert is None else (place.etp, place.expert_replica)
    replica_id = (int(is_copy(param, place)), 0 if count > 1 else peer, copies)
    key, *stack = (f"{param.name}.weight",) if stacked is None else (stacked[0], (0, *stacked[1:]))
    axis, first = len(stack), index if param.cut == 0 else 0

    def part(data: Tensor, number: int, of: int, replica_id: Any) -> ShardedTensor:
        rows = (axis, of * first + number, of * (count if param.cut == 0 else 1))
        others = [] if param.cut in (0, None) else [(param.cut + axis, index, count)]
        offsets = [*stack, *([rows] if rows[2] > 1 else []), *others]
        return ShardedTensor.from_rank_offsets(key, data, *offsets, replica_id=replica_id, prepend_axis_num=axis)

    if not param.qkv or stack:
        return part(weight, 0, 1, replica_id)
    halves = lambda key, data, replica_id, flat: [part(x, n, 2, replica_id) for n, x in enumerate(data.chunk(2))]
    return ShardedTensorFactory(key, weight, halves, torch.cat, replica_id)
