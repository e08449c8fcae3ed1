"""Names and places that `place_` gives to the tensors of divided models; ranks are threads."""

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from checkpoint_ranks import on_threads
from torch import nn

from opt_checkpoint import CheckpointingException, ShardedTensor, add_prefix_for_sharding, sharded_model
from opt_checkpoint.state import ModelAxes, Replica, place_

ALONE = Replica(0, 1)


class One:
    rank = 0
    size = 1

    def gather_objects(self, value: Any) -> list[Any]:
        return [value]


def placed(
    axis: str, models: list[nn.Module], change: Callable[[Any], object] = lambda state: None
) -> list[dict[str, ShardedTensor] | str]:
    """What each rank's model becomes if its ranks lie along `axis`, or the refusal; `change` sets keys before."""

    def rank_main(ranks: Any) -> dict[str, ShardedTensor] | str:
        axes = dict.fromkeys(("tp", "expert_tp", "ep", "pp"), One()) | {axis: ranks, "all_ranks": ranks}
        replicas = (
            Replica(ranks.rank, ranks.size) if axis.startswith("e") else ALONE
        )  # dense ones are copied over experts'
        state = sharded_model(models[ranks.rank])
        change(state)
        try:
            place_(state, ModelAxes(dense=replicas, expert=ALONE, **axes))
        except CheckpointingException as error:
            return str(error)
        return dict(state)

    return on_threads(len(models), rank_main)


def module(**tensors: Any) -> nn.Module:
    """A model with tensors by name: `layers__n0__w` is `layers.0.w`."""
    made = nn.Module()
    for path, value in tensors.items():
        *outer, last = [word[1:] if word[1:].isdigit() else word for word in path.split("__")]
        inner = made
        for word in outer:
            if word not in inner._modules:
                inner.add_module(word, nn.Module())
            inner = inner._modules[word]
        setattr(inner, last, value)
    return made


def expert(*shape: int) -> nn.Parameter:
    param: Any = nn.Parameter(torch.zeros(shape or (2, 3)))
    param.allreduce = False
    return param


def dense(**marks: Any) -> nn.Parameter:
    param = nn.Parameter(torch.zeros(2, 3))
    vars(param).update(marks)
    return param


def layers(name: str, *numbers: int, make: Callable[[], nn.Parameter] = expert) -> nn.Module:
    return module(**{f"{name}__n{n}__w": make() for n in numbers})


HALVES = "experts.0.w experts.1.w", "experts.2.w experts.3.w"
EXPERTS: dict[str, tuple[Callable[[int], nn.Module], str, str]] = {  # a rank's model; the names on both ranks
    "numbered on each rank": (lambda rank: layers("experts", 0, 1), *HALVES),
    "numbered over all ranks": (lambda rank: layers("experts", 2 * rank, 2 * rank + 1), *HALVES),
    "every other one on a rank": (
        lambda rank: layers("experts", rank, rank + 2), "experts.0.w experts.2.w", "experts.1.w experts.3.w"
    ),
    "in reverse order": (lambda rank: layers("local_experts", 1 - rank), "local_experts.1.w", "local_experts.0.w"),
    "numbers that fit neither": (
        lambda rank: layers("experts", 0, 2), *(f"experts{r}of2.experts.0.w experts{r}of2.experts.2.w" for r in (0, 1))
    ),
    "grouped": (
        lambda rank: module(experts__fc__weight0=expert(), experts__fc__weight1=expert()),
        "experts.fc.weight0 experts.fc.weight1", "experts.fc.weight2 experts.fc.weight3",
    ),
    "without numbers": (lambda rank: module(expert__w=expert()), "experts0of2.expert.w", "experts1of2.expert.w"),
    "of other names": (lambda rank: module(**{f"expert_{rank}__w": expert()}), "expert_0.w", "expert_1.w"),
    "beside a dense weight": (
        lambda rank: module(gate=dense(), experts__n0__w=expert()), "gate experts.0.w", "gate experts.1.w"
    ),
}  # fmt: skip


def test_buffers_of_experts_stay_theirs_others_are_saved_once() -> None:
    def make(rank: int) -> nn.Module:
        made = module(experts__n0__w=expert())
        made.experts._modules["0"].register_buffer("scale", torch.zeros(3))
        made.register_buffer("count", torch.zeros(()))
        return made

    first, second = placed("ep", [make(0), make(1)])
    assert [t.key for t in second.values()] == ["count", "experts.1.w", "experts.1.scale"]
    assert (first["count"].replica_id, second["count"].replica_id) == ((0, 0, 0), (0, 0, 1))


STAGES: dict[str, tuple[Callable[[int], nn.Module], str, str]] = {
    "layers that every stage counts from 0": (
        lambda rank: layers("layers", *range(2 + rank), make=dense),
        "layers.0.w layers.1.w", "layers.2.w layers.3.w layers.4.w",
    ),
    "layers with numbers of the whole model": (
        lambda rank: layers("layers", 2 * rank, 2 * rank + 1, make=dense),
        "layers.0.w layers.1.w", "layers.2.w layers.3.w",
    ),
    "a layer without parameters": (
        lambda rank: nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU()), "0.weight", "2.weight"
    ),
    "a name without a number": (lambda r: nn.Linear(2, 2, bias=False), "stage0of2.weight", "stage1of2.weight"),
    "different names": (lambda rank: module(**{f"part{rank}": dense()}), "part0", "part1"),
    "a shared embedding": (lambda rank: module(emb=dense(shared_embedding=True)), "emb", "emb"),
}  # fmt: skip


@pytest.mark.parametrize("axis", ["ep", "pp"])
def test_parts_are_named_as_if_one_rank_had_all(axis: str) -> None:
    for case, (make, *expected) in {"ep": EXPERTS, "pp": STAGES}[axis].items():
        names = [[tensor.key for tensor in of_rank.values()] for of_rank in placed(axis, [make(0), make(1)])]
        assert names == [of_rank.split() for of_rank in expected], case


@pytest.mark.parametrize("axis", ["ep", "pp"])
def test_prefixes_and_keys_of_the_caller_are_kept(axis: str) -> None:
    def rename(state: Any) -> None:
        for tensor in state.values():
            tensor.key = f"own.{tensor.key}.key"

    for case, (make, *expected) in {"ep": EXPERTS, "pp": STAGES}[axis].items():
        models = [make(0), make(1)]
        prefixed = placed(axis, models, lambda state: add_prefix_for_sharding(state, "chunk.0."))
        names = [[tensor.key.removeprefix("chunk.0.") for tensor in of_rank.values()] for of_rank in prefixed]
        assert names == [of_rank.split() for of_rank in expected], case
        keys = [tensor.key for of_rank in placed(axis, models, rename) for tensor in of_rank.values()]
        assert all("own." in key and key.endswith(".key") for key in keys), case


def test_an_embedding_of_two_stages_is_saved_by_the_first() -> None:
    ids = [of_rank["emb"].replica_id for of_rank in placed("pp", [module(emb=dense(shared_embedding=True))] * 2)]
    assert ids == [(0, 0, 0), (1, 0, 0)]


def test_what_tensor_parallel_ranks_share_has_one_main_replica() -> None:
    marks = {"tensor_model_parallel": True, "partition_dim": 1}
    first, second = placed("tp", [module(w=dense(**marks), bias=dense(partition_dim=-1)) for _ in range(2)])
    assert (first["w"].global_shape, second["w"].global_offset) == ((2, 6), (0, 3))
    assert (first["w"].replica_id, second["w"].replica_id) == ((0, 0, 0), (0, 0, 0))
    assert (first["bias"].replica_id, second["bias"].replica_id) == ((0, 0, 0), (0, 1, 0))


def test_a_part_in_two_pieces_is_two_runs_of_rows_of_the_whole() -> None:
    """As of a fused gate and value, of which each rank has a part."""
    marks = {"tensor_model_parallel": True, "partition_dim": 0, "partition_stride": 2}
    for rank, of_rank in enumerate(placed("tp", [module(w=dense(**marks)) for _ in range(2)])):
        runs = [(s.row_start, s.row_stop, s.global_shape, s.global_offset) for s in of_rank["w"].segments]
        assert runs == [(0, 1, (4, 3), (rank, 0)), (1, 2, (4, 3), (2 + rank, 0))]


def test_a_stack_of_experts_is_cut_into_those_of_each_rank() -> None:
    for rank, of_rank in enumerate(placed("ep", [module(stack=expert(3, 2, 4)) for _ in range(2)])):
        stack = of_rank["stack"]
        assert (stack.key, stack.global_shape, stack.global_offset) == ("stack", (6, 2, 4), (3 * rank, 0, 0))


CUT = {"tensor_model_parallel": True}
UNPLACED: dict[str, tuple[dict[str, Any], str]] = {  # the second rank's marks
    "no dim": (CUT, "w of shape (2, 3) has tensor_model_parallel=True, but no partition_dim; set param.partition_dim"),
    "dim too large": (CUT | {"partition_dim": 2}, "but partition_dim=2; set param.partition_dim"),
    "strided columns": (
        CUT | {"partition_dim": 1, "partition_stride": 3}, "a stride above 1 is supported along dim 0"
    ),
}  # fmt: skip


@pytest.mark.parametrize("kind", ["dense", "expert"])
def test_uneven_parts_are_refused_when_they_are_placed(kind: str) -> None:
    def part(rows: int) -> nn.Module:
        param: Any = nn.Parameter(torch.zeros(rows, 4))
        vars(param).update(CUT, partition_dim=0, allreduce=kind == "dense")
        return module(layers__n0__w=param)

    message = r"layers.0.w is tensor parallel, and its parts have different shapes: (3, 4), (2, 4) by rank; only equal"
    axis = "tp" if kind == "dense" else "expert_tp"
    for refused in placed(axis, [part(3), part(2)]):
        assert message in refused


@pytest.mark.parametrize("case", UNPLACED)
def test_an_error_of_one_rank_is_raised_on_both(case: str) -> None:
    marks, message = UNPLACED[case]
    first, second = placed("tp", [module(w=dense(**CUT, partition_dim=0)), module(w=dense(**marks))])
    assert message in second
    assert first == f"rank 1 refused: {second}"


def test_a_module_that_describes_itself_is_believed() -> None:
    class Described(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.w = dense(tensor_model_parallel=True)

        def sharded_state_dict(self, prefix: str = "") -> dict[str, Any]:
            return {f"{prefix}w": ShardedTensor.from_rank_offsets(f"{prefix}fused", self.w, (0, 1, 3))}

    model = nn.Sequential(nn.Linear(2, 2), Described())
    state = sharded_model(model)
    assert list(state) == ["0.weight", "0.bias", "1.w"]
    assert (state["1.w"].key, state["1.w"].global_shape, state["1.w"].data) == ("1.fused", (6, 3), model[1].w)


class Wrapper(nn.Module):
    """As Megatron-Core's: its state dict has the names of the model inside."""

    def __init__(self, module: nn.Module):
        super().__init__()
        self.module = module

    def state_dict(self, **options: Any) -> dict[str, Any]:
        return self.module.state_dict(**options)


def test_the_marks_of_a_wrapped_model_are_those_of_the_model() -> None:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.BatchNorm1d(2) for _ in range(3))})
    for param in model.parameters():
        param.allreduce = False
    wrapped, plain = (
        {name: replace(entry.marks, tensor=None) for name, entry in sharded_model(of).items()}
        for of in (Wrapper(model), model)
    )
    assert wrapped == plain
    assert wrapped["layers.2.running_mean"].is_expert
    assert wrapped["layers.2.running_mean"].list_len == 3
