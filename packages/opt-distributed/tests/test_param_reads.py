"""Every read of a parameter after a step returns its owner's value, even while gathers are pending."""

import io
import pickle
from argparse import Namespace
from collections.abc import Callable
from copy import copy, deepcopy
from dataclasses import dataclass
from functools import partial
from types import MethodType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from data_parallel_net import Config, all_equal, over
from delayed_comm import DelayedComm, Timeline, publish
from tiers import NIGHT
from torch import Tensor, nn
from torch.optim.swa_utils import AveragedModel

from opt_distributed.buffers import AwaitedGroup, DistributedDataParallel, ParamAndGradBuffer, stored_params
from opt_distributed.buffers.param_sync import ParamBucket
from opt_distributed.comm import Comm

WIDTH = 16  # a weight of 256 elements is cut in halves; smaller ones belong to one rank
CONFIG = Config(use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, bucket_size=1)
X = torch.ones(2, WIDTH)


@dataclass(slots=True)
class Shared:
    """Weights of other modules, as one object."""

    weight: Tensor


class Pair(NamedTuple):
    """A weight with its name."""

    name: str
    weight: Tensor


def scaled(weight: Tensor, x: Tensor, *, by: float = 1.0) -> Tensor:
    return nn.functional.linear(x, weight) * by


def closure_of(weight: Tensor) -> Callable[[Tensor], Tensor]:
    return lambda x: nn.functional.linear(x, weight)


HOLDERS: dict[str, Callable[[Tensor], Any]] = {
    "a list": lambda weight: [weight],
    "a namespace": lambda weight: SimpleNamespace(weight=weight),
    "parsed arguments": lambda weight: Namespace(weight=weight),
    "a dataclass": lambda weight: Shared(weight),
    "a named tuple": lambda weight: Pair("head", weight),
    "a partial": lambda weight: partial(scaled, weight, by=2.0),
    "a closure": closure_of,
    "a default": lambda weight: lambda x, weight=weight: nn.functional.linear(x, weight),
    "a method": lambda weight: SimpleNamespace(read=MethodType(scaled, weight)),
    "a closure in a dict": lambda weight: {"read": closure_of(weight)},
}


def read_held(held: Any, x: Tensor) -> Tensor:
    if isinstance(held, list | dict):
        (held,) = held.values() if isinstance(held, dict) else held
    if isinstance(held, SimpleNamespace) and hasattr(held, "read"):
        held = held.read
    if isinstance(held, Tensor):
        return nn.functional.linear(x, held)
    return held(x) if callable(held) else nn.functional.linear(x, held.weight)


class Block(nn.Module):
    """A residual block of two layers."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.linear = nn.Linear(WIDTH, WIDTH)

    def forward(self, x: Tensor) -> Tensor:
        return x + torch.tanh(self.linear(self.norm(x)))


class Model(nn.Module):
    """Blocks between an embedding and a head. Before these it calls `read`, which reads weights of other modules."""

    def __init__(self, read: str = "") -> None:
        super().__init__()
        self.embed = nn.Linear(WIDTH, WIDTH)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(WIDTH, WIDTH)
        self.read = read
        if read in HOLDERS:
            self.held = HOLDERS[read](self.head.weight)
        elif read == "an LSTM":
            self.lstm = nn.LSTM(WIDTH, WIDTH)
        elif read == "attention":
            self.layer = nn.TransformerEncoderLayer(WIDTH, 2, 32, dropout=0.0, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        if self.read:
            x = READERS[self.read](self, x)
        x = self.embed(x)
        for block in self.blocks:
            x = block(x)
        y: Tensor = self.head(x)
        return y


READERS: dict[str, Callable[[Any, Tensor], Tensor]] = {
    "": lambda model, x: x,
    "a weight of a block": lambda model, x: nn.functional.linear(x, model.blocks[2].linear.weight),
    "all weights": lambda model, x: x + sum(param.sum() for param in model.parameters()),
    **dict.fromkeys(HOLDERS, lambda model, x: read_held(model.held, x)),  # which `nn.Module` does not see
    "an LSTM": lambda model, x: model.lstm(x)[0],  # reads its parameters from a list
    "functional_call": lambda model, x: torch.func.functional_call(
        model.blocks[2], dict(model.blocks[2].named_parameters()), (x,)
    ),
    "attention": lambda model, x: model.layer(x[None])[0],  # reads weights of children that it never calls
}


COMPILED_READERS = ("a weight of a block", "attention")  # by default; all at night


def wrap(model: nn.Module) -> DistributedDataParallel:
    return DistributedDataParallel(CONFIG, model, groups=over(DelayedComm(Timeline())))


@pytest.mark.parametrize(
    ("read", "compiles"),
    [*((read, False) for read in READERS), *((read, True) for read in READERS if NIGHT or read in COMPILED_READERS)],
)
def test_a_weight_that_another_module_reads_has_arrived(read: str, compiles: bool) -> None:
    """Weights that their own module had asked for in the first forward were read by others before they arrived. After a
    forward without gathers under way, hooks of compiled wrappers waited for too little."""
    torch._dynamo.reset()
    for _ in range(1 + compiles):  # wrappers: dynamo remembers the code of their hooks
        ddp = wrap(Model(read))
        forward = torch.compile(ddp, backend="eager") if compiles else ddp
        for value in (0.25, 0.125, 0.0625):
            publish(ddp, value)
            for _ in range(1 + compiles):
                assert forward(X).isfinite().all()
    publish(ddp, 0.5)
    assert ddp.module(X).isfinite().all()


def compiled(module: Any, **options: bool) -> Any:
    return torch.compile(module, backend="aot_eager", **options)


def in_place(ddp: DistributedDataParallel, modules: Callable[[Any], Any]) -> DistributedDataParallel:
    for module in modules(ddp.module):
        module.compile(backend="aot_eager")
    return ddp


def with_compiled_blocks(model: Model) -> Model:
    model.blocks = nn.ModuleList(compiled(block, fullgraph=True) for block in model.blocks)
    return model


COMPILED: dict[str, Callable[[Model], Any]] = {
    "the wrapper": lambda model: compiled(wrap(model)),
    "the module, before, as one graph": lambda model: wrap(compiled(model, fullgraph=True)),
    "the module, in place": lambda model: in_place(wrap(model), lambda module: [module]),
    "blocks, before, as one graph": lambda model: wrap(with_compiled_blocks(model)),
    "blocks, in place": lambda model: in_place(wrap(model), lambda module: module.blocks),
    "parts of blocks": lambda model: in_place(wrap(model), lambda module: [block.linear for block in module.blocks]),
}


@pytest.mark.parametrize("name", COMPILED)
def test_compiled_code_reads_what_has_arrived(name: str) -> None:
    """The first call of a compiled wrapper failed: hooks changed what they were compiled for."""
    torch._dynamo.reset()
    reference = Model()
    ddp = COMPILED[name](Model())
    for value in (0.25, 0.125, 0.0625, 0.03125):
        for param in reference.parameters():
            param.data.fill_(value)
        publish(getattr(ddp, "_orig_mod", ddp), value)
        for _ in range(2):  # with gathers under way, and without
            torch.testing.assert_close(ddp(X), reference(X), rtol=1e-6, atol=1e-6)
        wrapper = getattr(ddp, "_orig_mod", ddp)
        for model in (ddp, reference):
            model(X).square().sum().backward()
        wrapper.finish_grad_sync()
        grads = dict(zip(wrapper.parameters(), (param.grad for param in reference.parameters()), strict=True))
        for buffer in wrapper.synced_buffers:
            for piece in buffer.owned():
                grad = grads[buffer.params[piece.id]].flatten()[piece.of_param]
                torch.testing.assert_close(buffer.grad(piece.id, piece.of_param).flatten(), grad, rtol=1e-5, atol=1e-5)
        wrapper.zero_grad_buffer()
        reference.zero_grad()


def saved(module: nn.Module) -> list[Tensor]:
    file = io.BytesIO()
    torch.save(module.state_dict(), file)
    file.seek(0)
    return list(torch.load(file).values())


def averaged(module: nn.Module) -> list[Tensor]:
    average = AveragedModel(Model(), avg_fn=lambda averaged, current, num: current)
    average.update_parameters(module)
    average.update_parameters(module)
    return list(average.module.parameters())


READS: dict[str, Callable[[Any], Any]] = {
    "parameters()": lambda module: module.parameters(),
    "an attribute": lambda module: [module.blocks[1].linear.weight],
    "state_dict()": lambda module: module.state_dict().values(),
    "torch.save of state_dict()": saved,
    "deepcopy": lambda module: deepcopy(module).parameters(),
    "copy": lambda module: copy(module.blocks[1].linear)._parameters.values(),
    "pickle": lambda module: pickle.loads(pickle.dumps(module)).parameters(),
    "AveragedModel": averaged,
}


@pytest.mark.parametrize("read", READS.values(), ids=READS.keys())
def test_every_read_of_the_module_inside_is_complete(read: Callable[[nn.Module], Any]) -> None:
    """A copy made right after a step had the shards of other ranks from before it."""
    ddp = wrap(Model())
    publish(ddp, 0.5)
    assert all_equal(list(read(ddp.module)), 0.5)


GROUP_READS: dict[str, Callable[[Any], Any]] = {
    "an entry": lambda group: group["params"],
    "get": lambda group: group.get("params"),
    "items": lambda group: dict(group.items())["params"],
    "values": lambda group: next(value for value in group.values() if isinstance(value, list)),
    "a copy": lambda group: group.copy()["params"],
    "dict()": lambda group: dict(group)["params"],
    "unpacked": lambda group: {**group}["params"],
    "deepcopy": lambda group: deepcopy(group)["params"],
    "pickle": lambda group: pickle.loads(pickle.dumps(group))["params"],
}


@pytest.mark.parametrize("read", GROUP_READS.values(), ids=GROUP_READS)
def test_params_read_from_a_group_have_arrived(read: Callable[[Any], Any]) -> None:
    """Norms over `param_groups` differed between ranks. Entries of schedulers are read without waiting."""
    ddp = wrap(Model())
    group = AwaitedGroup({"params": list(ddp.module.parameters()), "lr": 0.1}, [ddp.param_sync])
    publish(ddp, 0.5)
    assert (group["lr"], group.get("lr"), group.get("none", 1), sorted(group)) == (0.1, 0.1, 1, ["lr", "params"])
    assert ddp.param_sync.is_pending
    assert not all_equal(stored_params(group), 0.5)
    assert all_equal(read(group), 0.5)


def test_a_patched_forward_with_its_module_keeps_the_overlap() -> None:
    """As Accelerate patches it: then nothing but the parameters that are read is awaited."""
    model = Model()
    model.forward = partial(Model.forward, model)  # type: ignore[method-assign]
    ddp = wrap(model)
    publish(ddp, 0.5)
    waits: list[bool] = []
    model.blocks[0].register_forward_pre_hook(lambda module, args: waits.append(ddp.param_sync.is_pending))
    ddp(X)
    assert waits == [True]


def is_plain(module: nn.Module) -> bool:
    return all(type(inner._parameters) is dict for inner in module.modules())


def test_a_copied_module_is_ordinary_and_the_wrapper_not_copied() -> None:
    """Nothing would have trained a copy of the wrapper: hooks on parameters are not copied."""
    ddp = wrap(Model())
    for copied in (deepcopy(ddp.module), pickle.loads(pickle.dumps(ddp.module))):
        assert is_plain(copied)
        publish(ddp, 0.25)
        before = [param.detach().clone() for param in copied.parameters()]
        copied(X).sum().backward()
        assert all(torch.equal(a, b) for a, b in zip(before, copied.parameters(), strict=True))
        assert all(param.grad is not None for param in copied.parameters())
    for make in (deepcopy, copy, pickle.dumps):
        with pytest.raises(TypeError, match=r"not copied or pickled; copy or save its module \(ddp.module\)"):
            make(ddp)


def test_without_hooks_modules_are_as_they_were() -> None:
    ddp = wrap(Model())
    assert not is_plain(ddp.module)
    ddp.disable_forward_pre_hook()
    assert is_plain(ddp.module)
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
    assert all_equal(ddp.module.parameters(), 0.5)
    assert under_way == [False] * (2 * sum(len(buffer.plan.layout.buckets) for buffer in ddp.synced_buffers))
