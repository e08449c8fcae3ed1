"""The Hugging Face Trainer: a factory for its argument `optimizer_cls_and_kwargs`."""

from typing import Any

from torch import nn

from opt_config import OptimizerConfig
from opt_stack.adapters.deferred import DeferredOptimizer


class StackFactory:
    """Builds the optimizer inside the Trainer, when the final model and device are known.

    The Trainer instantiates anything that is not an optimizer class and calls it with the model. Checked with
    transformers 5.23; versions that accept only classes raise a TypeError here.

        Trainer(..., optimizer_cls_and_kwargs=(StackFactory, {"config": OptimizerConfig(optimizer="muon", lr=3e-4)}))

    The Trainer itself clips gradients to `max_grad_norm`, so set `clip_grad=0.0`, or `max_grad_norm=0.0`. Its
    `weight_decay` and `learning_rate` are ignored in favour of the configuration's. Its schedules multiply the learning
    rates of the groups.
    """

    def __call__(self, model: nn.Module, *, config: OptimizerConfig, **options: Any) -> DeferredOptimizer:
        """Return the optimizer of `model`; `options` are those of `DeferredOptimizer`.

        Raises:
            ConfigError (a ValueError): as `DeferredOptimizer`.
        """
        return DeferredOptimizer(config, model, **options)
