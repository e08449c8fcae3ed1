"""Rules by name: ours, the caller's, and those of installed packages."""

import re
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from stack_models import make_model, train, weights

from opt_config import ConfigError, OptimizerConfig
from opt_kernels.formulas import FORMULAS
from opt_kernels.rules import Needs
from opt_kernels.works import StateKind, StateSpec
from opt_stack import Optimizer, Registry, RuleEntry, describe_optimizer, get_optimizer, list_optimizers

OURS = [*FORMULAS, "muon", "adaptive_muon", "muown", "soap", "soap_muon"]


def test_all_our_rules_are_listed_and_described() -> None:
    assert list_optimizers() == OURS
    assert describe_optimizer("signum").endswith("it is signSGD. State: momentum_buffer. Needs elements.")
    for name in OURS:
        assert describe_optimizer(name).startswith(f"{name}: ")


# --- installed packages -----------------------------------------------------------------------------------------------


@pytest.fixture
def install(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Put a package with `source` as the module `their_rules`, and an entry point to it, on the path."""

    def put(source: str) -> None:
        (tmp_path / "their_rules.py").write_text(source)
        record = tmp_path / "their_rules-1.0.dist-info"
        record.mkdir()
        (record / "METADATA").write_text("Metadata-Version: 2.1\nName: their-rules\nVersion: 1.0\n")
        (record / "entry_points.txt").write_text("[opt_stack.rules]\ntheirs = their_rules:RULE\n")
        monkeypatch.syspath_prepend(str(tmp_path))
        monkeypatch.delitem(sys.modules, "their_rules", raising=False)

    return put


THEIRS = """
import torch
from opt_stack import torch_rule
RULE = torch_rule("theirs", torch.optim.Adamax)
"""


PACKAGES = {
    "RULE = 3": "entry point theirs = 'their_rules:RULE' of opt_stack.rules names a int; it must be an opt_kernels.",
    "raise OSError('no licence')": "cannot be loaded: OSError('no licence'); fix or uninstall the package",
    "from opt_stack import Registry; RULE = Registry()['adam']": "optimizer 'adam' is already registered; give the new",
}


@pytest.mark.parametrize("source", [*PACKAGES, THEIRS])
def test_an_installed_package_registers_its_rule_or_is_reported(install: Any, source: str) -> None:
    install(source)
    if source == THEIRS:
        assert list_optimizers() == [*OURS, "theirs"]
        model = make_model()
        before = weights(model)
        train(model, get_optimizer(OptimizerConfig(optimizer="theirs", lr=1e-2), [model]), range(1))
        assert all(not torch.equal(weight, before[name]) for name, weight in weights(model).items())
        return
    with pytest.raises(ConfigError, match=re.escape(PACKAGES[source])):
        get_optimizer(OptimizerConfig(lr=1e-2), [make_model()])


def test_a_name_that_units_could_not_be_told_by_is_refused() -> None:
    """`eval()` and `train()` lost the trained weights of schedule_free under such a name."""
    with pytest.raises(ConfigError, match=r"RuleEntry: name='mine/late' must not contain '/'"):
        replace(Registry().entries["schedule_free"], name="mine/late")


class NoNeeds:
    name = "mine"
    state_specs = ()
    codecs: ClassVar[dict[str, Any]] = {}

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


REMAINDERS = {"bf16": True, "use_precision_aware_optimizer": True, "store_param_remainders": True}
SHORT = {"bf16": True, "use_precision_aware_optimizer": True, "main_params_dtype": torch.int8}
DECLARED: list[tuple[StateKind, dict[str, Any], str]] = [  # specs that leave the shape of the state undefined
    (StateKind.MATRIX, {}, "dims=(); allowed is a tuple of one int"),
    (StateKind.MATRIX, {"dims": (2,)}, "dims=(2,); allowed are dims from -2 to 1"),
    (StateKind.REDUCED, {}, "dims=(); allowed is a tuple of the dims that it lacks"),
    (StateKind.REDUCED, {"dims": [0]}, "dims=[0]; allowed is a tuple of the dims that it lacks"),
    (StateKind.BLOCK_SCALES, {"block": None}, "block=None; allowed is the number of elements per scale"),
]


class Declares(NoRemainder):
    """A rule for matrices with one state of the shape of the parameter, whatever it declares."""

    needs = Needs.MATRICES

    def __init__(self, **spec: Any) -> None:
        self.state_specs = (StateSpec(name="gram", **spec),)

    def init_state(self, main: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"gram": torch.zeros_like(main)}


def build_with(rule: Any, options: dict[str, Any] | None = None) -> Optimizer:
    rules = Registry().with_rule(RuleEntry(name="mine", summary="", make=lambda config: rule, hyper=lambda config: {}))
    config = OptimizerConfig(optimizer="mine", lr=1e-2, **(options or {}))
    return get_optimizer(config, [make_model(config.precision.params)], rules=rules)


@pytest.mark.parametrize(
    ("rule", "options", "message"),
    [
        (NoNeeds(), {}, "its rule NoNeeds lacks needs"),
        (Undeclared(), {}, "keeps trace, which its state_specs do not declare"),
        (NotMade(), {}, "state 'trace' of '2.bias' is missing, but rule 'mine' declares"),
        (NoRemainder(), REMAINDERS, "with a remainder raised AttributeError"),
        (RoundsAway(), REMAINDERS, "updates a parameter differently"),
        (NoRemainder(), SHORT, "torch.int8: .* with a remainder raised AttributeError"),
        (RoundsAway(), SHORT, "updates a parameter differently"),
    ],
)
def test_a_rule_without_support_for_its_options_is_refused(rule: Any, options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        build_with(rule, options)


def test_a_state_without_a_shape_is_refused_when_built() -> None:
    for kind, spec, problem in DECLARED:
        message = f"optimizer='mine': its rule Declares declares the state 'gram' with kind={kind}, {problem}"
        with pytest.raises(ConfigError, match=re.escape(message)):
            build_with(Declares(kind=kind, **spec))
