"""`eval()` of rules that evaluate other weights than they train, with any hooks."""

import pytest
import torch
from stack_models import assert_equal, make_model, train, weights

from opt_config import ConfigError, OptimizerConfig
from opt_kernels.hooks import CentralizeGradient, CoupledDecay, Hook
from opt_stack import QKClip, get_optimizer
from opt_stack.qk_clip import fused_qkv

SCHEDULE_FREE = OptimizerConfig(optimizer="schedule_free", lr=0.1, clip_grad=0.0)
HOOKS = {"part of the formula": (CoupledDecay(),), "around the rule": (CentralizeGradient(),)}


@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
def test_a_hook_around_the_rule_leaves_evaluation_as_it_is(hooks: tuple[Hook, ...]) -> None:
    """With a hook that is not part of the formula, `eval()` did nothing, and the trained weights were evaluated."""
    model = make_model()
    optimizer = get_optimizer(SCHEDULE_FREE, [model], hooks=hooks)
    train(model, optimizer, range(3))
    trained = weights(model)
    optimizer.eval()
    shown = weights(model)
    assert all(not torch.equal(shown[name], trained[name]) for name in trained)
    with pytest.raises(RuntimeError, match="in evaluation mode"):
        optimizer.step()
    optimizer.train()
    assert_equal(weights(model), trained)


@pytest.mark.parametrize("hooks", HOOKS.values(), ids=HOOKS)
def test_qk_clip_refuses_the_rule_with_hooks_too(hooks: tuple[Hook, ...]) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(4, 12))
    optimizer = get_optimizer(SCHEDULE_FREE, [model], hooks=hooks)
    with pytest.raises(ConfigError, match="schedule_free"):
        QKClip(optimizer, [fused_qkv(model[0].weight, num_heads=2, head_dim=2)])
