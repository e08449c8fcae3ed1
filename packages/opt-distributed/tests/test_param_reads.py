"""Every read of a parameter after a step returns its owner's value, even while gathers are pending."""

import io
import pickle
from collections.abc import Callable, Mapping
from copy import copy, deepcopy
from typing import Any

import pytest
import torch
from delayed_comm import DelayedComm, Timeline, publish
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from opt_config import DistributedDataParallelConfig
from opt_distributed.buffers import DistributedDataParallel, ParamAndGradBuffer
from opt_distributed.buffers.param_sync import ParamBucket
from opt_distributed.comm import Alone, Axes, Comm, Roles

WIDTH = 16  # a weight of 256 elements is cut in halves; smaller ones belong to one rank
CONFIG = DistributedDataParallelConfig(
    use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=1
)


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    """Blocks between an embedding and a head."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


def wrap(model: nn.Module) -> DistributedDataParallel:
    axes = Axes(dp=DelayedComm(Timeline()), tp=Alone())
    return DistributedDataParallel(CONFIG, model, groups=Roles(dense=axes, expert=axes, everyone=axes.dp))


def are(tensors: Any, value: float) -> bool:
    return all(bool((tensor == value).all()) for tensor in tensors)


# --- modules that read weights of others --------------------------------------------------------------------------


class ReadsFirst(Model):
    """Reads a weight of a block before the block is called."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.linear(x, self.blocks[2].linear.weight))


class Penalty(Model):
    """Reads all weights before any module is called."""

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + sum(param.sum() for param in self.parameters())


class HoldsAList(Model):
    """Keeps a weight of another module in a list, which `nn.Module` does not see."""

    def __init__(self) -> None:
        super().__init__()
        self.tied = [self.head.weight]

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(nn.functional.linear(x, self.tied[0]))


class Recurrent(Model):
    """`nn.LSTM` reads its parameters from a list."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.lstm(x)[0])


class Functional(Model):
    """Runs a block as a function of its parameters."""

    def forward(self, x: Tensor) -> Tensor:
        params = dict(self.blocks[2].named_parameters())
        return super().forward(torch.func.functional_call(self.blocks[2], params, (x,)))


class Attention(Model):
    """Reads the weights of children that it never calls, in a layer of torch."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.layer(x[None])[0])


READERS = {kind.__name__: kind for kind in (Model, ReadsFirst, Penalty, HoldsAList, Recurrent, Functional, Attention)}


@pytest.mark.parametrize("kind", READERS.values(), ids=READERS.keys())
def test_a_weight_that_another_module_reads_has_arrived(kind: type[Model]) -> None:
    """Weights that their own module had asked for in the first forward were read by others before they arrived."""
    ddp = wrap(kind())
    x = torch.ones(2, WIDTH)
    for value in (0.25, 0.125, 0.0625):
        publish(ddp, value)
        assert ddp(x).isfinite().all()
    publish(ddp, 0.5)
    assert ddp.module(x).isfinite().all()


COMPILED: Mapping[str, Callable[[Model], DistributedDataParallel]] = {
    "the wrapper": lambda model: _compiled(wrap(model)),
    "the module, before": lambda model: wrap(_compiled(model)),
    "the module, before, as one graph": lambda model: wrap(_compiled(model, fullgraph=True)),
    "the module, in place": lambda model: _in_place(wrap(model), lambda ddp: [ddp.module]),
    "blocks, before": lambda model: wrap(_with_compiled_blocks(model)),
    "blocks, before, as one graph": lambda model: wrap(_with_compiled_blocks(model, fullgraph=True)),
    "blocks, in place": lambda model: _in_place(wrap(model), lambda ddp: ddp.module.blocks),
    "parts of blocks": lambda model: _in_place(wrap(model), lambda ddp: [block.linear for block in ddp.module.blocks]),
}


def _compiled(module: Any, **options: bool) -> Any:
    return torch.compile(module, backend="eager", **options)


def _in_place(ddp: DistributedDataParallel, modules: Callable[[Any], Any]) -> DistributedDataParallel:
    for module in modules(ddp):
        module.compile(backend="eager")
    return ddp


def _with_compiled_blocks(model: Model, **options: bool) -> Model:
    model.blocks = nn.ModuleList(_compiled(block, **options) for block in model.blocks)
    return model


@pytest.fixture(autouse=True)
def fresh_compiler() -> None:
    torch._dynamo.reset()


@pytest.mark.parametrize("make", COMPILED.values(), ids=COMPILED.keys())
def test_compiled_code_reads_what_has_arrived(make: Callable[[Model], DistributedDataParallel]) -> None:
    """The first call of a compiled wrapper failed: hooks changed what they were compiled for."""
    reference, ddp = Model(), make(Model())
    x = torch.randn(2, WIDTH)
    for value in (0.25, 0.125, 0.0625, 0.03125):
        for param in reference.parameters():
            param.data.fill_(value)
        for _ in range(2):  # with gathers under way, and without
            if _ == 0:
                publish_on(ddp, value)
            torch.testing.assert_close(ddp(x), reference(x), rtol=1e-6, atol=1e-6)


def publish_on(ddp: Any, value: float) -> None:
    publish(getattr(ddp, "_orig_mod", ddp), value)


def test_a_compiled_wrapper_reads_a_weight_of_another_module() -> None:
    ddp = _compiled(wrap(ReadsFirst()))
    for value in (0.25, 0.125, 0.0625):
        publish_on(ddp, value)
        assert ddp(torch.ones(2, WIDTH)).isfinite().all()


# --- copies, states, averages --------------------------------------------------------------------------------------


def _saved(module: nn.Module) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return list(torch.load(file).values())


def _averaged(module: nn.Module) -> list[Tensor]:
    average = AveragedModel(Model(), avg_fn=lambda averaged, current, num: current)
    average.update_parameters(module)
    average.update_parameters(module)
    return list(average.module.parameters())


READS: Mapping[str, Callable[[nn.Module], Any]] = {
    "parameters()": lambda module: list(module.parameters()),
    "parameters of a part": lambda module: list(module.blocks[1].parameters()),
    "an attribute": lambda module: [module.blocks[1].linear.weight],
    "get_parameter": lambda module: [module.get_parameter("blocks.1.linear.weight")],
    "state_dict()": lambda module: list(module.state_dict().values()),
    "state_dict() of a part": lambda module: list(module.blocks[1].state_dict().values()),
    "torch.save of state_dict()": _saved,
    "deepcopy": lambda module: list(deepcopy(module).parameters()),
    "deepcopy of a part": lambda module: list(deepcopy(module.blocks[1]).parameters()),
    "copy": lambda module: list(copy(module.blocks[1].linear)._parameters.values()),
    "pickle": lambda module: list(pickle.loads(pickle.dumps(module)).parameters()),
    "AveragedModel": _averaged,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_every_read_of_the_module_inside_is_complete(read: Callable[[nn.Module], Any]) -> None:
    """A copy made right after a step had the shards of other ranks from before it."""
    ddp = wrap(Model())
    publish(ddp, 0.5)
    assert are(read(ddp.module), 0.5)


def test_a_copied_module_is_an_ordinary_one() -> None:
    ddp = wrap(Model())
    for copied in (deepcopy(ddp.module), pickle.loads(pickle.dumps(ddp.module))):
        assert all(type(module._parameters) is dict for module in copied.modules())
        publish(ddp, 0.25)
        before = [param.detach().clone() for param in copied.parameters()]
        copied(torch.ones(2, WIDTH)).sum().backward()
        assert all(torch.equal(one, other) for one, other in zip(before, copied.parameters(), strict=True))
        assert all(param.grad is not None for param in copied.parameters())


@pytest.mark.parametrize("make", [deepcopy, copy, pickle.dumps], ids=["deepcopy", "copy", "pickle"])
def test_a_copy_of_the_wrapper_is_refused(make: Callable[[object], object]) -> None:
    """Nothing would have trained it: hooks on parameters are not copied."""
    with pytest.raises(TypeError, match=r"not copied or pickled; copy or save its module \(ddp.module\)"):
        make(wrap(Model()))


def test_without_hooks_modules_are_as_they_were() -> None:
    ddp = wrap(Model())
    assert not all(type(module._parameters) is dict for module in ddp.module.modules())
    ddp.disable_forward_pre_hook()
    assert all(type(module._parameters) is dict for module in ddp.module.modules())
    assert not any(module._forward_pre_hooks for module in ddp.module.modules())
    assert dict(ddp.module.named_parameters()).keys() == dict(Model().named_parameters()).keys()


@pytest.mark.parametrize("hooks", [True, False], ids=["before use", "in the step"])
def test_steps_without_a_read_between_them_leave_the_last_values(hooks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two gathers of a bucket under way at once would write into the same memory."""
    ddp = wrap(Model())
    if not hooks:
        ddp.disable_forward_pre_hook()
    start = ParamAndGradBuffer.start_gather
    under_way: list[bool] = []

    def noted(memory: ParamAndGradBuffer, index: int, comm: Comm) -> Any:
        under_way.append(ParamBucket(memory, index, comm) in ddp.param_sync._incomplete)
        return start(memory, index, comm)

    monkeypatch.setattr(ParamAndGradBuffer, "start_gather", noted)
    for value in (0.25, 0.5):
        publish(ddp, value)
    assert are(ddp.module.parameters(), 0.5)
    assert True not in under_way
    assert len(under_way) == 2 * sum(len(buffer.plan.layout.buckets) for buffer in ddp.synced_buffers)
