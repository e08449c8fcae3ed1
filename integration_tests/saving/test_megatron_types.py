"""A state in Megatron-Core's own types, saved and loaded in the form of its optimizers; ranks are threads."""

from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import megatron_types
import pytest
import torch
from megatron_types import Saved
from parity import Case, Net, Numbers, Spread, Wrapping, norms_while_training, roles_over
from torch import Tensor

from opt_checkpoint import CheckpointExistsError, load, save, sharded_model
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel, UnusableGradientError
from opt_distributed.comm import Alone, Comm
from opt_stack import ConfigError, Optimizer, get_optimizer

STEPS = 3
TYPE = "distrib_optim_sharding_type"


@pytest.fixture(autouse=True)
def types(monkeypatch: pytest.MonkeyPatch) -> None:
    megatron_types.install(monkeypatch)


def case(spread: Spread, numbers: Numbers = Numbers.BF16, rule: str = "adam", size: int = 2) -> Case:
    wrapping = Wrapping.PLAIN if spread is Spread.REPLICATED else Wrapping.WRAPPED
    return Case(size=size, spread=spread, numbers=numbers, rule=rule, clips=True, wrapping=wrapping)


def build(of: Case, comm: Comm, **changes: Any) -> tuple[Any, Optimizer]:
    config = replace(of.config, **changes)
    roles = roles_over(comm)
    net = Net(of.numbers.dtype)
    chunk: Any = net
    if of.wrapping is Wrapping.WRAPPED:
        chunk = DistributedDataParallel(of.ddp_config, net, groups=roles, optimizer_config=config)
    return chunk, get_optimizer(config, [chunk], pg_collection=roles)


def described(chunk: Any, rank: int) -> dict[str, Any]:
    """As Megatron-Core describes a model: layers are stacked, and a gated matrix is saved in halves."""
    state: dict[str, Any] = {}
    for name, param in getattr(chunk, "module", chunk).named_parameters():
        shape = tuple(param.shape)
        replica = (0, 0, rank)
        if name == "second.weight":
            state[name] = megatron_types.ShardedTensorFactory(name, param, halves, torch.cat, replica)
            continue
        layers = (1,) * (name == "first.weight")
        whole = (*layers, *shape)
        state[name] = megatron_types.ShardedTensor(
            name, param, param.dtype, shape, whole, (0,) * len(whole), (1,) * len(whole), replica, len(layers)
        )
    return {"model": state}


def halves(key: str, data: Tensor, replica_id: Any, flattened_range: slice | None) -> list[Any]:
    parts = data.chunk(2)
    rows = len(data) // 2
    shape = tuple(data.shape)
    return [
        megatron_types.ShardedTensor(
            key, part, part.dtype, tuple(part.shape), shape, (rows * number, 0), (2, 1), replica_id
        )
        for number, part in enumerate(parts)
    ]


class Run(NamedTuple):
    """A rank after training, or after a load."""

    state: dict[str, Any]
    weights: dict[str, Tensor]
    metadata: dict[str, Any]


def train(of: Case, given: dict[str, Any], comm: Comm, **changes: Any) -> Run:
    chunk, optimizer = build(of, comm, **changes)
    norms_while_training(chunk, optimizer, range(STEPS), comm, shapes_of(chunk))
    metadata = dict(given)
    state = optimizer.sharded_state_dict(described(chunk, comm.rank), metadata=metadata)
    return Run(state, weights(chunk), metadata)


def shapes_of(chunk: Any) -> dict[str, tuple[int, ...]]:
    return {name.removesuffix(".weight"): tuple(weight.shape) for name, weight in weights(chunk).items()}


def weights(chunk: Any) -> dict[str, Tensor]:
    return {name: param.detach().clone() for name, param in getattr(chunk, "module", chunk).named_parameters()}


def resume(of: Case, saved: Saved, run: Run, comm: Comm, **changes: Any) -> Run:
    """Load on another layout, and describe the state again."""
    chunk, optimizer = build(of, comm, **changes)
    with torch.no_grad():
        for name, param in getattr(chunk, "module", chunk).named_parameters():
            param.copy_(run.weights[name])
    metadata = dict(run.metadata)
    state = optimizer.sharded_state_dict(described(chunk, comm.rank), is_loading=True, metadata=metadata)
    optimizer.load_state_dict(megatron_types.load(saved, state))
    again = optimizer.sharded_state_dict(described(chunk, comm.rank), metadata=metadata)
    return Run(again, weights(chunk), metadata)


def save_all(runs: list[Run]) -> Saved:
    return megatron_types.save([run.state for run in runs])


ZERO = {TYPE: "dp_reshardable"}
CASES: dict[str, tuple[Case, dict[str, Any], Case]] = {
    "fp32": (case(Spread.REPLICATED, Numbers.FP32), {}, case(Spread.REPLICATED, Numbers.FP32, size=3)),
    "16 bits": (case(Spread.REPLICATED), {}, case(Spread.REPLICATED, size=1)),
    "loss scale": (case(Spread.REPLICATED, Numbers.FP16), {}, case(Spread.FLAT, Numbers.FP16, size=3)),
    "flat fp32": (case(Spread.FLAT, Numbers.FP32), ZERO, case(Spread.FLAT, Numbers.FP32, size=3)),
    "flat": (case(Spread.FLAT), ZERO, case(Spread.FLAT, size=3)),
    "flat to replicated": (case(Spread.FLAT, Numbers.FP16), ZERO, case(Spread.REPLICATED, Numbers.FP16)),
    "whole": (case(Spread.WHOLE, rule="muon"), ZERO, case(Spread.WHOLE, rule="muon", size=3)),
    "whole without metadata": (case(Spread.WHOLE, rule="muon"), {}, case(Spread.REPLICATED, rule="muon")),
    "lion": (case(Spread.REPLICATED, rule="lion"), {}, case(Spread.REPLICATED, rule="lion", size=1)),
    "matrix states": (case(Spread.WHOLE, rule="soap"), ZERO, case(Spread.WHOLE, rule="soap", size=3)),
}


@pytest.mark.parametrize("name", CASES)
def test_states_in_megatron_cores_form_load_on_other_layouts(name: str) -> None:
    before, metadata, after = CASES[name]
    runs = run_threads(before.size, lambda comm: train(before, metadata, comm, skip_sigma=6.0))
    saved = save_all(runs)
    assert "'spikes': {'grad_norms': {'values': [" in str(saved.common)
    assert runs[0].metadata == {"chained_optim_avoid_prefix": True, **dict.fromkeys(metadata, "fully_reshardable")}
    loaded = run_threads(after.size, lambda comm: resume(after, saved, runs[0], comm, skip_sigma=6.0))
    again = save_all(loaded)
    assert again.tensors.keys() == saved.tensors.keys()
    assert all(torch.equal(again.tensors[key], value) for key, value in saved.tensors.items())
    assert str(again.common) == str(saved.common)
    for param, weight in runs[0].weights.items():
        assert torch.equal(loaded[0].weights[param], weight)


@pytest.mark.parametrize("rule", ["adam", "muon"])
def test_each_optimizer_of_a_chain_has_its_groups(rule: str) -> None:
    of = case(Spread.REPLICATED, rule=rule, size=1)
    net = Net(of.numbers.dtype)
    for expert in (net.first.weight, net.bias.weight):
        expert.allreduce = False
    optimizer = get_optimizer(of.config, [net], pg_collection=roles_over(Alone()))
    state = optimizer.sharded_state_dict(described(net, 0), metadata={})
    found = []
    for number in sorted(state):
        groups = state[number]["optimizer"]["param_groups"]
        found.append({(group.get("optimizer"), group["is_expert_parallel"]) for group in groups})
    assert found[:2] == [{(None, False)}, {(None, True)}]  # Megatron-Core does not name the configured rule
    assert found[2:] == ([] if rule == "adam" else [{("adam", False)}, {("adam", True)}])


def as_megatron_core(common: dict[Any, Any]) -> dict[Any, Any]:
    """The plain values without ours."""
    whole = {key: value for key, value in common.items() if key != "opt_stack"}
    return {**whole, 0: as_megatron_core(whole[0])} if 0 in whole else whole


@pytest.mark.parametrize("name", CASES)
def test_states_that_megatron_core_saved_load(name: str) -> None:
    """It saves the same tensors and groups, and nothing of ours."""
    before, metadata, after = CASES[name]
    runs = run_threads(before.size, lambda comm: train(before, metadata, comm))
    saved = save_all(runs)
    theirs = Saved(saved.tensors, as_megatron_core(saved.common))
    again = save_all(run_threads(after.size, lambda comm: resume(after, theirs, runs[0], comm)))
    assert all(torch.equal(again.tensors[key], value) for key, value in saved.tensors.items())
    assert str(again.common) == str(saved.common)


def without_steps(common: dict[str, Any]) -> dict[str, Any]:
    groups = [{k: v for k, v in group.items() if k != "step"} for group in common["param_groups"]]
    return {"param_groups": groups, "state": {}}


FP32 = case(Spread.REPLICATED, Numbers.FP32)
REFUSED: dict[str, tuple[Case, dict[str, Any], Any, str]] = {
    "another format": (case(Spread.FLAT), ZERO, lambda saved: saved, "save it in Megatron-LM with --dist-ckpt-optim-"),
    "16 bits": (
        FP32, {}, lambda common: {"optimizer": common}, "holds the state of an optimizer of 16-bit parameters without"
    ),
    "a chain": (FP32, {}, lambda common: {0: common, 1: common}, "an optimizer of fp32 parameters, in a chain"),
    "another rate": (FP32, {"lr": 0.5}, lambda common: {**common, "opt_stack": {}}, "0 saved groups .* have the ident"),
    "no step count": (FP32, {}, without_steps, "no step count"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_loaded_is_refused_on_every_rank(name: str) -> None:
    of, changes, edit, message = REFUSED[name]
    runs = run_threads(of.size, lambda comm: train(of, {}, comm))
    saved = save_all(runs)
    theirs = {key: value for key, value in saved.common.items() if key != "opt_stack"}
    metadata = {} if changes.get(TYPE) is None else changes
    fields = {} if metadata else changes

    def refused(comm: Comm) -> str:
        with pytest.raises(ConfigError, match=message) as caught:
            resume(of, Saved(saved.tensors, edit(theirs)), runs[0]._replace(metadata=metadata), comm, **fields)
        return str(caught.value)

    assert len(set(run_threads(of.size, refused))) == 1


def test_step_counts_that_differ_are_kept() -> None:
    """Megatron-Core has one count for all: it finds none, and refuses the checkpoint."""

    def skewed(comm: Comm) -> Run:
        chunk, optimizer = build(FP32, comm)
        norms_while_training(chunk, optimizer, range(STEPS), comm, shapes_of(chunk))
        optimizer.state[chunk.bias.weight] = {}  # as before its first step
        return Run(optimizer.sharded_state_dict(described(chunk, comm.rank)), weights(chunk), {})

    runs = run_threads(2, skewed)
    saved = save_all(runs)
    assert "common_step" not in str(saved.common)
    again = save_all(run_threads(2, lambda comm: resume(FP32, saved, runs[0], comm)))
    assert again.common["opt_stack"]["steps"]["bias.weight"] == 0
    assert str(again.common) == str(saved.common)


def test_opt_checkpoint_saves_and_loads_megatron_cores_types(tmp_path: Path) -> None:
    def trained() -> tuple[Any, Optimizer, dict[str, Any]]:
        chunk, optimizer = build(replace(FP32, size=1), Alone())
        norms_while_training(chunk, optimizer, range(STEPS), Alone(), shapes_of(chunk))
        rng = megatron_types.ShardedObject("rng", [{"seed": 3}], (1,), (0,))
        model = described(chunk, 0)
        return chunk, optimizer, {**model, "optimizer": optimizer.sharded_state_dict(model), "rng": rng}

    chunk, optimizer, state = trained()
    save(state, tmp_path / "saved")
    before = optimizer.state_dict()
    other, resumed, into = trained()
    with torch.no_grad():
        for param in other.parameters():
            param.zero_()
    loaded = load(into, tmp_path / "saved").state
    resumed.load_state_dict(loaded["optimizer"])
    assert loaded["rng"] == [{"seed": 3}]
    assert all(torch.equal(a, b) for a, b in zip(other.parameters(), chunk.parameters(), strict=True))
    assert str(resumed.state_dict()) == str(before)
    chunk.sharded_state_dict = lambda prefix="": described(chunk, 0)["model"]
    assert {type(value).__module__ for value in sharded_model(chunk).values()} == {
        "opt_checkpoint.state.sharded",
        "opt_checkpoint.state.factory",
    }


def test_dist_checkpointing_saves_and_loads_as_in_megatron_core(tmp_path: Path) -> None:
    from opt_stack.megatron.dist_checkpointing import load, load_common_state_dict, load_content_metadata, save

    def trained() -> tuple[Optimizer, dict[str, Any]]:
        chunk, optimizer = build(replace(FP32, size=1), Alone())
        norms_while_training(chunk, optimizer, range(STEPS), Alone(), shapes_of(chunk))
        model = described(chunk, 0)
        return optimizer, {**model, "optimizer": optimizer.sharded_state_dict(model)}

    optimizer, state = trained()
    scale = torch.arange(9.0)[3::3]
    save({**state, "iteration": 7, "scales": [scale], "scale": scale}, tmp_path, content_metadata={"a": 1})
    assert str(load_common_state_dict(tmp_path)["scales"]) == str([scale])
    assert torch.equal(load_common_state_dict(tmp_path)["scale"], scale)
    before = optimizer.state_dict()
    other, into = trained()
    loaded, missing, unexpected = load(into, tmp_path, strict="return_all")
    other.load_state_dict(loaded["optimizer"])
    assert str(other.state_dict()) == str(before)
    assert torch.equal(loaded["scale"], scale)
    assert (loaded["iteration"], load_content_metadata(tmp_path)) == (7, {"a": 1})
    assert (missing, unexpected) == (set(), set())
    for options in ({"sharded_strategy": 1}, {"async_sharded_save": True}):
        with pytest.raises(ValueError, match=next(iter(options))):
            save(state, tmp_path / "again", **options)
    (tmp_path / "folder").mkdir()
    (tmp_path / "link").symlink_to(tmp_path / "folder")
    with pytest.raises(CheckpointExistsError, match="link"):
        save(state, tmp_path / "link")


def test_states_that_megatron_core_saved_at_shifted_places() -> None:
    of = case(Spread.FLAT)
    runs = run_threads(2, lambda comm: train(of, ZERO, comm))
    saved = save_all(runs)
    main = saved.tensors["optimizer.state.param.qkv.weight"].view(-1)
    main.copy_(torch.cat([main[20:], torch.zeros(20)]))
    theirs = Saved(saved.tensors, {key: value for key, value in saved.common.items() if key != "opt_stack"})

    def refused(comm: Comm) -> str:
        with pytest.raises(ConfigError, match=r"shifted places \(qkv.weight\)") as caught:
            resume(of, theirs, runs[0], comm)
        return str(caught.value)

    assert len(set(run_threads(2, refused))) == 1


def test_a_save_in_megatrons_types_of_old_weights_is_refused() -> None:
    """The saved main weights were those of before a load into the model."""

    def rank_main(comm: Comm) -> None:
        chunk, optimizer = build(case(Spread.REPLICATED), comm)
        if comm.rank == 1:
            with torch.no_grad():
                chunk.first.weight.fill_(0.5)
        with pytest.raises(UnusableGradientError, match=r"'first\.weight' has other values than its main values"):
            optimizer.sharded_state_dict(described(chunk, comm.rank))
        optimizer.sharded_state_dict(described(chunk, comm.rank), is_loading=True)

    run_threads(2, rank_main)
