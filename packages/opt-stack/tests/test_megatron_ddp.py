"""Chunks in Megatron-Core's own wrapper, by a stand-in with its interface; the real one is in `nox -s megatron`."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from stack_models import backward, make_model, weights
from torch import Tensor, nn

from opt_stack import ConfigError, GradientError, OptimizerConfig, get_optimizer


class DistributedDataParallel(nn.Module):
    """Gradients accumulate in `main_grad`, and `param.grad` stays None."""

    __module__ = "megatron.core.distributed.distributed_data_parallel"

    def __init__(self, module: nn.Module, **fields: Any) -> None:
        super().__init__()
        self.module = module
        self.ddp_config = SimpleNamespace(use_distributed_optimizer=False, **fields)
        self.buffers: Any = []  # as in Megatron-Core, in place of the method
        for param in module.parameters():
            param.main_grad = torch.zeros(param.shape)  # type: ignore[attr-defined]
            param.register_post_accumulate_grad_hook(self._take)  # type: ignore[no-untyped-call]

    def _take(self, param: Any) -> None:
        param.main_grad.add_(param.grad)
        param.grad = None

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.module(x)
        return y

    def zero_grad_buffer(self) -> None:
        for param in self.module.parameters():
            param.main_grad.zero_()  # type: ignore[operator, union-attr]


@pytest.mark.parametrize("fields", [{}, {"bf16": True}, {"optimizer": "muon"}], ids=str)
def test_the_step_reads_the_reduced_gradients(fields: dict[str, Any]) -> None:
    config = OptimizerConfig(lr=0.1, clip_grad=0.25, **fields)
    model, plain = make_model(config.precision.params), make_model(config.precision.params)
    chunk = DistributedDataParallel(model)
    optimizer, expected = get_optimizer(config, [chunk]), get_optimizer(config, [plain])
    for step in range(3):
        chunk.zero_grad_buffer()
        backward(chunk, step)
        expected.zero_grad()
        backward(plain, step)
        assert optimizer.step() == expected.step()
    assert all(torch.equal(weights(model)[name], weight) for name, weight in weights(plain).items())
    assert not torch.equal(model[0].weight, make_model(config.precision.params)[0].weight)  # type: ignore[index]


def test_a_parameter_without_its_gradient_is_refused() -> None:
    chunk = DistributedDataParallel(make_model())
    optimizer = get_optimizer(OptimizerConfig(lr=0.1), [chunk])
    del chunk.module[0].weight.main_grad  # type: ignore[index]
    before = weights(chunk)
    with pytest.raises(GradientError, match=r"main_grad of 0\.weight is None; the wrapper of this"):
        optimizer.step()
    assert all(torch.equal(weights(chunk)[name], weight) for name, weight in before.items())


def test_a_module_inside_the_wrapper_is_refused() -> None:
    chunk = DistributedDataParallel(make_model())
    with pytest.raises(ConfigError, match="pass the DistributedDataParallel around it"):
        get_optimizer(OptimizerConfig(lr=0.1), [chunk.module])


REFUSED: dict[str, tuple[Any, str]] = {
    "flat shards": ({"use_distributed_optimizer": True}, "set both to False"),
    "whole matrices": ({"optimizer": "muon", "use_layer_wise_distributed_optimizer": True}, "set both to False"),
    "a graph": ({"optimizer_cuda_graph": True}, "optimizer_cuda_graph=True: model chunk 0 is in Megatron-Core's"),
}


@pytest.mark.parametrize(("fields", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_wrapper_does_not_support_is_refused(fields: Any, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        get_optimizer(OptimizerConfig(lr=0.1, **fields), [DistributedDataParallel(make_model())])


def test_a_wrapper_that_shards_is_refused() -> None:
    chunk = DistributedDataParallel(make_model())
    chunk.ddp_config.use_distributed_optimizer = True
    with pytest.raises(ConfigError, match="leaves each rank a shard of the gradients in its own layout; wrap it with"):
        get_optimizer(OptimizerConfig(lr=0.1), [chunk])


def test_a_plain_chunk_next_to_a_wrapped_one_is_refused() -> None:
    with pytest.raises(ConfigError, match="and model chunk 1 is a Sequential; wrap all chunks in the same class"):
        get_optimizer(OptimizerConfig(lr=0.1), [DistributedDataParallel(make_model()), make_model()])
    with pytest.raises(ConfigError, match="and model chunk 0 is a Sequential; wrap all chunks in the same class"):
        get_optimizer(OptimizerConfig(lr=0.1), [make_model(), DistributedDataParallel(make_model())])
