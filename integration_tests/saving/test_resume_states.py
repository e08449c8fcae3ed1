"""Each parameter's state and hyper-parameters between save and load, from `get_optimizer` to disk: restored to the bit,
or, where another model, rule or program saved them, converted, reported or refused. State of stacked experts, of chunks
that share a parameter, and of two optimizers, in one checkpoint."""

from pathlib import Path
from typing import Any

import pytest
import torch
from parity import sharded_state
from torch import Tensor, nn

from opt_checkpoint import (
    CheckpointKeyError,
    LoadReport,
    ShardedTensor,
    add_prefix_for_sharding,
    load,
    load_optimizer,
    read_index,
    save,
    sharded_model,
)
from opt_checkpoint.convert.torch_files import checkpoint_to_torch_file
from opt_config import OptimizerConfig, ParamKey
from opt_kernels.codecs import BLOCK, scale_name
from opt_stack import get_optimizer

FLAT = {"use_distributed_optimizer": True}
NARROW = {"use_precision_aware_optimizer": True, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.uint8}
KINDS: dict[str, dict[str, Any]] = {
    "replicated fp32": {},
    "flat bf16 with mains": FLAT | {"bf16": True},
    "flat bf16 with remainders, narrow moments": FLAT | {"bf16": True} | NARROW,
}
UNUSED = "unused.weight"
ZERO = "zero.weight"
FROZEN = "frozen.weight"


class PartlyTrained(nn.Module):
    """Tied embedding and head; a frozen matrix; one that the loss never reaches; one whose gradient is always zero."""

    def __init__(self, *, seed: int):
        super().__init__()
        torch.manual_seed(seed)
        self.embedding = nn.Embedding(11, 16)
        self.first = nn.Linear(16, 24)
        self.second = nn.Linear(24, 16)
        self.frozen, self.zero, self.unused = (nn.Linear(16, cols, bias=False) for cols in (16, 8, 8))
        self.head = nn.Linear(16, 11, bias=False)
        self.head.weight = self.embedding.weight
        self.frozen.weight.requires_grad_(False)

    def forward(self, codes: Tensor) -> Tensor:
        x = self.embedding(codes[:, :-1])
        x = x + self.frozen(self.second(torch.tanh(self.first(x)))) + (self.zero(x) * 0).sum()
        return nn.functional.cross_entropy(self.head(x).flatten(0, 1).float(), codes[:, 1:].flatten())


class Run:
    """A model and its optimizer, by default other ones than those that were saved."""

    def __init__(self, *, seed: int = 1, overrides: Any = None, trains: str = "", freezes: str = "", **fields: Any):
        self.model = PartlyTrained(seed=seed).to(torch.bfloat16 if "bf16" in fields else torch.float32)
        for name in filter(None, (trains, freezes)):
            self.model.get_parameter(name).requires_grad_(name == trains)
        self.optimizer = get_optimizer(OptimizerConfig(**{"lr": 1e-2, **fields}), [self.model], overrides)

    def train(self, *steps: int) -> list[float]:
        losses = []
        for step in range(*steps):
            loss = self.model(torch.randint(11, (4, 9), generator=torch.Generator().manual_seed(step)))
            self.optimizer.zero_grad()
            loss.backward()
            self.optimizer.step()
            losses.append(loss.item())
        return losses

    def sharded(self) -> dict[str, Any]:
        return sharded_state(self.model, self.optimizer)

    def saved(self, path: Path) -> "Run":
        save(self.sharded(), path)
        return self

    def resume(self, path: Path, load_options: Any = None, **options: Any) -> LoadReport:
        report = load(self.sharded(), path, **(load_options or {}))
        self.optimizer.load_state_dict(report.state["optimizer"], **options)
        return report

    def states(self) -> dict[str, dict[str, Tensor]]:
        """Copies, by parameter name; by one name of the tied one, which goes by the first of the model.

        Codes are multiplied by their scales: a load may double codes and halve the scale.
        """
        held = self.optimizer.state_dict()
        found = {
            name.replace("head", "embedding"): {key: value.clone() for key, value in held["state"][index].items()}
            for group in held["param_groups"]
            for index, name in zip(group["params"], group["param_names"], strict=True)
        }
        for state in found.values():
            for key in [key for key in state if scale_name(key) in state]:
                scales = state.pop(scale_name(key)).repeat_interleave(BLOCK)
                codes = state[key].float()
                state[key] = codes * scales[: codes.numel()].view(codes.shape)
        return found

    def group_of(self, name: str) -> dict[str, Any]:
        return next(g for g in self.optimizer.param_groups if name in {id.name for id in g["param_ids"]})


def trained(*, steps: int = 3, **options: Any) -> Run:
    run = Run(seed=0, **options)
    run.train(steps)
    return run


def assert_same(got: dict[str, dict[str, Tensor]], want: dict[str, dict[str, Tensor]]) -> None:
    assert {name: set(state) for name, state in got.items()} == {name: set(state) for name, state in want.items()}
    for name, state in want.items():
        for key, value in state.items():
            assert torch.equal(got[name][key], value), f"{key} of {name}"


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "saved"


@pytest.fixture
def plain(path: Path) -> Run:
    """A plain run after three steps, saved at `path`."""
    return trained().saved(path)


# --- parameters that did not all train --------------------------------------------------------------------------------


@pytest.mark.parametrize("steps", [0, 3])
@pytest.mark.parametrize("kind", KINDS)
def test_tied_frozen_unused_and_zero_grad_params_are_resumed(path: Path, kind: str, steps: int) -> None:
    """Also before the first step. State exists from construction; Megatron-Core makes it in the first step."""
    run = trained(steps=steps, **KINDS[kind]).saved(path)
    other = Run(**KINDS[kind])
    other.train(5, 7)
    other.resume(path)
    got = other.states()
    assert_same(got, run.states())
    assert {name: int(s["step"]) for name, s in got.items() if s["step"] != steps} == ({UNUSED: 0} if steps else {})
    assert not got[ZERO]["exp_avg"].any()
    assert FROZEN not in got
    assert torch.equal(other.model.frozen.weight, run.model.frozen.weight)
    assert other.train(steps, 8) == run.train(steps, 8)


def test_a_parameter_unfrozen_later_starts_from_zero(plain: Run, path: Path) -> None:
    other = Run(trains=FROZEN)
    other.train(2)
    with pytest.raises(CheckpointKeyError, match=r"3 requested key\(s\) are not in .*exp_avg\.frozen\.weight"):
        other.resume(path)
    report = other.resume(path, {"strict": "return_unexpected"})
    assert sorted(report.missing) == [f"optimizer.state.{s}.{FROZEN}" for s in ("exp_avg", "exp_avg_sq", "step")]
    got = other.states()
    assert not any(value.any() for value in got.pop(FROZEN).values())
    assert_same(got, plain.states())


def test_a_parameter_frozen_later_drops_its_state(plain: Run, path: Path) -> None:
    other = Run(freezes="first.weight")
    report = other.resume(path)
    left = {f"optimizer.state.{s}.first.weight" for s in ("exp_avg", "exp_avg_sq", "step")}
    assert {key for key in report.unexpected if key.endswith("first.weight")} == left
    assert_same(other.states(), {n: s for n, s in plain.states().items() if n != "first.weight"})


# --- groups -----------------------------------------------------------------------------------------------------------


def test_the_saved_rate_is_used_unless_another_is_requested(plain: Run, path: Path) -> None:
    other = Run(lr=0.25)
    other.resume(path)
    assert {group["lr"] for group in other.optimizer.param_groups} == {1e-2}
    other.resume(path, override={"lr": 0.125})
    assert {group["lr"] for group in other.optimizer.param_groups} == {0.125}
    before = other.model.zero.weight.detach().clone()
    other.train(3, 4)
    # Zero gradients since the first step: only the decay of 0.01 moves it, at the rate asked for.
    torch.testing.assert_close(other.model.zero.weight.detach(), before * (1 - 0.125 * 0.01), rtol=1e-6, atol=0)
    with pytest.raises(ValueError, match=r"override=\{'lr': 1.0\}: both are for a sharded state only"):
        other.optimizer.load_state_dict(other.optimizer.state_dict(), override={"lr": 1.0})
    plain.optimizer.param_groups[0]["lr"] = -1.0
    plain.saved(path.parent / "damaged")
    with pytest.raises(ValueError, match=r"group .*lr=-1.0"):
        other.resume(path.parent / "damaged")
    assert {group["lr"] for group in other.optimizer.param_groups} == {0.125}
    other.resume(path.parent / "damaged", override={"lr": 0.02})
    assert {group["lr"] for group in other.optimizer.param_groups} == {0.02}


def test_groups_that_were_joined_say_what_they_disagree_on(path: Path) -> None:
    rates = {ParamKey(name="first.*"): {"max_lr": 3e-3}, ParamKey(name="second.*"): {"max_lr": 5e-3}}
    run = trained(overrides=rates).saved(path)
    other = Run(lr=0.5)
    with pytest.raises(ValueError, match=r"field 'max_lr': parameter .* was saved with .* on_conflict='saved'"):
        other.resume(path)
    other.resume(path, on_conflict="current")
    assert other.group_of("first.weight")["lr"] == 0.5
    assert_same(other.states(), run.states())


# --- other programs and rules -----------------------------------------------------------------------------------------


def test_torchs_adamw_goes_on_from_what_ours_saved(plain: Run, path: Path, tmp_path: Path) -> None:
    checkpoint_to_torch_file(path, tmp_path / "x.pt")
    state_dict = torch.load(tmp_path / "x.pt", weights_only=True)
    by_name = dict(plain.model.named_parameters(remove_duplicate=False))
    groups = [{"params": [by_name[name] for name in group["param_names"]]} for group in state_dict["param_groups"]]
    by_file = torch.optim.AdamW(groups, lr=1.0)
    by_file.load_state_dict(state_dict)
    directly = torch.optim.AdamW([{"params": group["params"]} for group in groups], lr=1.0)
    load_optimizer(plain.model, directly, path)
    want = {by_name[name]: state for name, state in plain.states().items()}
    for optimizer in (by_file, directly):
        assert sum("exp_avg" in state for state in optimizer.state.values()) == len(want) > 4
        for param, state in optimizer.state.items():
            for moment in {"exp_avg", "exp_avg_sq"} & state.keys():
                assert torch.equal(state[moment], want[param][moment])
    used = [group["lr"] for group in plain.optimizer.param_groups if group["params"]]
    assert [group["lr"] for group in by_file.param_groups] == used
    by_file.step()


MOVED = ("first.weight", "second.weight", ZERO, UNUSED)


@pytest.fixture
def muon() -> Run:
    other = Run(optimizer="muon", lr=0.05)
    other.train(2)
    assert {n for n, state in other.states().items() if "momentum_buffer" in state} == set(MOVED)
    return other


@pytest.mark.parametrize("mapped", [False, True], ids=["reset", "mapped"])
def test_state_of_another_rule_is_refused_reset_or_mapped(plain: Run, path: Path, muon: Run, mapped: bool) -> None:
    with pytest.raises(CheckpointKeyError, match=r"saved by another rule, with exp_avg, exp_avg_sq, step; reset"):
        muon.resume(path)
    aliases = {"optimizer.state.momentum_buffer.": "optimizer.state.exp_avg."}
    muon.resume(path, {"aliases": aliases} if mapped else {"strict": "return_unexpected"})
    want = plain.states()
    got = muon.states()
    for name in MOVED:
        assert int(got[name]["step"]) == (int(want[name]["step"]) if mapped else 0)
        assert torch.equal(got[name]["momentum_buffer"], want[name]["exp_avg"] * mapped)
    assert_same({"b": got["first.bias"]}, {"b": want["first.bias"]})
    assert muon.group_of("first.weight")["lr"] == 0.05
    assert "betas" not in muon.group_of("first.weight")
    assert muon.group_of("first.bias")["lr"] == 1e-2
    muon.train(3, 5)


def test_state_of_the_same_name_from_another_rule_is_reported(
    plain: Run, path: Path, muon: Run, caplog: pytest.LogCaptureFixture
) -> None:
    Run().resume(path)
    muon.resume(path, {"strict": "return_unexpected"})  # starts from zero
    assert "continues from the state" not in caplog.text
    Run(optimizer="lion").resume(path)
    assert "lion continues from the state that adam kept for" in caplog.text


BASE: dict[str, Any] = {"lr": 0.1, "clip_grad": 0.0}
ADAPTIVE = {**BASE, "optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "namo"}
EXPERT_RULES: dict[str, dict[str, Any]] = {
    "soap": {**BASE, "optimizer": "soap"},
    "soap one-sided, megatron": {**BASE, "optimizer": "soap", "soap_one_sided": True, "soap_order": "megatron"},
    "normuon, longer": {**ADAPTIVE, "adaptive_muon_moment2_method": "normuon", "adaptive_muon_lines": "longer"},
    "namo": ADAPTIVE,
}


class OneParam(nn.Module):
    def __init__(self, values: Tensor, **marks: Any):
        super().__init__()
        self.weight = nn.Parameter(values.clone())
        for name, value in marks.items():
            setattr(self.weight, name, value)


@pytest.mark.parametrize("rule", EXPERT_RULES)
def test_state_of_stacked_experts_loads_on_other_ranks(tmp_path: Path, rule: str) -> None:
    """The state of each expert belongs to it: factors, bases, and the numbers of lines and matrices."""
    fields = EXPERT_RULES[rule]
    generator = torch.Generator().manual_seed(0)
    start, *grads = (torch.randn(4, 6, 4, generator=generator) for _ in range(4))

    def made(rank: int, ranks: int, steps: int) -> tuple[Tensor, Any, dict[str, Any]]:
        """A rank's experts after some steps, with their optimizer and sharded state."""
        model = OneParam(start.chunk(ranks)[rank])
        # Stacks are Adam's unless an override says otherwise.
        overrides = {ParamKey(name="weight"): {"optimizer": fields["optimizer"]}}
        optimizer = get_optimizer(OptimizerConfig(**fields), [model], overrides)
        for grad in grads[:steps]:
            model.weight.grad = grad.chunk(ranks)[rank].clone()
            optimizer.step()
        weights = {"weight": ShardedTensor.from_rank_offsets("weight", model.weight, (0, rank, ranks))}
        return model.weight, optimizer, {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}

    by_rank = [made(rank, 2, 2)[2] for rank in range(2)]
    state = {str(at): {**mine, "optimizer": mine["optimizer"]["state"]} for at, mine in enumerate(by_rank)}
    groups = {key: value for key, value in by_rank[0]["optimizer"].items() if key != "state"}
    save({**state, "optimizer": groups}, tmp_path / "saved")
    weight, resumed, state = made(0, 1, 0)
    assert set(state["optimizer"]["state"]["weight"]) & {"Q_R", "momentum_buffer"}
    resumed.load_state_dict(load(state, tmp_path / "saved").state["optimizer"])
    weight.grad = grads[2].clone()
    resumed.step()
    torch.testing.assert_close(weight, made(0, 1, 3)[0], rtol=0, atol=1e-4)


@pytest.mark.parametrize("second_replica", [0, 1])
def test_two_chunks_that_share_a_parameter_are_saved_and_loaded(tmp_path: Path, second_replica: int) -> None:
    def made(value: float) -> tuple[list[OneParam], Any, dict[str, Any]]:
        chunks = [OneParam(torch.full((4, 3), value), pipeline_parallel=True) for _ in range(2)]
        optimizer = get_optimizer(OptimizerConfig(**BASE), chunks, {})
        for chunk in chunks:
            chunk.weight.grad = torch.full((4, 3), 0.5)
        optimizer.step()
        weights = {
            f"model{number}": ShardedTensor.from_rank_offsets("shared", chunk.weight, replica_id=replica)
            for number, (chunk, replica) in enumerate(zip(chunks, (0, second_replica), strict=True))
        }
        return chunks, optimizer, {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}

    _, optimizer, state = made(1.0)
    save(state, tmp_path / "saved")
    chunks, other, state = made(9.0)
    for of_param in other.state.values():
        of_param["exp_avg"].zero_()
    other.load_state_dict(load(state, tmp_path / "saved").state["optimizer"])
    for loaded, saved in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(loaded["exp_avg"], saved["exp_avg"])
        assert loaded["exp_avg"].any()
    assert torch.equal(chunks[0].weight, chunks[1].weight)
    assert chunks[0].weight.max() < 2


def test_two_chunks_with_two_prefixes_keep_them(tmp_path: Path) -> None:
    def made(values: tuple[float, float]) -> tuple[list[OneParam], Any, dict[str, Any]]:
        chunks = [OneParam(torch.full((4, 3), value)) for value in values]
        optimizer = get_optimizer(OptimizerConfig(**BASE), chunks, {})
        for chunk, value in zip(chunks, values, strict=True):
            chunk.weight.grad = torch.full((4, 3), value)
        optimizer.step()
        weights = {f"model{number}": sharded_model(chunk) for number, chunk in enumerate(chunks)}
        for name, part in weights.items():
            add_prefix_for_sharding(part, f"{name}.")
        return chunks, optimizer, {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}

    saved, optimizer, state = made((1.0, 2.0))
    save({"optimizer": state["optimizer"], **state["model"]}, tmp_path / "x")
    stored = read_index(tmp_path / "x").tensors
    assert {"model0.model0.weight", "optimizer.state.exp_avg.model1.weight"} <= stored.keys()
    chunks, other, state = made((3.0, 4.0))
    loaded = load({"optimizer": state["optimizer"], **state["model"]}, tmp_path / "x").state
    other.load_state_dict(loaded["optimizer"])
    for mine, theirs in zip(chunks, saved, strict=True):
        assert torch.equal(mine.weight, theirs.weight)
    for mine, theirs in zip(other.state.values(), optimizer.state.values(), strict=True):
        assert torch.equal(mine["exp_avg"], theirs["exp_avg"])


def test_two_optimizers_of_one_state_keep_their_own_moments(path: Path) -> None:
    runs = {"first": trained(optimizer="sgd"), "optimizer": trained(steps=2)}
    others = {"first": Run(optimizer="sgd"), "optimizer": Run()}
    save({at: run.sharded() for at, run in runs.items()}, path)
    report = load({at: run.sharded() for at, run in others.items()}, path)
    assert report.missing == report.unexpected == ()
    for at, run in others.items():
        run.optimizer.load_state_dict(report.state[at]["optimizer"])
        assert_same(run.states(), runs[at].states())
        assert torch.equal(run.model.head.weight, runs[at].model.head.weight)
