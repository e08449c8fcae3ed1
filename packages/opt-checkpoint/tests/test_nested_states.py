"""Nested states: the path is part of the key, plain tensors are tensors, and a load says what it left."""

import copy
import logging
from collections import OrderedDict
from collections.abc import Callable
from contextlib import closing
from functools import partial
from io import BytesIO
from pathlib import Path
from typing import Any

import pytest
import torch
from checkpoint_ranks import load_as_ranks, run_ranks, save_as_ranks
from processes import world_of_one
from small_models import assert_same_weights, network, stepped
from states import assert_is_step, state_at
from torch import nn
from torch.distributed.checkpoint import load as dcp_load
from torch.distributed.checkpoint import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import Shard, distribute_tensor

from opt_checkpoint import (
    AsyncSaver,
    CheckpointingException,
    CheckpointKeyError,
    CheckpointMismatchError,
    CheckpointNotFoundError,
    ShardedTensor,
    StrictHandling,
    load,
    load_optimizer,
    load_safetensors,
    read_common,
    read_index,
    save,
    save_safetensors,
    sharded_like,
    sharded_model,
    sharded_optimizer,
    verify_checkpoint,
)

pytestmark = pytest.mark.filterwarnings("ignore")


# ----- the path is part of the key


def test_two_models_and_two_optimizers_keep_their_own_values(tmp_path: Path) -> None:
    models = {"generator": network(1), "discriminator": network(2)}
    optimizers = {name: stepped(model) for name, model in models.items()}
    optimizers["discriminator"].param_groups[0]["lr"] = 0.5
    parts = {name: sharded_model(model) for name, model in models.items()}
    states = {f"{name}_optimizer": sharded_optimizer(models[name], optimizer) for name, optimizer in optimizers.items()}
    save({**parts, **states}, tmp_path / "x")
    for name, model in models.items():
        again = network(9)
        other = torch.optim.AdamW(again.parameters())
        loaded = load({name: sharded_model(again)}, tmp_path / "x").state
        assert type(loaded[name]) is dict  # which torch.load(weights_only=True) reads
        load_optimizer(again, other, tmp_path / "x", at=(f"{name}_optimizer",))
        assert_same_weights(again, model)
        for mine, theirs in zip(again.parameters(), model.parameters(), strict=True):
            assert torch.equal(other.state[mine]["exp_avg"], optimizers[name].state[theirs]["exp_avg"])
        assert other.param_groups[0]["lr"] == optimizers[name].param_groups[0]["lr"]


def test_keys_are_those_of_stock_dcp(tmp_path: Path) -> None:
    model = network(1)
    state = {"train": {"model": sharded_model(model)}, "step": 7, "rates": [0.1, {"eps": 1e-8}]}
    save(state, tmp_path / "ours")
    with closing(AsyncSaver()) as saver:
        saver.save(state, tmp_path / "background").wait()
    for name in ("ours", "background"):
        again = network(2)
        target = {"train": {"model": again.state_dict()}, "step": 0, "rates": [0.0, {"eps": 0.0}]}
        dcp_load(target, checkpoint_id=tmp_path / name)
        assert_same_weights(again, model)
        assert (target["step"], target["rates"]) == (7, [0.1, {"eps": 1e-8}])
    dcp_save({"train": {"model": network(5).state_dict()}, "step": 8}, checkpoint_id=tmp_path / "stock")
    assert load({"train": {"model": sharded_model(again)}, "step": None}, tmp_path / "stock").state["step"] == 8
    assert_same_weights(again, network(5))


def test_foreign_keys_without_paths_go_to_one_part_only(tmp_path: Path) -> None:
    dcp_save(network(1).state_dict(), checkpoint_id=tmp_path / "old")
    again = network(2)
    load({"model": sharded_model(again)}, tmp_path / "old")
    assert_same_weights(again, network(1))
    model = network(2)
    ema = network(3)
    with pytest.raises(CheckpointKeyError, match=r"model\.0\.weight is stored as 0\.weight; pass aliases="):
        load({"model": sharded_model(model), "ema": sharded_model(ema)}, tmp_path / "old")
    assert_same_weights(ema, network(3))


def test_a_part_not_stored_does_not_get_another_parts_values(tmp_path: Path) -> None:
    save({"model": sharded_model(network(1))}, tmp_path / "ours")
    dcp_save({"model": network(1).state_dict()}, checkpoint_id=tmp_path / "stock")
    save(sharded_model(network(1)), tmp_path / "root")
    for name in ("ours", "stock", "root"):
        ema = network(3)
        with pytest.raises(CheckpointKeyError, match=r"ema\.0\.weight"):
            load({"ema": sharded_model(ema)}, tmp_path / name)
        assert_same_weights(ema, network(3))
    load({"ema": sharded_model(ema)}, tmp_path / "root", aliases={"ema.": ""})
    assert_same_weights(ema, network(1))


# ----- plain tensors


def test_a_state_dict_is_stored_as_tensors_and_loaded_in_place(tmp_path: Path) -> None:
    model = network(1)
    optimizer = stepped(model)
    save({"model": model.state_dict(), "optim": optimizer.state_dict(), "step": 3}, tmp_path / "x")
    assert read_index(tmp_path / "x").tensors["model.0.weight"].shape == (7, 5)
    assert verify_checkpoint(tmp_path / "x") == []
    again = network(2)
    other = stepped(again)
    report = load({"model": again.state_dict(), "optim": other.state_dict(), "step": 0}, tmp_path / "x")
    assert report.missing == report.unexpected == ()
    assert_same_weights(again, model)
    other.load_state_dict(report.state["optim"])
    assert torch.equal(other.state[again[0].weight]["exp_avg"], optimizer.state[model[0].weight]["exp_avg"])


def test_plain_tensors_must_be_equal_on_the_ranks_that_have_them(tmp_path: Path) -> None:
    cases: list[tuple[list[dict[str, Any]], str]] = [
        ([{"rng": torch.zeros(2)}, {"rng": torch.ones(2)}], r"common values differ between ranks: rng \(ranks \[1\]\)"),
        ([{"lst": [1, torch.zeros(2)]}, {"lst": [1, torch.ones(2)]}], r"lst\.1 \(ranks \[1\]\)"),
        ([{}, {"inner": {"only": torch.ones(2)}}, {}], r"inner\.only \(a tensor on ranks \[1\] only\)"),
    ]
    for states, text in cases:
        with pytest.raises(CheckpointingException, match=text):
            save_as_ranks(states, tmp_path / "x")
    states[1]["inner"] = {"only": sharded_like("inner.only", torch.ones(2))}  # a part of a pipeline says so
    save_as_ranks(states, tmp_path / "x")
    assert load({"inner.only": None}, tmp_path / "x").state["inner.only"].tolist() == [1, 1]


# ----- a state that was described once


def assert_reads_again(model: nn.Module, move: Callable[[nn.Module], object], folder: Path) -> None:
    """What was described before the tensors of a model were replaced is saved and loaded as it is now."""
    state = {"model": sharded_model(model)}
    move(model)
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.fill_(5)
    save(state, folder / "x")
    with torch.no_grad():
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.zero_()
    state = {"model": sharded_model(model)}
    move(model)
    report = load(state, folder / "x")
    for name, tensor in model.state_dict().items():
        assert bool((tensor == 5).all()), name
        assert report.state["model"][name] is not tensor
        assert bool((report.state["model"][name] == 5).all()), name


def replaced(model: nn.Module) -> None:
    """As by a move to another device and back."""
    model._apply(lambda tensor: tensor.clone())


MOVES: dict[str, Callable[[nn.Module], object]] = {
    "moved": replaced,
    "assigned": lambda model: model.load_state_dict(
        {name: tensor.clone() for name, tensor in model.state_dict().items()}, assign=True
    ),
}


@pytest.mark.parametrize("move", MOVES)
def test_a_state_described_once_is_read_again(tmp_path: Path, move: str) -> None:
    assert_reads_again(nn.Sequential(nn.Linear(3, 2), nn.BatchNorm1d(2)), MOVES[move], tmp_path / "plain")
    with world_of_one():
        model = nn.Linear(3, 2)
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        assert_reads_again(model, replaced, tmp_path / "fsdp2")


def test_values_that_were_set_on_a_description_stay(tmp_path: Path) -> None:
    model = nn.Linear(3, 2)
    state = sharded_model(model)
    state["weight"].data = torch.ones(2, 3)
    save(state, tmp_path / "x")
    again = nn.Linear(3, 2)
    load(sharded_model(again), tmp_path / "x")
    assert torch.equal(again.weight, torch.ones(2, 3))


def test_what_no_longer_fits_its_description_is_refused(tmp_path: Path) -> None:
    model = nn.Sequential(nn.Linear(3, 2))
    optimizer = torch.optim.AdamW(model.parameters())
    state = {"model": sharded_model(model), "optimizer": sharded_optimizer(model, optimizer)}
    save(state, tmp_path / "x")
    optimizer.param_groups[0]["lr"] = 0.5
    with pytest.raises(CheckpointingException, match="groups or states of AdamW have changed since sharded_optimizer"):
        save(state, tmp_path / "lr")
    optimizer = stepped(model := network(1))
    state = {"optimizer": sharded_optimizer(model, optimizer)}
    save(state, tmp_path / "stepped")
    optimizer.state[model[0].weight]["exp_avg"] = torch.zeros(7, 5)
    with pytest.raises(CheckpointingException, match="groups or states of AdamW have changed"):
        save(state, tmp_path / "offloaded")
    for change, text in (
        (lambda model: model.half(), "0.weight was described as torch.float32"),
        (
            lambda model: model.__setitem__(0, nn.Linear(3, 4)),
            r"0.weight was described as .*\[2, 3\], and is .*\[4, 3\]",
        ),
        (lambda model: model.__delitem__(0), "the model has no tensor 0.weight any more; call sharded_model"),
    ):
        model = nn.Sequential(nn.Linear(3, 2))
        state = {"model": sharded_model(model)}
        change(model)
        with pytest.raises(CheckpointingException, match=text):
            save(state, tmp_path / "changed")


# ----- tied weights


def tied(*, same: bool) -> nn.Module:
    """A head and an embedding, of which the head is another tensor unless `same`."""
    torch.manual_seed(4)
    model = nn.Sequential(OrderedDict(embed=nn.Embedding(6, 4), head=nn.Linear(4, 6, bias=False)))
    if same:
        model.head.weight = model.embed.weight
    return model


UNTIED = "embed.weight and .*head.weight are stored with different values, and share their memory"


def test_untied_weights_are_not_loaded_into_tied_ones(tmp_path: Path) -> None:
    stored = tied(same=False)
    model = tied(same=True)
    before = model.embed.weight.detach().clone()
    save({"model": sharded_model(stored), "plain": stored.state_dict()}, tmp_path / "x")
    dcp_save({"model": stored.state_dict(), "plain": stored.state_dict()}, checkpoint_id=tmp_path / "stock")
    save_safetensors(stored.state_dict(), tmp_path / "hf")
    loads: list[Callable[[], object]] = [
        lambda: load_safetensors(model.state_dict(), tmp_path / "hf"),
        *(partial(load, {"plain": model.state_dict()}, tmp_path / name) for name in ("x", "stock")),
        *(partial(load, {"model": sharded_model(model)}, tmp_path / name) for name in ("x", "stock")),
    ]
    for call in loads:
        with pytest.raises(CheckpointMismatchError, match=UNTIED):
            call()
        assert torch.equal(model.embed.weight, before)
    chosen = sharded_model(model)
    del chosen["head.weight"]
    load({"model": chosen}, tmp_path / "x")
    assert torch.equal(model.head.weight, stored.embed.weight)
    with world_of_one():
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(CheckpointMismatchError, match=UNTIED):
            load({"model": sharded_model(model)}, tmp_path / "x")


def test_equal_copies_are_loaded_into_tied_weights(tmp_path: Path) -> None:
    stored = tied(same=False)
    model = tied(same=True)
    with torch.no_grad():
        stored.head.weight.copy_(stored.embed.weight)
        model.embed.weight.zero_()
    save({"model": sharded_model(stored)}, tmp_path / "copies")
    dcp_save({"model": stored.state_dict()}, checkpoint_id=tmp_path / "stock")
    save({"model": sharded_model(tied(same=True))}, tmp_path / "tied")
    whole = stored.embed.weight.detach()
    for name in ("rounded", "rounded head"):
        narrow = whole.bfloat16()
        state = (
            {"embed.weight": narrow, "head.weight": whole}
            if name == "rounded"
            else {"embed.weight": whole, "head.weight": narrow}
        )
        save({"model": state}, tmp_path / name)
    rows = [
        {
            "embed": narrow_rows("model.embed.weight", whole, rank),
            "head": narrow_rows("model.head.weight", whole, 1 - rank),
        }
        for rank in (0, 1)
    ]
    save_as_ranks(rows, tmp_path / "rows")
    for name in ("copies", "stock", "tied", "rounded", "rounded head", "rows"):
        load({"model": sharded_model(model)}, tmp_path / name)
        assert torch.equal(model.head.weight, whole), name
        with torch.no_grad():
            model.embed.weight.zero_()


def narrow_rows(key: str, whole: torch.Tensor, rank: int) -> ShardedTensor:
    """The first two rows, or the other four."""
    start, stop = ((0, 2), (2, 6))[rank]
    return ShardedTensor(key, whole[start:stop], whole.dtype, (stop - start, 4), (6, 4), (start, 0), None)


# ----- what a load left


def test_an_empty_dict_loads_nothing_and_says_so(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    save({"w": sharded_like("w", torch.ones(2)), "sched": {"last_epoch": 4, "lrs": [0.1]}}, tmp_path / "x")
    with caplog.at_level(logging.WARNING, "opt_checkpoint"):
        report = load({"w": sharded_like("w", torch.zeros(2)), "sched": {}}, tmp_path / "x")
    assert report.state["sched"] == {}
    assert report.unexpected == ("sched.last_epoch", "sched.lrs")
    assert "has an empty dict at sched, which loads nothing" in caplog.text
    caplog.clear()
    assert load({"w": None, "sched": None}, tmp_path / "x").unexpected == ()
    assert "empty dict" not in caplog.text


def test_missing_and_unexpected_are_those_of_torch(tmp_path: Path) -> None:
    saved = {"a": torch.ones(2), "b": 1}
    wanted = {"a": torch.zeros(2), "c": 2}
    save(saved, tmp_path / "x")
    report = load(wanted, tmp_path / "x", strict="return_missing")
    module = nn.Module()
    module.register_buffer("a", torch.zeros(2))
    module.register_buffer("c", torch.zeros(1))
    incompatible = module.load_state_dict({"a": torch.ones(2), "b": torch.ones(1)}, strict=False)
    assert list(report.missing) == incompatible.missing_keys
    assert list(report.unexpected) == incompatible.unexpected_keys


def test_nothing_is_loaded_into_or_saved_from_the_meta_device(tmp_path: Path) -> None:
    save({"model": sharded_model(network(1))}, tmp_path / "x")
    with torch.device("meta"):
        model = network()
    for state in (sharded_model(model), model.state_dict()):
        with pytest.raises(CheckpointMismatchError, match=r"0.weight is on the meta device.*model.to_empty"):
            load({"model": state}, tmp_path / "x")
    with pytest.raises(CheckpointingException, match="is on the meta device, without values"):
        save({"model": sharded_model(model)}, tmp_path / "y")
    model.to_empty(device="cpu")
    load({"model": sharded_model(model)}, tmp_path / "x")
    assert_same_weights(model, network(1))


def test_exact_conversions_happen_and_are_reported(tmp_path: Path) -> None:
    for stored, wanted in ((torch.bfloat16, torch.float32), (torch.float16, torch.float64), (torch.int32, torch.int64)):
        path = tmp_path / str(stored)
        values = torch.arange(-3, 4).to(stored)
        target = torch.zeros(7, dtype=wanted)
        save({"w": sharded_like("w", values)}, path)
        assert load({"w": sharded_like("w", target)}, path).cast == ("w",)
        assert torch.equal(target, values.to(wanted)), stored


def test_inexact_conversions_must_be_requested(tmp_path: Path) -> None:
    rounds = ((torch.float32, torch.bfloat16), (torch.bfloat16, torch.float16), (torch.int64, torch.float32))
    for stored, wanted in rounds:
        path = tmp_path / str(stored)
        values = torch.arange(7).to(stored)
        target = torch.zeros(7, dtype=wanted)
        save({"w": sharded_like("w", values)}, path)
        with pytest.raises(CheckpointMismatchError, match="would round; pass dtype='cast'"):
            load({"w": sharded_like("w", target)}, path)
        load({"w": sharded_like("w", target)}, path, dtype="cast")
        assert torch.equal(target, values.to(wanted)), stored


def test_memory_is_made_under_relative_keys_too(tmp_path: Path) -> None:
    model = network(1)
    save({"model": sharded_model(model)}, tmp_path / "x")
    template = sharded_model(copy.deepcopy(model))
    for key, shard in template.items():
        assert isinstance(shard, ShardedTensor)
        template[key] = shard.without_data()
    state = load({"model": template}, tmp_path / "x").state["model"]
    assert torch.equal(state["0.weight"], model[0].weight)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    save_as_ranks([state_at(1, rank, 2) for rank in range(2)], tmp_path / "saved")
    return tmp_path / "saved"


MODES = {  # of keys that are requested and not stored, and of keys that are stored and requested by no rank
    "assume_ok_unexpected": ("raise", "allow"),
    "log_unexpected": ("log", "allow"),
    "log_all": ("log", "log"),
    "raise_unexpected": ("raise", "allow"),
    "raise_all": ("raise", "raise"),
    "return_unexpected": ("allow", "allow"),
    "return_all": ("allow", "allow"),
    "ignore_all": ("allow", "allow"),
    "raise_missing": ("raise", "allow"),  # torch's names, from here on
    "log_missing": ("log", "allow"),
    "return_missing": ("allow", "allow"),
}


@pytest.mark.parametrize("mode", MODES)
def test_keys_of_one_side_raise_or_are_left_out_and_reported(
    saved: Path, caplog: pytest.LogCaptureFixture, mode: str
) -> None:
    assert {m.value for m in StrictHandling} <= MODES.keys()
    missing, unexpected = MODES[mode]
    more = ShardedTensor.from_rank_offsets("more", torch.full((2,), 7.0))
    state = {**state_at(0, 0, 1, filled=False), "more": more, "absent": None}
    if missing == "raise":
        with pytest.raises(CheckpointKeyError, match=r"are not in .*: absent, more|are not in .*: more, absent"):
            load(state, saved, strict=mode)
    else:
        report = load(state, saved, strict=mode)
        assert set(report.missing) == {"more", "absent"}
        assert "more" not in report.state
        assert ("are not in" in caplog.text) is (missing == "log")
        assert_is_step(report.state, 1, 0, 1)
    assert (more.data == 7).all()
    state = state_at(0, 0, 1, filled=False)
    del state["b"]
    if unexpected == "raise":
        with pytest.raises(CheckpointKeyError, match="requested by no rank: b"):
            load(state, saved, strict=mode)
    else:
        assert load(state, saved, strict=mode).unexpected == ("b",)
        assert ("requested by no rank" in caplog.text) is (unexpected == "log")


def test_a_key_that_some_rank_requests_is_not_unexpected(saved: Path) -> None:
    whole = state_at(0, 0, 1, filled=False)
    first = {key: whole[key] for key in ("w", "rng", "large", "step")}
    load_as_ranks([first, {"b": whole["b"], "groups": None}], saved, strict="raise_all")
    with pytest.raises(CheckpointKeyError, match=r"1 key\(s\) of .* are requested by no rank: groups;"):
        load_as_ranks([first, {"b": whole["b"]}], saved, strict="raise_all")


def test_unknown_options_and_empty_places_are_refused(saved: Path, tmp_path: Path) -> None:
    for option in ({"strict": "very"}, {"verify": "maybe"}, {"dtype": "any"}):
        with pytest.raises(ValueError, match="; allowed: "):
            load({}, saved, **option)  # type: ignore[arg-type]
    for path in (tmp_path, tmp_path / "absent"):
        with pytest.raises(CheckpointNotFoundError):
            load({}, path)


# ----- None, lists and tuples


STATE = {"m": {"w": torch.ones(2), "l": [1, 2, {"a": torch.zeros(1)}], "k": 5, "betas": [0.9, 0.95]}, "s": "text"}


@pytest.mark.parametrize("write", [lambda path: dcp_save(STATE, checkpoint_id=path), lambda path: save(STATE, path)])
def test_none_loads_all_of_stock_directories_as_of_ours(tmp_path: Path, write: Any) -> None:
    write(tmp_path / "x")
    for wanted, expected in (
        (None, STATE),
        ({"m": None}, {"m": STATE["m"]}),
        ({"m": {"l": None, "betas": None}}, {"m": {"l": STATE["m"]["l"], "betas": [0.9, 0.95]}}),
        ({"s": None}, {"s": "text"}),
    ):
        report = load(wanted, tmp_path / "x", strict="return_all")
        assert sorted_text(report.state) == sorted_text(expected)
        assert report.missing == ()
        assert wanted is not None or report.unexpected == ()
    with pytest.raises(CheckpointKeyError, match="nothing"):
        load({"nothing": None}, tmp_path / "x")


def sorted_text(value: Any) -> str:
    if isinstance(value, dict):
        return "{" + ", ".join(f"{key}: {sorted_text(value[key])}" for key in sorted(value)) + "}"
    if isinstance(value, list):
        return "[" + ", ".join(map(sorted_text, value)) + "]"
    return repr(value)


def test_tensors_in_lists_are_restored_and_readable_by_stock_dcp(tmp_path: Path) -> None:
    state = {
        "lst": [1, torch.ones(2), [torch.arange(3), "a"], (torch.zeros(1), 5)],
        "groups": [{"lr": torch.tensor(0.5), "betas": (0.9, 0.95)}, {"lr": 0.1}],
        "tup": (torch.full((2,), 3.0), "b"),
        "plain": [1, 2],
    }
    save(state, tmp_path / "x")
    assert {"lst.1", "lst.2.0", "lst.3.0", "groups.0.lr", "tup.0"} == set(read_index(tmp_path / "x").tensors)
    assert read_common(read_index(tmp_path / "x"))["lst"] == [1, None, [None, "a"], (None, 5)]
    for wanted in (None, dict.fromkeys(state), copy.deepcopy(state)):
        report = load(wanted, tmp_path / "x", strict="raise_all")
        assert sorted_text(report.state) == sorted_text(state)
    zeros = [0, torch.zeros(2), [torch.zeros(3, dtype=torch.int64), ""], (torch.ones(1), 0)]
    target = {"lst": zeros, "groups": [{"lr": torch.tensor(0.0), "betas": ()}, {"lr": 0.0}], "tup": (), "plain": []}
    dcp_load(target, checkpoint_id=tmp_path / "x")
    assert sorted_text(target) == sorted_text(state)
    assert verify_checkpoint(tmp_path / "x") == []


def test_a_tensor_and_a_number_fill_each_other(tmp_path: Path) -> None:
    stored = {"count": 3, "rate": 0.1, "flag": True, "scale": torch.tensor(2.5), "one": torch.tensor([7])}
    save(stored, tmp_path / "ours")
    dcp_save(stored, checkpoint_id=tmp_path / "stock")
    for name in ("ours", "stock"):
        counts = [torch.tensor(0.0), torch.zeros(1, dtype=torch.int64), torch.zeros(1, 1, dtype=torch.float64)]
        for tensor in counts:
            report = load({"count": tensor}, tmp_path / name)
            assert tensor.item() == 3
            assert report.state["count"] is tensor
        rate = torch.zeros((), dtype=torch.bfloat16)
        flag = torch.tensor(False)
        load({"rate": rate, "flag": flag}, tmp_path / name)
        assert (rate.item(), flag.item()) == (pytest.approx(0.1, rel=2**-8), True)
        numbers = load({"scale": 0.0, "one": 0}, tmp_path / name).state
        assert numbers == {"scale": 2.5, "one": 7}
        assert {key: type(value) for key, value in numbers.items()} == {"scale": float, "one": int}


def test_tensors_in_lists_are_filled_in_place(tmp_path: Path) -> None:
    save({"lst": [torch.ones(2), {"step": 4, "of": (torch.arange(3), 5)}], "plain": [1, 2, 3]}, tmp_path / "x")
    ones = torch.zeros(2)
    step = torch.tensor(0)
    of = torch.zeros(3, dtype=torch.int64)
    report = load({"lst": [ones, {"step": step, "of": (of, 0)}], "plain": [9]}, tmp_path / "x")
    assert (ones.tolist(), step.item(), of.tolist()) == ([1, 1], 4, [0, 1, 2])
    assert report.state["lst"][0] is ones
    assert report.state["lst"][1]["step"] is step
    assert report.state["plain"] == [1, 2, 3]


STORED_FORMS = {
    "n": 0.5,
    "text": "a",
    "huge": 2**40,
    "odd": 2**40 + 1,
    "lst": [1, 2],
    "ts": [torch.ones(2)],
    "d": {"a": 1},
    "w": torch.ones(3),
}
OTHER_FORMS: dict[str, tuple[Any, str]] = {
    "a tensor of several elements for a number": ({"n": torch.zeros(2)}, r"n is stored as a plain value, asked for as"),
    "an integer tensor for a fraction": (
        {"n": torch.tensor(0)},
        r"n is stored as 0\.5, which torch\.int64 \[\] cannot",
    ),
    "a narrow tensor for a large number": (
        {"huge": torch.tensor(0, dtype=torch.int8)},
        "huge is stored as 1099511627776",
    ),
    "a tensor that rounds an integer": (
        {"odd": torch.tensor(0.0)},
        "odd is stored as 1099511627777, which torch.float32",
    ),
    "a tensor for text": ({"text": torch.tensor(0.0)}, "text is stored as a plain value, asked for as torch.float32"),
    "a tensor for a list": ({"lst": torch.zeros(1)}, "lst is stored as a list, asked for as torch.float32"),
    "a tensor for a list of tensors": ({"ts": torch.zeros(2)}, "ts is stored as a list"),
    "a number for a list": ({"lst": 0}, "lst is stored as a list, asked for as a plain value; pass None"),
    "a number for a dict": ({"d": 0}, "d is stored as a dict, asked for as a plain value"),
    "a list for a dict": ({"d": [0]}, "d is stored as a dict, asked for as a list"),
    "a list for a number": ({"n": [0]}, "n is stored as a plain value, asked for as a list"),
    "a list for a tensor": ({"w": [0, 0, 0]}, r"w is stored as a tensor of shape \[3\], asked for as a list"),
    "a number for a tensor": ({"w": 0.0}, r"w is stored as a tensor of shape \[3\], asked for as a plain value"),
    "text for a tensor": ({"w": ""}, r"w is stored as a tensor of shape \[3\], asked for as a plain value"),
    "an object for a dict": ({"d": object()}, "d is stored as a dict, asked for as an object of class object"),
    "more tensors in a list": ({"ts": [torch.zeros(2)] * 2}, "ts is stored of 1 values, asked for as a list of 2 with"),
    "a list with a tensor for numbers": ({"lst": [torch.zeros(2), 0]}, r"lst\.0 is stored as a plain value, asked for"),
    "a list with another tensor": ({"ts": [torch.zeros(3)]}, r"ts\.0 is stored with global shape \[2\], asked for"),
}


@pytest.mark.parametrize("case", OTHER_FORMS)
def test_values_of_another_form_are_refused_by_key(tmp_path: Path, case: str) -> None:
    template, text = OTHER_FORMS[case]
    before = sorted_text(template)
    save(STORED_FORMS, tmp_path / "ours")
    dcp_save(STORED_FORMS, checkpoint_id=tmp_path / "stock")
    for name in ("ours", "stock"):
        with pytest.raises(CheckpointingException, match=text):
            load(template, tmp_path / name)
        assert sorted_text(template) == before


def test_a_state_that_contains_itself_is_refused_with_its_path(tmp_path: Path) -> None:
    inner: dict[str, Any] = {"a": [1, {"b": 2}]}
    state = {"outer": inner}
    inner["a"][1]["again"] = inner
    shared = {"c": 1}
    save({"one": shared, "two": [shared, shared]}, tmp_path / "shared")  # no cycle
    with closing(AsyncSaver()) as saver:
        for call, name in ((save, "x"), (saver.save, "x"), (load, "shared")):
            with pytest.raises(CheckpointingException, match=r"outer\.a\.1\.again is outer again, which contains it"):
                call(state, tmp_path / name)


class WithExtraState(nn.Linear):
    """As layers of TransformerEngine, whose extra state grows after the first step."""

    def __init__(self, extra: Any) -> None:
        super().__init__(2, 2)
        self.extra = extra

    def get_extra_state(self) -> Any:
        return self.extra

    def set_extra_state(self, state: Any) -> None:
        self.extra = state


def test_extra_states_are_loaded_whole_or_refused_with_a_cure(tmp_path: Path) -> None:
    stored = torch.arange(9, dtype=torch.uint8)
    save({"model": sharded_model(WithExtraState(stored))}, tmp_path / "x")
    model = WithExtraState(torch.zeros(4, dtype=torch.uint8))
    with pytest.raises(CheckpointMismatchError, match=r"an extra state is one value of any length: load it with None"):
        load({"model": sharded_model(model)}, tmp_path / "x")
    state = sharded_model(model)
    state["_extra_state"] = None
    assert torch.equal(load({"model": state}, tmp_path / "x").state["model"]["_extra_state"], stored)
    for raw in (b"abc", b""):
        save({"model": sharded_model(WithExtraState(b"longer"))}, tmp_path / str(len(raw)))
        state = sharded_model(WithExtraState(raw))
        assert load({"model": state}, tmp_path / str(len(raw))).state["model"]["_extra_state"] == b"longer"
    with pytest.raises(CheckpointingException, match=r"model\._extra_state is a BytesIO, .* getvalue\(\)"):
        save({"model": sharded_model(WithExtraState(BytesIO(b"a")))}, tmp_path / "stream")


class AppState:
    """As DCP's tutorials have it."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model

    def state_dict(self) -> dict[str, Any]:
        return {"model": self.model.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.model.load_state_dict(state["model"])


def test_objects_with_a_state_dict_are_refused(tmp_path: Path) -> None:
    model = network(1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.ConstantLR(optimizer)
    save({"app": AppState(model).state_dict(), "scheduler": scheduler.state_dict()}, tmp_path / "x")
    for key, value in (
        ("app", AppState(model)),
        ("scheduler", scheduler),
        ("app", model),
        ("app", optimizer),
        ("app", [0, model]),
        ("app", {"inner": ({"a": scheduler},)}),
    ):
        for call in (save, load):
            with pytest.raises(
                CheckpointingException, match=rf"{key}.* is an? \w+, an object with a state_dict.*pass its"
            ):
                call({key: value}, tmp_path / f"x{call is save or ''}")


def dtensors_in_lists(rank: int, size: int, path: str) -> None:
    mesh = init_device_mesh("cpu", (size,))
    values = torch.arange(20.0).view(5, 4)
    save({"lst": [1, distribute_tensor(values, mesh, [Shard(0)]), torch.ones(2)]}, path)
    target = [0, distribute_tensor(torch.zeros(5, 4), mesh, [Shard(1)]), torch.zeros(2)]
    state = load({"lst": target}, path).state["lst"]
    assert state[0] == 1
    assert state[1] is target[1]
    assert torch.equal(target[1].full_tensor(), values)
    assert torch.equal(state[2], torch.ones(2))
    whole = load({"lst": None}, path).state["lst"]
    assert isinstance(whole, list)
    assert torch.equal(whole[1], values)
    with pytest.raises(CheckpointingException, match="'tup' is a tuple that contains sharded values; make it a list"):
        save({"tup": (distribute_tensor(values, mesh, [Shard(0)]),)}, path + "-tuple")


def test_a_dtensor_in_a_list_is_loaded_in_place(tmp_path: Path) -> None:
    run_ranks(2, dtensors_in_lists, str(tmp_path / "x"))


def test_none_warns_of_sharded_tensors_that_it_does_not_load(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    model = nn.Linear(2, 2)
    save({"m": sharded_model(model), "step": 3, "ema": model.state_dict()}, tmp_path / "x")
    assert load(None, tmp_path / "x").state.keys() == {"step", "ema"}
    assert "None at the top of the state loads plain values" in caplog.text
    assert "m.bias, m.weight" in caplog.text
    caplog.clear()
    load({"m": sharded_model(model), "step": None, "ema": None}, tmp_path / "x")
    assert caplog.text.count("None at") == 0
