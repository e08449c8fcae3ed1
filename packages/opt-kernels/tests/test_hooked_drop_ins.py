"""Hooks of drop-in optimizers: for all groups or one, in state_dicts, and what is refused."""

import copy
import io
import logging
import re

import pytest
import torch
from drop_ins import layers, step
from torch import nn

from opt_kernels.formulas import FORMULAS
from opt_kernels.hooks import (
    CautiousDecay,
    CautiousUpdate,
    ClipUpdateRms,
    CoupledDecay,
    HookError,
    Hyperball,
    LrDecoupledDecay,
    RadialBrake,
    RadiusPin,
    RelativeUpdate,
    RowFloor,
    hooked,
)
from opt_kernels.optim import AdamW, Muon
from opt_kernels.rules import Adam as AdamRule
from opt_kernels.rules import MuonRule, SOAPRule, elementwise
from opt_kernels.works import Batch, Hyper, Work


def trained(make, times=3):
    net = layers(8, 16, 4)
    step(make(net), *range(times))
    return [param.detach() for param in net.parameters()]


OF_ADAM = [(CautiousDecay(), ClipUpdateRms(0.5)), (RelativeUpdate(),), (CautiousUpdate(), CoupledDecay())]


@pytest.mark.parametrize("hooks", OF_ADAM, ids=repr)
def test_a_drop_in_updates_each_parameter_as_its_hooked_rule(hooks):
    net = layers(8, 16, 4)
    rule = hooked(AdamRule(), hooks)
    groups = [{"params": net[0].parameters(), "lr": 0.01}, {"params": net[1].parameters(), "lr": 0.02}]
    optimizer = AdamW(groups, weight_decay=0.1, hooks=hooks)
    before = copy.deepcopy(net)
    step(optimizer, 0)
    for lr, moved, layer in zip((0.01, 0.02), net, before):
        for param, start in zip(moved.parameters(), layer.parameters()):
            work = Work(grad=param.grad, main=start.data, state=rule.init_state(start.data))
            rule.update_([Batch(Hyper(lr=lr, weight_decay=0.1, step=1), [work])])
            assert torch.equal(param, start)
    assert copy.deepcopy(optimizer).hooks == hooks


def test_a_group_may_have_hooks_of_its_own():
    def make(net):
        matrices = {"params": [net[0].weight], "hooks": [Hyperball()], "weight_decay": 0.0}
        rest = {"params": [net[0].bias, net[1].weight], "hooks": ()}
        return AdamW([matrices, rest, {"params": [net[1].bias]}], lr=0.01, hooks=(CautiousDecay(),))

    plain, cautious = (lambda net, h=h: AdamW(net.parameters(), lr=0.01, hooks=h) for h in ((), (CautiousDecay(),)))
    norm = layers(8, 16, 4)[0].weight.detach().norm()
    assert torch.isclose(trained(make)[0].norm(), norm, rtol=1e-6)
    assert not torch.isclose(trained(plain)[0].norm(), norm, rtol=1e-6)
    found = trained(make, 1)
    assert torch.equal(found[1], trained(plain, 1)[1])
    assert torch.equal(found[3], trained(cautious, 1)[3])


def test_hooks_of_muon_are_by_rule():
    hooks = {"muon": (Hyperball(),), "adam": (RelativeUpdate(),)}
    start = [*layers(8, 16, 4).parameters()]
    got = trained(lambda net: Muon(net, lr=0.02, weight_decay=0.0, scalar_optimizer="adam", hooks=hooks))
    for before, after in zip(start[::2], got[::2]):
        assert torch.isclose(before.norm(), after.norm(), rtol=1e-6)
    assert not torch.isclose(start[1].norm(), got[1].norm(), rtol=1e-4)


def saved(optimizer):
    file = io.BytesIO()
    torch.save(optimizer.state_dict(), file)
    file.seek(0)
    return torch.load(file, weights_only=True)


def test_loading_keeps_the_optimizers_hooks_and_names_saved_ones(caplog):
    hooks = (CautiousDecay(), ClipUpdateRms(0.5))
    net = layers(8, 16, 4)
    optimizer = AdamW(
        [{"params": [net[0].weight], "hooks": (ClipUpdateRms(),)}, {"params": [net[1].weight]}], hooks=hooks
    )
    step(optimizer, 0)
    state = saved(optimizer)
    recorded = [("ClipUpdateRms(threshold=1.0)",), ("CautiousDecay()", "ClipUpdateRms(threshold=0.5)")]
    assert [group["hooks"] for group in state["param_groups"]] == recorded
    for now in (hooks, (CautiousDecay(),), ()):
        other = AdamW(
            [{"params": [net[0].weight], "hooks": (ClipUpdateRms(),)}, {"params": [net[1].weight]}], hooks=now
        )
        caplog.clear()
        with caplog.at_level(logging.WARNING, logger="opt_kernels"):
            other.load_state_dict(state)
        assert caplog.text.count("continues with hooks") == (now != hooks)
        assert [group.get("hooks") for group in other.param_groups] == [(ClipUpdateRms(),), None]
        assert other.state_dict()["param_groups"][1].get("hooks", ()) == tuple(map(repr, now))
    assert "continues with hooks none, but was saved with CautiousDecay(), ClipUpdateRms(threshold=0.5)" in caplog.text


def zeros(*shape):
    return [nn.Parameter(torch.zeros(shape))]


SCHEDULE_FREE = elementwise(FORMULAS["schedule_free"], backend="torch")
OF_DROP_INS = [
    (lambda: AdamW([layers(8, 16, 4)[0].bias], weight_decay=0.0, hooks=(Hyperball(),)),
     "parameter of shape (16,): it is for matrices"),
    (lambda: AdamW([layers(8, 16, 4)[0].weight], hooks=(Hyperball(),)),
     "weight_decay=0.01: it keeps the norm instead of decaying it; set 0.0"),
    (lambda: AdamW(zeros(4, 4), weight_decay=0.0, hooks=(Hyperball(),)),
     "these are all zeros; pass Hyperball(radius=...)"),
    (lambda: AdamW(zeros(4, 4), hooks={"muon": (CautiousDecay(),)}),
     "hooks has 'muon', which is not a rule of this optimizer; allowed are adam"),
    (lambda: AdamW([{"params": zeros(4, 4), "hooks": [CautiousDecay]}]),
     "which is not a hook of opt_kernels.hooks; pass CautiousDecay()"),
    *((lambda hook=hook: Muon([{"params": zeros(2, 4, 4), "use_matrix_rule": True}], hooks=(hook,)),
       "it does not support stacks of matrices, which need one norm each") for hook in (RelativeUpdate(), RowFloor())),
]  # fmt: skip
OF_RULES = [
    (AdamRule(), [CautiousDecay], "is not a hook of opt_kernels.hooks; pass CautiousDecay()"),
    (AdamRule(), ["cautious"], "'cautious', which is not a hook"),
    (AdamRule(), [ClipUpdateRms(), ClipUpdateRms(2.0)], "ClipUpdateRms 2 times"),
    (AdamRule(), [CautiousDecay(), CoupledDecay()], "each replaces the weight decay"),
    (AdamRule(), [CautiousDecay(), Hyperball()], "each replaces the weight decay"),
    (AdamRule(), [RadialBrake(), RowFloor(0.5)], "RadialBrake, whose factors are those of whole"),
    (AdamRule(), [CautiousDecay(), RadiusPin()], "RadiusPin, whose factors are those of whole"),
    (AdamRule(), [RowFloor(0.5), ClipUpdateRms()], "which changes the update's norm"),
    (AdamRule(), [Hyperball(), RowFloor(0.5)], "which changes the update's norm"),
    (AdamRule(), [RelativeUpdate(), Hyperball()], "sets the update's norm itself"),
    # The hooks would undo it.
    (MuonRule(nuclear_scale=True), [Hyperball()], "nuclear_scale=True with Hyperball(radius=None), which sets"),
    (MuonRule(nuclear_scale=True), [RelativeUpdate()], "nuclear_scale=True with RelativeUpdate(), which sets"),
    (SOAPRule(), [ClipUpdateRms()], "whose first step changes no weights, not even by weight decay"),
    (elementwise(FORMULAS["adan"]), [RelativeUpdate()], "whose weight decay is neither"),
    (hooked(AdamRule(), [CautiousDecay()]), [ClipUpdateRms()], "already has (CautiousDecay(),)"),
    *((SCHEDULE_FREE, [hook], "needs an update of the form p - lr u")
      for hook in (CautiousDecay(), LrDecoupledDecay(1.0), ClipUpdateRms(), Hyperball())),
]  # fmt: skip


@pytest.mark.parametrize(("build", "words"), OF_DROP_INS)
def test_unsupported_hooks_of_parameters_are_refused_when_built(build, words):
    with pytest.raises(HookError, match=re.escape(words)):
        build()


@pytest.mark.parametrize(("rule", "given", "words"), OF_RULES)
def test_hooks_that_a_rule_does_not_support_are_refused_by_name(rule, given, words):
    assert hooked(rule, ()) is rule
    with pytest.raises(HookError, match=re.escape(words)):
        hooked(rule, given)


@pytest.mark.parametrize("wrong", [0.0, -1.0, torch.inf, torch.nan, "1"])
def test_numbers_of_hooks_are_checked(wrong):
    for make in (LrDecoupledDecay, ClipUpdateRms, Hyperball, RowFloor):
        with pytest.raises(HookError, match="pass a number above 0"):
            make(wrong)
