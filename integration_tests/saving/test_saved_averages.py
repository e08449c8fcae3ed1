"""Averages of weights in checkpoints: resumed to the bit on the same ranks, loaded on other layouts and numbers of
ranks, begun anew where none were saved, and exported as a model."""

import copy
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import cut_ranks as ranks
import megatron_types
import pytest
import torch
from cut_ranks import EVEN, OBLONG, SMALL, UNEVEN, fsdp, fsdp_x_tp, hsdp, tp
from named import normal
from parity import sharded_state
from processes import FSDP2_RUNS, Job, run_jobs
from safetensors.torch import load_file
from torch import Tensor, nn

from opt_checkpoint import load, save, sharded_model
from opt_checkpoint.__main__ import main
from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_stack import Optimizer, get_optimizer, get_optimizer_based_on_param_groups

AVERAGED = {"ema_decay": 0.8, "ema_nesterov_beta": 0.4, "ema_nesterov_gamma": 0.7}
PLAIN = {"lr": 0.02, "clip_grad": 0.0, "muon_fp32_matmul_prec": "highest"}
BF16 = {"bf16": True, "use_precision_aware_optimizer": True}
FLAT = {"use_distributed_optimizer": True}
STATES = ("ema", "ema_steps", "nesterov_base", "nesterov_ema")


def config(**fields: Any) -> OptimizerConfig:
    return OptimizerConfig(**{**PLAIN, **AVERAGED, **fields})


def shown(run: ranks.Run) -> dict[str, Tensor]:
    """The whole weights that are evaluated; training goes on from the bits of before."""
    before = run.weights()
    run.optimizer.eval()
    found = run.weights()
    run.optimizer.train()
    assert all(torch.equal(value, before[name]) for name, value in run.weights().items())
    return found


def train(of: OptimizerConfig, shapes: ranks.Shapes, lay_out: ranks.LayOut, path: str = "") -> Any:
    """Trained and evaluated weights after each step; saved after the second."""
    run = ranks.Run(of, shapes, lay_out)
    found = []
    for step in range(4):
        if step == 2 and path:
            save(run.sharded(), path)
        run.step(step)
        found.append((run.weights(), shown(run)))
    return found


def resume(of: OptimizerConfig, shapes: ranks.Shapes, lay_out: ranks.LayOut, path: str) -> Any:
    """Loaded into averages of other weights, then trained on."""
    run = ranks.Run(of, shapes, lay_out, seed=5)
    run.step(7)
    loaded = load(run.sharded(), path).state
    run.optimizer.load_state_dict(loaded["optimizer"])
    found = []
    for step in (2, 3):
        run.step(step)
        found.append((run.weights(), shown(run)))
    return found


CASES: dict[str, tuple[OptimizerConfig, ranks.Shapes, ranks.LayOut, ranks.LayOut]] = {
    "flat": (config(**FLAT), UNEVEN, None, None),
    "flat, bf16 and remainders": (config(**FLAT, **BF16), UNEVEN, None, None),
    "layer-wise": (config(optimizer="muon", use_layer_wise_distributed_optimizer=True), OBLONG, None, None),
    "tp by marks": (
        config(optimizer="muon", muon_tp_mode="duplicated"),
        EVEN,
        ranks.tp_by_attributes,
        None,
    ),
}
if FSDP2_RUNS:
    CASES |= {
        "fsdp, uneven": (config(), UNEVEN, fsdp, fsdp),
        "fsdp, ranks without rows": (config(optimizer="soap"), SMALL, fsdp, fsdp),
        "hsdp": (config(), OBLONG, hsdp, fsdp),
        "fsdp x tp": (config(optimizer="muon", muon_tp_mode="duplicated"), EVEN, fsdp_x_tp, fsdp),
        "tp": (config(), UNEVEN, tp, tp),
    }


@pytest.fixture(scope="module")
def found(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    folder = tmp_path_factory.mktemp("averages")
    four = {}
    three = {}
    for name, (of, shapes, lay_out, other) in CASES.items():
        anew = replace(of, use_layer_wise_distributed_optimizer=False)
        path = str(folder / name)
        four[name] = Job(train, (of, shapes, lay_out, path))
        four[f"again {name}"] = Job(resume, (of, shapes, lay_out, path))
        three[f"three {name}"] = Job(resume, (anew, shapes, other, path))
    return run_jobs(4, four) | run_jobs(3, three)


def assert_near(got: Any, want: Any, near: float) -> None:
    for kind, of_kind in zip(got, want, strict=True):
        for name, value in kind.items():
            torch.testing.assert_close(value, of_kind[name], rtol=near, atol=near)


@pytest.mark.parametrize("name", CASES)
def test_cut_weights_have_the_averages_of_whole_ones(name: str, found: Any) -> None:
    of, shapes, *_ = CASES[name]
    whole = replace(of, use_distributed_optimizer=False, use_layer_wise_distributed_optimizer=False)
    alone = train(whole, shapes, None)
    for rank in found[name]:
        for got, want in zip(rank, alone, strict=True):
            assert_near(got, want, 2**-7 if of.bf16 else 1e-6)


@pytest.mark.parametrize("name", CASES)
def test_a_run_resumes_with_its_averages(name: str, found: Any) -> None:
    """Saved on four ranks: on these to the bit, and on three."""
    for resumed, trained in zip(found[f"again {name}"], found[name], strict=True):
        for got, want in zip(resumed, trained[2:], strict=True):
            assert_near(got, want, 0.0)
    for resumed in found[f"three {name}"]:
        for got, want in zip(resumed, found[name][0][2:], strict=True):
            assert_near(got, want, 2**-7 if CASES[name][0].bf16 else 2e-6)


# --- one process ------------------------------------------------------------------------------------------------------


class Model(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32):
        super().__init__()
        self.first = nn.Parameter(normal(5, 7, seed=1).to(dtype))
        self.second = nn.Parameter(normal(4, 5, seed=2).to(dtype))
        self.frozen = nn.Parameter(normal(3, seed=3), requires_grad=False)
        self.register_buffer("count", torch.tensor([3.0]))


def built(dtype: torch.dtype = torch.float32, **fields: Any) -> tuple[Model, Optimizer]:
    model = Model(dtype)
    return model, get_optimizer(OptimizerConfig(**PLAIN, **fields), [model], {})


def step(model: Model, optimizer: Optimizer, *numbers: int) -> None:
    for number in numbers:
        for at, param in enumerate((model.first, model.second)):
            param.grad = normal(*param.shape, seed=10 * number + at).to(param.dtype)
        optimizer.step()


def kept(model: Model, optimizer: Optimizer, name: str) -> dict[str, Tensor]:
    return {key: optimizer.state[param][name].clone() for key, param in model.named_parameters() if param.requires_grad}


def by_torchs_form(model: Model, optimizer: Optimizer, other: Model, resumed: Optimizer, path: Path) -> None:
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(optimizer.state_dict())


def by_a_directory(model: Model, optimizer: Optimizer, other: Model, resumed: Optimizer, path: Path) -> None:
    save(sharded_state(model, optimizer), path)
    resumed.load_state_dict(load(sharded_state(other, resumed), path).state["optimizer"])


@pytest.mark.parametrize("form", [by_torchs_form, by_a_directory])
@pytest.mark.parametrize("fields", [{}, BF16], ids=["fp32", "remainders"])
def test_averages_begin_with_the_weights_where_none_were_saved(
    form: Callable[..., None], fields: dict[str, Any], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """And the other state is loaded. They begin at the saved step: `ema_from_step` has passed."""
    dtype = torch.bfloat16 if fields else torch.float32
    model, optimizer = built(dtype, **fields)
    step(model, optimizer, 0, 1, 2)
    other, resumed = built(dtype, **fields, **AVERAGED, ema_from_step=2)
    step(other, resumed, 5)
    form(model, optimizer, other, resumed, tmp_path / "saved")
    assert "2 parameters ('first', 'second') were saved without averages of weights (ema, nesterov_base" in caplog.text
    mains = dict(zip(("first", "second"), optimizer.get_parameters(), strict=True))
    for name, want in mains.items():
        assert torch.equal(kept(other, resumed, "ema")[name], want)
        assert torch.equal(kept(other, resumed, "nesterov_base")[name], want)
        assert not kept(other, resumed, "nesterov_ema")[name].any()
        assert int(kept(other, resumed, "ema_steps")[name]) == 3
    assert int(resumed.state[other.first]["step"]) == 3
    step(model, optimizer, 3)
    step(other, resumed, 3)
    for name, start in mains.items():
        weights = kept(other, resumed, "nesterov_base")[name]
        assert not torch.equal(kept(other, resumed, "ema")[name], weights), start


def test_averages_that_begin_anew_follow_a_later_load_of_weights() -> None:
    """They kept a share of the random weights of before the load, of which nobody was warned."""
    model, optimizer = built()
    step(model, optimizer, 0, 1)
    other, resumed = built(**AVERAGED)
    with torch.no_grad():
        other.first.add_(100.0)
    resumed.load_state_dict(optimizer.state_dict())
    other.load_state_dict(model.state_dict())
    step(other, resumed, 2)
    assert bool(((kept(other, resumed, "ema")["first"] - other.first).abs() < 1).all())
    assert bool((kept(other, resumed, "nesterov_ema")["first"].abs() < 1).all())


@pytest.mark.parametrize("form", [by_torchs_form, by_a_directory])
def test_an_average_begins_with_the_weights_without_look_ahead(form: Callable[..., None], tmp_path: Path) -> None:
    """It began with the main values, which are ahead of the weights that were saved."""
    nesterov = {name: value for name, value in AVERAGED.items() if name != "ema_decay"}
    model, optimizer = built(**nesterov)
    step(model, optimizer, 0, 1)
    other, resumed = built(**AVERAGED)
    form(model, optimizer, other, resumed, tmp_path / "saved")
    averages = kept(other, resumed, "ema")
    assert all(torch.equal(averages[name], base) for name, base in kept(model, optimizer, "nesterov_base").items())
    assert not torch.equal(averages["first"], other.first)


def test_megatrons_form_keeps_its_steps_without_averages(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The missing averages passed for a missing state, so that moments and steps began anew."""
    megatron_types.install(monkeypatch)
    model, optimizer = built()
    step(model, optimizer, 0, 1)

    def described(model: Model) -> dict[str, Any]:
        tensors = {}
        for name, param in model.named_parameters():
            shape = tuple(param.shape)
            origin = (0,) * len(shape)
            ones = (1,) * len(shape)
            tensors[name] = megatron_types.ShardedTensor(name, param, param.dtype, shape, shape, origin, ones, 0, 0)
        return {"model": tensors}

    saved = megatron_types.save([optimizer.sharded_state_dict(described(model))])
    other, resumed = built(**AVERAGED)
    asked = resumed.sharded_state_dict(described(other), is_loading=True)
    loaded = megatron_types.load(saved, asked)
    resumed.load_state_dict(loaded)
    assert int(resumed.state[other.first]["step"]) == 2
    assert "were saved without averages" in caplog.text


def test_another_decay_is_that_of_the_present_run(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    model, optimizer = built(ema_decay=0.5)
    step(model, optimizer, 0, 1)
    for form in (by_torchs_form, by_a_directory):
        caplog.clear()
        other, resumed = built(ema_decay=0.9)
        form(model, optimizer, other, resumed, tmp_path / form.__name__)
        assert resumed.param_groups[0]["ema_decay"] == 0.9
        assert "continues with ema_decay=0.9, but was saved with ema_decay=0.5" in caplog.text
        before = kept(other, resumed, "ema")
        step(other, resumed, 2)
        for name, average in kept(other, resumed, "ema").items():
            assert torch.equal(average, torch.lerp(before[name], other.get_parameter(name).detach(), 1 - 0.9))


@pytest.mark.parametrize(("field", "then", "now"), [
    ("ema_from_step", 1, 100), ("ema_nesterov_gamma", 0.7, 0.5), ("ema_decay", lambda step: 0.8, 0.8),
])  # fmt: skip
def test_other_averages_continue_with_a_warning(
    field: str, then: Any, now: Any, caplog: pytest.LogCaptureFixture, tmp_path: Path
) -> None:
    """With a later first step, `eval()` and the next step replaced what was loaded without a word."""
    model, optimizer = built(**{**AVERAGED, field: then})
    step(model, optimizer, 0, 1)
    for form in (by_torchs_form, by_a_directory):
        caplog.clear()
        form(model, optimizer, *built(**{**AVERAGED, field: now}), tmp_path / form.__name__)
        text = f"{field}={now}, but was saved with {field}={then}"
        if callable(then):
            text = "ema_decay_by_schedule=False, but was saved with ema_decay_by_schedule=True"
        assert f"continues with {text}" in caplog.text


@pytest.mark.parametrize("kept_field", ["ema_decay", "ema_nesterov_beta"])
def test_a_run_may_leave_one_of_two_averages(kept_field: str) -> None:
    """torch's form was refused: the state had what the rule does not keep."""
    model, optimizer = built(**AVERAGED)
    step(model, optimizer, 0, 1)
    other, resumed = built(**{kept_field: AVERAGED[kept_field]})
    other.load_state_dict(model.state_dict())
    resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    name = "ema" if kept_field == "ema_decay" else "nesterov_base"
    want = kept(model, optimizer, name)
    assert all(torch.equal(got, want[key]) for key, got in kept(other, resumed, name).items())


def test_a_run_without_averages_says_that_it_leaves_them(caplog: pytest.LogCaptureFixture, tmp_path: Path) -> None:
    """Its weights are ahead of those that the saved run would have shown."""
    model, optimizer = built(**AVERAGED)
    step(model, optimizer, 0, 1)
    for form in (by_torchs_form, by_a_directory):
        caplog.clear()
        form(model, optimizer, *built(**AVERAGED), tmp_path / f"same {form.__name__}")
        assert "continues with" not in caplog.text
        form(model, optimizer, *built(), tmp_path / form.__name__)
        assert "continues with ema_nesterov_beta=None, but was saved with ema_nesterov_beta=0.4" in caplog.text


def test_a_chunk_without_averages_is_named_beside_one_with_them(caplog: pytest.LogCaptureFixture) -> None:
    """Parameters of two chunks have the same names."""

    def of_chunks() -> Optimizer:
        optimizer = get_optimizer(config(), [Model(), Model()])
        for group in optimizer.param_groups:
            for param in group["params"]:
                param.grad = torch.ones_like(param)
        optimizer.step()
        return optimizer

    state = of_chunks().state_dict()
    for name in STATES:
        del state["state"][2][name]
    of_chunks().load_state_dict(state)
    assert "1 parameters ('chunk 1: first') were saved without averages" in caplog.text


def test_a_rank_without_parameters_takes_part_in_the_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """It left the others waiting for it in the exchange of what is lacking."""
    save(sharded_state(*built()), tmp_path / "saved")

    def load_on(everyone: Comm) -> int:
        model = Model()
        for param in (model.first, model.second):
            param.requires_grad_(everyone.rank == 0)
        axes = Axes(dp=Alone(), tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=everyone)
        optimizer = get_optimizer(config(), [model], {}, pg_collection=roles)
        optimizer.load_state_dict(load(sharded_state(model, optimizer), tmp_path / "saved").state["optimizer"])
        return len(everyone.gather_objects(everyone.rank))

    assert run_threads(2, load_on) == [2, 2]
    assert "2 parameters ('first', 'second') were saved without averages" in caplog.text


@pytest.mark.parametrize("weights", ["ema", "nesterov_base"])
def test_averages_are_exported_as_a_model(
    weights: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], caplog: pytest.LogCaptureFixture
) -> None:
    """Frozen parameters and buffers as they are."""
    model, optimizer = built(torch.bfloat16, **BF16, **AVERAGED)
    step(model, optimizer, 0, 1, 2)
    save(sharded_state(model, optimizer), tmp_path / "saved")
    to_safetensors = ["--to", "safetensors"]
    assert main(["convert", str(tmp_path / "saved"), str(tmp_path / "trained"), *to_safetensors]) == 0
    assert "ahead of those of EMA-Nesterov; for these, choose the weights 'nesterov_base'" in caplog.text
    arguments = ["convert", str(tmp_path / "saved"), str(tmp_path / "out"), *to_safetensors, "--weights", weights]
    assert main([*arguments, "--prefix", "model."]) == 0
    assert "without average, so as they were saved: model.count, model.frozen\n" in caplog.text
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {"first", "second", "frozen", "count"}
    for name, want in kept(model, optimizer, weights).items():
        assert torch.equal(found[name], want)
    assert torch.equal(found["frozen"], model.frozen)
    assert torch.equal(found["count"], model.count)
    twice = sharded_state(model, optimizer)
    save(twice | {"other": sharded_model(Model())}, tmp_path / "twice")
    assert main(["convert", str(tmp_path / "twice"), *arguments[2:]]) == 2
    assert "pass the prefix of one of them: model., other." in capsys.readouterr().err


def test_tied_weights_are_exported_with_their_average(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """The key without state kept the trained weights, which a tied model then loaded."""
    model, optimizer = built(ema_decay=0.8)
    model.head = model.second
    step(model, optimizer, 0, 1)
    save(sharded_state(model, optimizer), tmp_path / "saved")
    arguments = ["convert", str(tmp_path / "saved"), str(tmp_path / "out"), "--to", "safetensors", "--weights", "ema"]
    assert main([*arguments, "--prefix", "model."]) == 0
    assert "as they were saved: model.count, model.frozen\n" in caplog.text
    assert "the average of another key, whose values they had, as tied weights do: model.second\n" in caplog.text
    found = load_file(tmp_path / "out" / "model.safetensors")
    average = optimizer.state[model.second]["ema"]
    assert not torch.equal(average, model.second)
    assert torch.equal(found["second"], average)
    assert torch.equal(found["head"], average)


@pytest.mark.parametrize("calls", ["save", "load"])
def test_a_description_of_before_an_evaluation_is_refused(calls: str, tmp_path: Path) -> None:
    """Averages were saved as trained weights, and weights loaded that `train()` took back."""
    model, optimizer = built(ema_decay=0.8)
    step(model, optimizer, 0)
    save(sharded_state(model, optimizer), tmp_path / "saved")
    described = sharded_state(model, optimizer)
    optimizer.eval()
    with pytest.raises(ValueError, match=r"eval\(\) has replaced the weights, since"):
        save(described, tmp_path / "x") if calls == "save" else load(described, tmp_path / "saved")
    optimizer.train()
    save(described, tmp_path / "x") if calls == "save" else load(described, tmp_path / "saved")


def test_main_values_read_in_evaluation_are_the_trained_ones() -> None:
    """The upper half was that of the average."""
    model, optimizer = built(torch.bfloat16, **BF16, ema_decay=0.8)
    step(model, optimizer, 0, 1, 2)
    trained = kept(model, optimizer, "fp32_param")
    optimizer.eval()
    shows = [param.detach().clone() for param in model.parameters()]
    for name, value in kept(model, optimizer, "fp32_param").items():
        assert torch.equal(value, trained[name])
    assert all(map(torch.equal, model.parameters(), shows))
    with pytest.raises(RuntimeError, match=r"get_parameters\(\) in evaluation mode"):
        optimizer.get_parameters()
    optimizer.train()


@pytest.mark.parametrize("averaged", [{"ema_decay": 0.8}, {"optimizer": "schedule_free"}], ids=str)
@pytest.mark.parametrize("has_given_groups", [False, True])
def test_a_rank_without_parameters_is_in_evaluation_mode_too(averaged: Any, has_given_groups: bool) -> None:
    """It left the others, which refuse to be saved, waiting in a save."""

    def rank_main(everyone: Comm) -> list[bool]:
        model = Model().requires_grad_(everyone.rank == 0)
        axes = Axes(dp=Alone(), tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=everyone)
        config = OptimizerConfig(**PLAIN, **averaged)
        if has_given_groups:
            groups = [{"params": [model.first, model.second]}] if everyone.rank == 0 else []
            optimizer = get_optimizer_based_on_param_groups(config, [model], groups, pg_collection=roles)
        else:
            optimizer = get_optimizer(config, [model], {}, pg_collection=roles)
        optimizer.eval()
        with pytest.raises(RuntimeError, match="evaluation mode"):
            sharded_state(model, optimizer)
        optimizer.train()
        sharded_state(model, optimizer)
        return ["evaluating" in optimizer.state_dict(), optimizer.is_stub_optimizer]

    assert run_threads(2, rank_main) == [[False, False], [False, True]]


def test_a_decay_of_one_element_is_a_number() -> None:
    """The step was made, without the average."""
    model, optimizer = built(ema_decay=0.8)
    other, by_number = built(ema_decay=0.8)
    optimizer.param_groups[0]["ema_decay"] = torch.tensor([0.5])
    by_number.param_groups[0]["ema_decay"] = 0.5
    step(model, optimizer, 0)
    step(other, by_number, 0)
    assert all(map(torch.equal, kept(model, optimizer, "ema").values(), kept(other, by_number, "ema").values()))


def test_another_model_is_not_exported(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Moments of parameters without average were exported beside the weights."""
    model, optimizer = built(ema_decay=0.8)
    critic = nn.Linear(3, 2)
    plain = get_optimizer(OptimizerConfig(**PLAIN), [critic], {})
    critic(torch.ones(1, 3)).sum().backward()
    step(model, optimizer, 0)
    plain.step()
    save(sharded_state(model, optimizer) | {"critic": sharded_state(critic, plain)}, tmp_path / "saved")
    arguments = ["convert", str(tmp_path / "saved"), str(tmp_path / "out"), "--to", "safetensors", "--weights", "ema"]
    assert main(arguments) == 0
    found = load_file(tmp_path / "out" / "model.safetensors")
    assert found.keys() == {f"model.{name}" for name in model.state_dict()}
    assert torch.equal(found["model.first"], kept(model, optimizer, "ema")["first"])
    assert "as they were saved: model.count, model.frozen\n" in caplog.text


def test_averages_of_two_optimizers_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Those of the optimizer that was saved last were exported, whichever model was asked for."""
    saved = {}
    for name in ("one", "two"):
        model, optimizer = built(ema_decay=0.8)
        step(model, optimizer, 0)
        saved[name] = sharded_state(model, optimizer)
    save(saved, tmp_path / "saved")
    arguments = ["convert", str(tmp_path / "saved"), str(tmp_path / "out"), "--to", "safetensors", "--weights", "ema"]
    assert main([*arguments, "--prefix", "one.model."]) == 2
    assert "weights='ema' in one.optimizer.state., two.optimizer.state.; allowed" in capsys.readouterr().err


def test_states_of_another_optimizer_are_no_model(tmp_path: Path) -> None:
    """They have the keys of the averages, too."""
    model, optimizer = built(ema_decay=0.8)
    step(model, optimizer, 0)
    saved = {"own": sharded_state(model, optimizer)}
    model, optimizer = built()
    step(model, optimizer, 0)
    saved["other"] = {"optimizer": sharded_state(model, optimizer)["optimizer"]}
    save(saved, tmp_path / "saved")
    arguments = ["convert", str(tmp_path / "saved"), str(tmp_path / "out"), "--to", "safetensors", "--weights", "ema"]
    assert main(arguments) == 0
    assert {key.partition(".")[0] for key in load_file(tmp_path / "out" / "model.safetensors")} == {"own"}


def test_averages_need_the_weights_of_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """They were exported under keys of their own, beside the trained weights of other models."""
    model, optimizer = built(ema_decay=0.8)
    save({**sharded_state(model, optimizer), "model": sharded_model(nn.Linear(3, 2))}, tmp_path / "saved")
    arguments = ["convert", str(tmp_path / "saved"), str(tmp_path / "out"), "--to", "safetensors", "--weights", "ema"]
    assert main(arguments) == 2
    assert "holds 0 models with the weights of these averages" in capsys.readouterr().err


def test_an_export_without_averages_is_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save(sharded_state(*built()), tmp_path / "saved")
    arguments = ["convert", str(tmp_path / "saved"), str(tmp_path / "out"), "--to", "safetensors", "--weights", "ema"]
    assert main(arguments) == 2
    assert "holds averages of weights='ema' in no optimizer; allowed" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_a_pickled_state_of_shards_has_its_averages(caplog: pytest.LogCaptureFixture) -> None:
    """A log said that the averages of parameters that are cut were not saved."""

    def rank_main(comm: Comm) -> None:
        axes = Axes(dp=comm, tp=Alone(), inter=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        model = nn.Linear(20, 30)
        with torch.no_grad():
            model.weight.copy_(normal(30, 20, seed=1))
            model.bias.zero_()
        optimizer = get_optimizer(config(**FLAT), [model], {}, pg_collection=roles)
        model(torch.ones(2, 20)).sum().backward()
        optimizer.step()
        optimizer.load_state_dict(copy.deepcopy(optimizer.state_dict()))

    run_threads(2, rank_main)
    assert "without averages" not in caplog.text
