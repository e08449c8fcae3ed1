"""Rules by name: ours, the caller's, and those of installed packages."""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from stack_models import assert_equal, make_model, train, weights

from opt_checkpoint import sharded_model
from opt_config import ConfigError, OptimizerConfig
from opt_kernels.formulas import FORMULAS
from opt_kernels.rules import SGD, ElementwiseRule, Needs
from opt_kernels.works import StateKind, StateSpec
from opt_stack import Registry, RuleEntry, describe, describe_optimizer, get_optimizer, list_optimizers

OURS = [*FORMULAS, "muon", "adaptive_muon", "soap", "soap_muon"]


def test_all_our_rules_are_listed_and_described() -> None:
    assert list_optimizers() == OURS
    assert describe_optimizer("signum") == (
        "signum: Signum (Bernstein et al. 2018, arXiv 1802.04434, algorithm 2): the sign of a momentum. With momentum "
        "0 it is signSGD. State: momentum_buffer. Needs elements."
    )
    for name in OURS:
        assert describe(name).startswith(f"{name}: ")


@dataclass(frozen=True, slots=True, kw_only=True)
class Backwards(ElementwiseRule):
    """A rule that climbs: one that only this test can have made."""

    def update_(self, batches: Any, *, grad_scale: Any = 1.0, skip: Any = None) -> None:
        ElementwiseRule.update_(self, batches, grad_scale=-grad_scale, skip=skip)


BACKWARDS = RuleEntry(
    name="backwards",
    summary="gradient ascent",
    make=lambda config: Backwards(formula=SGD().formula),
    hyper=lambda config: {"momentum": 0.0, "dampening": 0.0},
)


def test_a_rule_of_ones_own_is_a_value_in_a_registry_of_ones_own() -> None:
    plain = Registry()
    mine = plain.with_rule(BACKWARDS)
    assert list_optimizers(mine) == [*OURS, "backwards"]
    assert list_optimizers(plain) == OURS
    down, up = make_model(), make_model()
    start = weights(down)
    settings = {"lr": 0.5, "weight_decay": 0.0, "clip_grad": 0.0}
    train(down, get_optimizer(OptimizerConfig(optimizer="sgd", sgd_momentum=0.0, **settings), [down]), range(1))
    train(up, get_optimizer(OptimizerConfig(optimizer="backwards", **settings), [up], rules=mine), range(1))
    for name, weight in weights(up).items():
        assert ((weight - start[name]) * (weights(down)[name] - start[name]) <= 0).all()
    assert (weights(up)["0.weight"] != start["0.weight"]).any()


def test_a_taken_name_is_refused() -> None:
    with pytest.raises(ConfigError) as caught:
        Registry().with_rule(RuleEntry(name="adam", summary="", make=BACKWARDS.make, hyper=BACKWARDS.hyper))
    assert str(caught.value) == "optimizer 'adam' is already registered; give the new rule another name"


# --- installed packages -----------------------------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a package with `source` as the module `their_rules`, and an entry point to it, on the path."""

    def put(source: str, target: str = "their_rules:RULE") -> None:
        (tmp_path / "their_rules.py").write_text(source)
        record = tmp_path / "their_rules-1.0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: their-rules\nVersion: 1.0\n")
        (record / "entry_points.txt").write_text(f"[opt_stack.rules]\ntheirs = {target}\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "their_rules", raising=False)

    return put


THEIRS = """
import torch
from opt_stack import torch_rule
RULE = torch_rule("theirs", torch.optim.Adamax)
"""


def test_an_installed_package_registers_its_rule(install: Any) -> None:
    install(THEIRS)
    assert list_optimizers() == [*OURS, "theirs"]
    model, again = make_model(), make_model()
    for each in (model, again):
        train(each, get_optimizer(OptimizerConfig(optimizer="theirs", lr=1e-2), [each]), range(2))
    assert_equal(weights(model), weights(again))


@pytest.mark.parametrize(
    ("source", "target", "message"),
    [
        pytest.param(
            "RULE = 3",
            "their_rules:RULE",
            "entry point theirs = 'their_rules:RULE' of opt_stack.rules names a int; it must be an "
            "opt_kernels.formulas.Formula or an opt_stack.RuleEntry",
            id="no-rule",
        ),
        pytest.param(
            "raise OSError('no licence')",
            "their_rules:RULE",
            "entry point theirs = 'their_rules:RULE' of opt_stack.rules cannot be loaded: OSError('no licence'); "
            "fix or uninstall the package",
            id="broken",
        ),
        pytest.param(
            "from opt_stack.rules.registry import ADAM as RULE",
            "their_rules:RULE",
            "optimizer 'adam' is already registered; give the new rule another name",
            id="taken",
        ),
    ],
)
def test_a_package_without_rules_is_reported(install: Any, source: str, target: str, message: str) -> None:
    install(source, target)
    with pytest.raises(ConfigError) as caught:
        get_optimizer(OptimizerConfig(lr=1e-2), [make_model()])
    assert str(caught.value) == message


class NoNeeds:
    name, state_specs, codecs = "mine", (), {}

    def init_state(self, main: torch.Tensor) -> dict[str, torch.Tensor]:
        return {}

    def update_(self, batches: Any, *, grad_scale: Any = 1.0, skip: Any = None) -> None:
        for hyper, works in batches:
            for work in works:
                work.main.sub_(work.grad, alpha=hyper.lr * grad_scale)


class NoRemainder(NoNeeds):
    needs = Needs.ELEMENTS


class RoundsAway(NoRemainder):
    def update_(self, batches: Any, *, grad_scale: Any = 1.0, skip: Any = None) -> None:
        for hyper, works in batches:
            for work in works:
                moved = work.out if work.main is None else work.main
                moved.sub_(work.grad.to(moved.dtype), alpha=hyper.lr * grad_scale)


class Undeclared(NoRemainder):
    def init_state(self, main: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"trace": torch.zeros_like(main)}


class NotMade(NoRemainder):
    state_specs = (StateSpec(name="trace"),)


class OtherShapes(NoRemainder):
    needs = Needs.MATRICES
    state_specs = (StateSpec(name="scale", kind=StateKind.SCALAR), StateSpec(name="gram"))

    def init_state(self, main: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"scale": torch.zeros(()), "gram": torch.eye(len(main)), "norms": torch.zeros(main.shape[1:])}


class Described(OtherShapes):
    state_specs = (
        StateSpec(name="scale", kind=StateKind.SCALAR),
        StateSpec(name="gram", kind=StateKind.MATRIX, dims=(0,)),
        StateSpec(name="norms", kind=StateKind.REDUCED, dims=(-2,)),
    )


class OneLess(OtherShapes):
    def init_state(self, main: torch.Tensor) -> dict[str, torch.Tensor]:
        states = super().init_state(main)
        return {"scale": states["scale"], "gram": states["gram"]}


class Declares(NoRemainder):
    """A rule for matrices with one state of the shape of the parameter, whatever it declares."""

    needs = Needs.MATRICES

    def __init__(self, **spec: Any) -> None:
        self.state_specs = (StateSpec(name="gram", **spec),)

    def init_state(self, main: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"gram": torch.zeros_like(main)}


def declared(kind: StateKind, problem: str, **spec: Any) -> Any:
    """A case of a spec that leaves the shape of its state undefined."""
    message = re.escape(f"optimizer='mine': its rule Declares declares the state 'gram' with kind={kind}, {problem}")
    return pytest.param(Declares(kind=kind, **spec), {}, message, id=f"{kind.name}-{spec}".lower())


MATRIX, REDUCED = StateKind.MATRIX, StateKind.REDUCED
ONE_DIM, LACKED = "allowed is a tuple of one int", "allowed is a tuple of the dims that it lacks"
REMAINDERS = {"bf16": True, "use_precision_aware_optimizer": True, "store_param_remainders": True}
SHORT = {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.int8}


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        pytest.param(NoNeeds(), {}, "its rule NoNeeds lacks needs", id="no-needs"),
        pytest.param(Undeclared(), {}, "keeps trace, which its state_specs do not declare", id="undeclared-state"),
        pytest.param(NotMade(), {}, "state 'trace' of '2.bias' is missing, but rule 'mine' declares", id="not-made"),
        pytest.param(
            OneLess(),
            {},
            r"'gram' of '2.weight' has shape \(3, 3\) .* declares torch.float32 of shape \(3, 7\)",
            id="shapes",
        ),
        declared(MATRIX, f"dims=(); {ONE_DIM}"),
        declared(MATRIX, f"dims=0; {ONE_DIM}", dims=0),
        declared(MATRIX, f"dims=(0, 1); {ONE_DIM}", dims=(0, 1)),
        declared(MATRIX, "dims=(2,); allowed are dims from -2 to 1", dims=(2,)),
        declared(REDUCED, f"dims=(); {LACKED}"),
        declared(REDUCED, f"dims=[0]; {LACKED}", dims=[0]),
        declared(REDUCED, "dims=(-3,); allowed are dims from -2 to 1", dims=(-3,)),
        declared(StateKind.BLOCK_SCALES, "block=0; allowed is the number of elements per scale, at least 1"),
        declared(StateKind.BLOCK_SCALES, "block=None; allowed is the number of elements per scale", block=None),
        pytest.param(NoRemainder(), REMAINDERS, "with a remainder raised AttributeError", id="no-remainder"),
        pytest.param(RoundsAway(), REMAINDERS, "updates a parameter differently", id="rounds"),
        pytest.param(NoRemainder(), SHORT, "torch.int8: .* with a remainder raised AttributeError", id="no-short"),
        pytest.param(RoundsAway(), SHORT, "updates a parameter differently", id="rounds-short"),
    ],
)
def test_a_rule_that_does_not_support_its_options_is_refused_when_built(
    rule: Any, options: dict[str, Any], message: str
) -> None:
    rules = Registry().with_rule(RuleEntry(name="mine", summary="", make=lambda config: rule, hyper=lambda config: {}))
    config = OptimizerConfig(optimizer="mine", lr=1e-2, **options)
    with pytest.raises(ValueError, match=message):
        get_optimizer(config, [make_model(torch.bfloat16 if options else torch.float32)], rules=rules)


def test_states_of_every_shape_may_be_declared() -> None:
    """An undeclared shape was refused by the first save; an undeclared state was not saved."""
    entry = RuleEntry(name="mine", summary="", make=lambda config: Described(), hyper=lambda config: {})
    weight = torch.nn.Linear(4, 6, bias=False)
    optimizer = get_optimizer(OptimizerConfig(optimizer="mine", lr=1e-2), [weight], rules=Registry().with_rule(entry))
    states = optimizer.sharded_state_dict(sharded_model(weight))["state"]
    assert {name for state in states.values() for name in state} >= {"scale", "gram", "norms"}
