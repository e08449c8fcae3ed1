"""Anyone's optimizer: torch.optim under FSDP2, tensor-parallel DTensors, DDP and alone, from each to each."""

import copy
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import run_ranks
from processes import FSDP2_RUNS, refusal, world_of_one
from small_models import assert_same_state, grouped, network, state_of, train, trained
from states import whole_tensors
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel as FSDP1
from torch.distributed.fsdp import fully_shard
from torch.distributed.optim import ZeroRedundancyOptimizer
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from torch.nn.parallel import DistributedDataParallel

from opt_checkpoint import (
    CheckpointingException,
    CheckpointKeyError,
    CheckpointMismatchError,
    GroupMismatchError,
    load,
    load_optimizer,
    save,
    sharded_like,
    sharded_model,
    sharded_optimizer,
)
from opt_checkpoint.state import former_names

STEPS = 3
CUT = {"0": ColwiseParallel(), "2": RowwiseParallel()}


def wrapped(kind: str, size: int, *, rows: int = 7) -> nn.Module:
    """The small network under a wrapper of torch, which computes the same everywhere."""
    model = network(rows=rows)
    if kind == "fsdp2 of tp":
        mesh = init_device_mesh("cpu", (2, size // 2), mesh_dim_names=("dp", "tp"))
        parallelize_module(model, mesh["tp"], CUT)
        fully_shard(model, mesh=mesh["dp"])
    elif kind == "fsdp2":
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    return DistributedDataParallel(model) if kind == "ddp" else model


def save_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path) -> Path:
    save({"optimizer": sharded_optimizer(model, optimizer)}, path)
    return path


# ----- from ranks to ranks


def train_and_save(rank: int, size: int, kind: str, rows: int, path: str) -> list[float]:
    model = wrapped(kind, size, rows=rows)
    optimizer = grouped(model)
    losses = train(model, optimizer, 0, STEPS)
    if kind == "fsdp2 of tp":
        assert any(type(p).__name__ == "_StridedShard" for p in model[0].weight.placements)
    save({"model": sharded_model(model), "optimizer": sharded_optimizer(model, optimizer)}, path)
    return losses + train(model, optimizer, STEPS, 2 * STEPS)


def load_and_train(rank: int, size: int, kind: str, rows: int, path: str) -> list[float]:
    model = wrapped(kind, size, rows=rows)
    with torch.no_grad():
        for p in model.parameters():
            p.zero_()
    optimizer = grouped(model, lr=9.0)
    load({"model": sharded_model(model)}, path)
    report = load_optimizer(model, optimizer, path)
    assert report.uninitialised == report.gone == report.groups.new == ()
    assert [g["lr"] for g in optimizer.param_groups] == [0.05, 0.025]
    if kind == "fsdp2":
        assert all(isinstance(s["exp_avg"], DTensor) for s in optimizer.state.values())
    return train(model, optimizer, STEPS, 2 * STEPS)


def assert_losses_go_on(path: Path, before: tuple[str, int], after: Any, rows: int) -> None:
    (losses, *_) = run_ranks(before[1], train_and_save, before[0], rows, str(path))
    for kind, size in after:
        for resumed in run_ranks(size, load_and_train, kind, rows, str(path)):
            if (kind, size) == before:
                assert resumed == losses[STEPS:]
            # Averaging equal gradients over three ranks rounds: a few units of float32 in the third digit of Adam.
            assert resumed == pytest.approx(losses[STEPS:], rel=1e-4), (kind, size)


# On torch 2.6 a model that FSDP2 sharded cannot run without a GPU: `torch.cpu.Stream` records no events.
WORLDS = [("alone", 1), ("ddp", 2), *([("fsdp2", 2), ("fsdp2", 3)] if FSDP2_RUNS else [])]


@pytest.mark.parametrize("before", WORLDS, ids=lambda w: f"{w[0]}{w[1]}")
def test_from_each_to_each_the_losses_go_on(tmp_path: Path, before: tuple[str, int]) -> None:
    assert_losses_go_on(tmp_path / "x", before, WORLDS, 7)


@pytest.mark.skipif(not FSDP2_RUNS, reason="this torch runs FSDP2 on GPUs only")
def test_fsdp2_of_tensor_parallel_parameters_to_and_from_it(tmp_path: Path) -> None:
    """Both cut the rows of the first matrix: FSDP2 what tensor parallelism left, though its mesh axis stands first."""
    both = ("fsdp2 of tp", 4)
    apart = ("fsdp2", 2)
    for before, after in ((both, (both, ("alone", 1))), (apart, (both,))):
        assert_losses_go_on(tmp_path / before[0], before, after, 8)
    weights = (whole_tensors(tmp_path / kind)["model.0.weight"] for kind, _ in (both, apart))
    torch.testing.assert_close(*weights, rtol=1e-4, atol=1e-5)


def refuse_runs(rank: int, size: int) -> str:
    weight = wrapped("fsdp2 of tp", size, rows=8)[0].weight
    placements = [weight.placements[0], Replicate()]
    options = {"run_check": False, "shape": weight.shape, "stride": weight.stride()}
    with pytest.raises(CheckpointingException) as caught:
        sharded_like("w", DTensor.from_local(torch.zeros(4, 5), weight.device_mesh, placements, **options))
    return str(caught.value)


def test_rows_in_several_runs_are_refused() -> None:
    for message in run_ranks(4, refuse_runs):
        assert "w of shape (8, 5) is placed as" in message
        assert "its local values (4, 5) may not be one block of it. Make every cut" in message


# ----- one process


def assert_comes_back(model: nn.Module, optimizer: torch.optim.Optimizer, path: Path, make: Any) -> Any:
    """Saved, and loaded into a copy of the model and a new optimizer; these two, and the report."""
    again = copy.deepcopy(model)
    other = make(list(again.parameters()))
    other.param_groups[0]["lr"] = 9.0
    report = load_optimizer(again, other, save_optimizer(model, optimizer, path))
    assert_same_state(state_of(again, other), state_of(model, optimizer))
    assert other.param_groups[0]["lr"] == optimizer.param_groups[0]["lr"]
    return again, other, report


OPTIMIZERS: dict[str, Any] = {
    "sgd": lambda ps: torch.optim.SGD(ps, lr=0.1, momentum=0.9),
    "amsgrad": lambda ps: torch.optim.Adam(ps, amsgrad=True),
    "adagrad": torch.optim.Adagrad,
    "rmsprop": lambda ps: torch.optim.RMSprop(ps, momentum=0.5, centered=True),
    "nadam": torch.optim.NAdam,
    "adafactor": torch.optim.Adafactor,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_other_optimizers_come_back_with_every_state(tmp_path: Path, name: str) -> None:
    model = network()
    model[0].bias.requires_grad_(False)  # which has no state
    optimizer = OPTIMIZERS[name](list(model.parameters()))
    train(model, optimizer, 0, STEPS)
    again, other, _ = assert_comes_back(model, optimizer, tmp_path / "x", OPTIMIZERS[name])
    assert train(again, other, STEPS, 6) == train(model, optimizer, STEPS, 6)


def test_never_stepped_frozen_and_zero_gradient_parameters(tmp_path: Path) -> None:
    model = network()
    optimizer = torch.optim.AdamW(model.parameters())
    report = load_optimizer(model, optimizer, save_optimizer(model, optimizer, tmp_path / "never"))
    assert len(report.uninitialised) == 4
    assert not optimizer.state
    model[0].weight.requires_grad_(False)
    model[2].bias.register_hook(torch.zeros_like)
    train(model, optimizer, 0, 2)
    again, other, report = assert_comes_back(model, optimizer, tmp_path / "frozen", torch.optim.AdamW)
    assert report.uninitialised == ("0.weight",)
    assert other.state[again[2].bias]["step"].item() == 2


def test_tied_parameters_are_saved_once(tmp_path: Path) -> None:
    model = nn.ModuleDict({"output": nn.Linear(3, 3, bias=False), "embedding": nn.Linear(3, 3, bias=False)})
    model["output"].weight = model["embedding"].weight
    optimizer = torch.optim.AdamW(model.parameters())
    model["output"].weight.square().sum().backward()
    optimizer.step()
    assert list(sharded_optimizer(model, optimizer)["state_names"]) == ["embedding.weight"]
    load_optimizer(model, optimizer, save_optimizer(model, optimizer, tmp_path / "x"))
    assert optimizer.state[model["output"].weight]["step"].item() == 1


def test_a_wide_moment_of_a_narrow_parameter_stays_wide(tmp_path: Path) -> None:
    param = nn.Parameter(torch.ones(4, dtype=torch.bfloat16))
    model = nn.ParameterDict({"w": param})
    optimizer = torch.optim.AdamW([param])
    optimizer.state[param] = {"step": torch.tensor(1.0), "exp_avg": torch.full((4,), 1.001)}
    load_optimizer(model, optimizer, save_optimizer(model, optimizer, tmp_path / "x"))
    assert optimizer.state[param]["exp_avg"].dtype == torch.float32
    assert optimizer.state[param]["exp_avg"][0].item() == pytest.approx(1.001, rel=1e-7)


class Holder(nn.Module):
    """A module under the name `name`, and a parameter `weight` next to it if asked for."""

    def __init__(self, name: str, child: nn.Module, *, weight: bool = False) -> None:
        super().__init__()
        self.add_module(name, child)
        if weight:
            self.weight = nn.Parameter(torch.ones(2, 2))


def compiled(model: nn.Module) -> Any:
    return torch.compile(model, backend="eager")


def inner_compiled() -> nn.Module:
    return Holder("layers", compiled(checkpoint_wrapper(nn.Linear(2, 2, bias=False))))


def fsdp1(model: nn.Module) -> nn.Module:
    return FSDP1(model, device_id=torch.device("cpu"), use_orig_params=True)


def linear() -> nn.Module:
    return nn.Linear(2, 2, bias=False)


NAMED: dict[str, tuple[Callable[[], nn.Module], set[str]]] = {
    "compiled around DDP": (lambda: compiled(DistributedDataParallel(Holder("a", linear()))), {"a.weight"}),
    "DDP around compiled": (lambda: DistributedDataParallel(compiled(Holder("a", linear()))), {"a.weight"}),
    "DataParallel": (lambda: nn.DataParallel(Holder("a", linear())), {"a.weight"}),
    "compiled and checkpointed inside": (inner_compiled, {"layers.weight"}),
    "FSDP1 inside compiled": (lambda: compiled(fsdp1(Holder("a", linear()))), {"a.weight"}),
    "an only child module": (lambda: Holder("module", linear()), {"module.weight"}),
    "the same under DDP": (lambda: DistributedDataParallel(Holder("module", linear())), {"module.weight"}),
    "the same compiled under DDP": (
        lambda: compiled(DistributedDataParallel(Holder("module", linear()))), {"module.weight"}
    ),
    "modules in modules": (lambda: Holder("module", Holder("module", linear())), {"module.module.weight"}),
    "a module and a weight": (lambda: Holder("module", linear(), weight=True), {"module.weight", "weight"}),
    "the same in DDP": (
        lambda: DistributedDataParallel(Holder("module", linear(), weight=True)), {"module.weight", "weight"}
    ),
    "an inner module": (lambda: Holder("encoder", Holder("module", linear())), {"encoder.module.weight"}),
    "modules with the names of wrappers": (
        lambda: Holder("_orig_mod", Holder("_fsdp_wrapped_module", linear()), weight=True),
        {"_orig_mod._fsdp_wrapped_module.weight", "weight"},
    ),
}  # fmt: skip


@pytest.fixture(scope="module")
def _world() -> Iterator[None]:
    with world_of_one():
        yield


@pytest.mark.filterwarnings("ignore")
@pytest.mark.usefixtures("_world")
@pytest.mark.parametrize("case", NAMED)
def test_names_are_those_without_wrappers(case: str) -> None:
    make, names = NAMED[case]
    model = make()
    assert set(sharded_model(model)) == names
    optimizer = torch.optim.SGD(model.parameters(), momentum=0.9)
    assert set(sharded_optimizer(model, optimizer)["state_names"]) == names
    assert {described.marks.name for described in sharded_model(model).values()} == names


FORMER: dict[str, tuple[set[str], set[str], dict[str, str]]] = {  # names, what is stored, former names
    "compiled around DDP": ({"a", "b"}, {"module.a", "module.b"}, {"a": "module.a", "b": "module.b"}),
    "an only child": ({"module.a", "module.b"}, {"a", "b"}, {"module.a": "a", "module.b": "b"}),
    "names of wrappers": ({"_orig_mod.a", "b"}, {"a", "b"}, {"_orig_mod.a": "a"}),
    "both": ({"module._orig_mod.a"}, {"a"}, {"module._orig_mod.a": "a"}),
    "a new layer": ({"a", "b"}, {"module.a"}, {"a": "module.a"}),
    "nothing": ({"a"}, {"b"}, {}),
    "current names": ({"module.a"}, {"module.a", "a"}, {}),
    "a missing layer of a current one": ({"a", "b"}, {"a", "module.b"}, {}),
    "a name that another tensor has": ({"module.a", "a"}, {"a"}, {}),
}


@pytest.mark.parametrize("case", FORMER)
def test_former_names_stand_in_for_missing_ones_only(case: str) -> None:
    names, stored, former = FORMER[case]
    assert former_names(names, stored.__contains__) == former


# ----- what is refused, on every rank, with the optimizer as it was


def test_when_loading_fails_the_optimizer_is_as_it_was(tmp_path: Path) -> None:
    model, optimizer = trained(STEPS)
    path = save_optimizer(model, optimizer, tmp_path / "x")
    before = copy.deepcopy(state_of(model, optimizer))
    train(model, optimizer, 0, 1)
    after = copy.deepcopy(state_of(model, optimizer))
    joined = torch.optim.AdamW(list(model.parameters()), lr=3.0)
    joined.state.update(optimizer.state)
    with pytest.raises(GroupMismatchError, match="'weight_decay'"):
        load_optimizer(model, joined, path)
    assert_same_state(state_of(model, joined), after)
    assert joined.param_groups[0]["lr"] == 3.0
    load_optimizer(model, joined, path, on_conflict="current", override={"lr": 0.5})
    assert_same_state(state_of(model, joined), before)
    assert joined.param_groups[0]["lr"] == 0.5


def test_states_that_were_lost_are_named(tmp_path: Path) -> None:
    model, optimizer = trained(STEPS)
    state = sharded_optimizer(model, optimizer)
    del state["state"]["0.weight"]["exp_avg_sq"], state["state"]["0.bias"]["step"]
    save({"optimizer": state}, tmp_path / "x")
    with pytest.raises(CheckpointKeyError, match=r"saved with: (exp_avg_sq of 0.weight|, |step of 0.bias){3}$"):
        load_optimizer(model, optimizer, tmp_path / "x")


def load_into_another_shape(rank: int, size: int, path: str) -> str:
    model: nn.Module = nn.Sequential(nn.Linear(5, 4))
    if size > 1:
        fully_shard(model, mesh=init_device_mesh("cpu", (size,)))
    optimizer = torch.optim.AdamW(model.parameters())
    with pytest.raises(CheckpointMismatchError) as caught:
        load_optimizer(model, optimizer, path, on_conflict="saved")
    assert not optimizer.state
    return str(caught.value)


def load_with_a_strange_model_on_rank_1(rank: int, size: int, path: str) -> str:
    model = network()
    optimizer = grouped(model)
    with pytest.raises(CheckpointingException) as caught:
        load_optimizer(model if rank == 0 else network(), optimizer, path)
    assert not optimizer.state
    return str(caught.value)


def test_what_does_not_fit_is_refused_on_every_rank(tmp_path: Path) -> None:
    path = save_optimizer(*trained(STEPS), tmp_path / "x")
    for message in (load_into_another_shape(0, 1, str(path)), *run_ranks(2, load_into_another_shape, str(path))):
        assert "0.weight has shape [4, 5], but its state was saved for shape [7, 5]" in message
    for message in run_ranks(2, load_with_a_strange_model_on_rank_1, str(path)):
        assert "rank 1: CheckpointValueError: a parameter of shape (7, 5) of the optimizer is not in the mod" in message


def test_state_of_another_class_of_optimizer_is_reported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model, optimizer = trained(STEPS)
    path = save_optimizer(model, optimizer, tmp_path / "x")
    load_optimizer(model, optimizer, path)
    assert "another optimizer" not in caplog.text
    load_optimizer(model, torch.optim.SGD(model.parameters(), lr=0.1), path, on_conflict="saved")
    assert "was saved by a different optimizer than SGD: it has amsgrad, betas" in caplog.text
    assert "the states exp_avg, exp_avg_sq, step" in caplog.text


def test_names_that_would_become_one_are_refused() -> None:
    model = nn.DataParallel(linear())
    model.weight = nn.Parameter(torch.ones(2, 2))
    for describe in (sharded_model, lambda m: sharded_optimizer(m, torch.optim.SGD(m.parameters(), momentum=0.9))):
        with pytest.raises(CheckpointingException, match=r"weight.* would both be stored as weight; rename one"):
            describe(model)


# ----- optimizers whose states or parameters are somewhere else


@pytest.mark.skipif(not FSDP2_RUNS, reason="this torch runs FSDP2 on GPUs only")
@pytest.mark.usefixtures("_world")
def test_an_fsdp2_model_is_saved_and_loaded_after_an_evaluation(tmp_path: Path) -> None:
    model = network()
    fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
    optimizer = grouped(model)
    train(model, optimizer, 0, 2)
    before = copy.deepcopy({name: state["exp_avg"].full_tensor() for name, state in state_of(model, optimizer).items()})
    for number in range(2):
        with torch.no_grad():
            model(torch.zeros(2, 5))
        assert not isinstance(model[0].weight, DTensor)
        if number == 0:
            save_optimizer(model, optimizer, tmp_path / "x")
        else:
            load_optimizer(model, optimizer, tmp_path / "x")
    for name, state in state_of(model, optimizer).items():
        assert torch.equal(state["exp_avg"].full_tensor(), before[name])
    train(model, optimizer, 2, 3)


class Codes(torch.Tensor):
    """A tensor with a meaning of its own."""


@pytest.mark.usefixtures("_world")
def test_states_of_a_subclass_of_tensor_are_refused_by_key() -> None:
    model, optimizer = trained(1)
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(7, 5).as_subclass(Codes)
    with pytest.raises(
        CheckpointingException, match=r"optimizer\.state\.exp_avg\.0\.weight is a Codes, a subclass of Te"
    ):
        sharded_optimizer(model, optimizer)
    weight = nn.Parameter(distribute_tensor(torch.zeros(7, 5), init_device_mesh("cpu", (1,)), [Shard(0)]))
    optimizer = torch.optim.AdamW([weight])
    inner = torch.zeros(7, 5).as_subclass(Codes)
    optimizer.state[weight]["exp_avg"] = DTensor.from_local(inner, weight.device_mesh, [Shard(0)], run_check=False)
    with pytest.raises(CheckpointingException, match=r"exp_avg\.w is a Codes"):
        sharded_optimizer(nn.ParameterDict({"w": weight}), optimizer)


def local_shards(rank: int, size: int, path: str) -> list[str]:
    model = network()
    optimizer = ZeroRedundancyOptimizer(model.parameters(), torch.optim.AdamW, lr=0.1)
    train(model, optimizer, 0, 1)
    optimizer.consolidate_state_dict()
    flat = FSDP1(network(), device_id=torch.device("cpu"), use_orig_params=True)
    pairs = [(model, optimizer), (flat, torch.optim.AdamW(flat.parameters()))]
    calls = [lambda pair: sharded_optimizer(*pair), lambda pair: load_optimizer(*pair, path)]
    return [refusal(lambda call=call, pair=pair: call(pair)) for pair in pairs for call in calls]


@pytest.mark.filterwarnings("ignore")
def test_local_shards_of_torch_are_refused_on_every_rank(tmp_path: Path) -> None:
    path = save_optimizer(*trained(1), tmp_path / "x")
    for messages in run_ranks(2, local_shards, str(path)):
        assert all("ZeroRedundancyOptimizer keeps the state of each parameter on one rank" in m for m in messages[:2])
        assert all("the model is in FullyShardedDataParallel, whose flat shards" in m for m in messages[2:])


# ----- states of DTensors with another shape than the parameter's


class Factored(torch.optim.Optimizer):
    """Second moments by row and by column, kept and dropped, as Adafactor has them."""

    @torch.no_grad()
    def step(self) -> None:  # type: ignore[override]
        (p,) = self.param_groups[0]["params"]
        grad = 0.5 * p
        state = self.state[p]
        for name, dim, keep in (("row", 1, True), ("col", 0, True), ("row1", 1, False), ("col1", 0, False)):
            mean = (grad * grad).sum(dim=dim, keepdim=keep)
            if isinstance(mean, DTensor):
                mean = mean.redistribute(
                    placements=[q if isinstance(q, Shard) else Replicate() for q in mean.placements]
                )
            state[name] = state[name].lerp(mean, 0.5) if name in state else mean
        p -= 0.1 * grad / (state["row"] * state["col"] + 1).sqrt()


def factored(sharded: bool, steps: int) -> tuple[nn.Module, Factored]:
    model = nn.Linear(4, 9, bias=False)
    weight = torch.arange(36.0).view(9, 4) / 10
    if sharded:
        weight = distribute_tensor(weight, init_device_mesh("cpu", (torch.distributed.get_world_size(),)), [Shard(0)])
    model.weight = nn.Parameter(weight)
    optimizer = Factored(model.parameters(), {"lr": 0.1})
    for _ in range(steps):
        optimizer.step()
    return model, optimizer


def full(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def save_factored(rank: int, size: int, path: str) -> None:
    model, optimizer = factored(True, 2)
    save({"model": sharded_model(model), "optimizer": sharded_optimizer(model, optimizer)}, path)


def resume_factored(rank: int, size: int, path: Any, sharded: bool = True) -> None:
    model, optimizer = factored(sharded, 0)
    other, made = factored(sharded, 1)  # the layouts that the optimizer makes itself
    load({"model": sharded_model(model)}, path)
    load_optimizer(model, optimizer, path)
    for name, state in made.state[other.weight].items():
        loaded = optimizer.state[model.weight][name]
        assert (type(loaded), loaded.shape) == (DTensor if sharded else torch.Tensor, state.shape), name
        if sharded:
            assert (loaded.placements, loaded.to_local().shape) == (state.placements, state.to_local().shape), name
    optimizer.step()
    optimizer.step()
    alone, reference = factored(False, 4)
    assert torch.allclose(full(model.weight), alone.weight)
    for name, value in reference.state[alone.weight].items():
        assert torch.allclose(full(optimizer.state[model.weight][name]), value), name


def test_factored_states_reload_as_dtensors_on_any_ranks(tmp_path: Path) -> None:
    run_ranks(2, save_factored, str(tmp_path / "x"))
    for size in (3, 2, 1):
        run_ranks(size, resume_factored, str(tmp_path / "x"))
    resume_factored(0, 1, tmp_path / "x", sharded=False)
