"""Views of a `QuantizedTensor`: reads give the dequantised values, writes are refused instead of lost."""

import copy
import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from opt_kernels.quantized import QuantizationError, QuantizedTensor

REFUSED = "would write a view of an fp8 parameter"


def normal(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def weight() -> nn.Parameter:
    return nn.Parameter(QuantizedTensor.of(normal(64, 32), "blockwise"))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "one element": lambda p: p[3, 5],
    "slice": lambda p: p[2:9, ::3],
    "new axis": lambda p: p[None],
    "view": lambda p: p.view(-1),
    "view of a dtype": lambda p: p.view(torch.int32),
    "flatten": lambda p: p.flatten(),
    "t": lambda p: p.t(),
    "transpose": lambda p: p.transpose(0, 1),
    "expand": lambda p: p.expand(2, 64, 32),
    "diagonal": lambda p: p.diagonal(),
    "unfold": lambda p: p.unfold(0, 8, 8),
    "iteration": lambda p: next(iter(p)),
    "split": lambda p: p.split(16)[1],
    "unsafe split": lambda p: torch.unsafe_split(p, 16)[1],
    "as_strided": lambda p: p.as_strided((4, 4), (32, 1), 7),
    "a view of a view": lambda p: p.t()[3].view(8, 8),
    "a view of data": lambda p: p.data.view(-1),
    "a detached view": lambda p: p[4].detach(),
    "parts of rows": lambda p: p[0:4].unbind()[2],
}
WRITES: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda v: v.zero_(),
    "mul_": lambda v: v.mul_(2),
    "copy_": lambda v: v.copy_(torch.ones_like(v)),
    "setitem": lambda v: v.__setitem__(..., 5),
    "out": lambda v: torch.add(torch.ones_like(v), 1, out=v),
    "foreach": lambda v: torch._foreach_add_([torch.ones(2), v], 1),
    "set_": lambda v: v.set_(torch.ones_like(v)),
    "data": lambda v: setattr(v, "data", torch.ones_like(v)),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_a_write_through_a_view_is_refused(view: Callable[[Tensor], Tensor], write: Callable[[Tensor], object]) -> None:
    param = weight()
    before = param.values()
    with torch.no_grad(), pytest.raises(QuantizationError, match=REFUSED):
        write(view(param))
    assert torch.equal(param.values(), before)


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_read_as_those_of_the_values(view: Callable[[Tensor], Tensor]) -> None:
    param = weight()
    ours, dense = view(param.detach()), view(param.values())
    assert ours.shape == dense.shape
    assert ours.stride() == dense.stride()
    assert type(ours * 2) is Tensor
    assert torch.equal(ours, dense)
    assert ours.tolist() == dense.tolist()
    np.testing.assert_array_equal(np.asarray(ours), dense.numpy())


@pytest.mark.parametrize(
    "alias", [Tensor.detach, lambda p: p.data, lambda p: p[...]], ids=["detach", "data", "ellipsis"]
)
def test_a_view_of_everything_in_the_same_shape_writes_the_parameter(alias: Callable[[Tensor], Tensor]) -> None:
    param = weight()
    with torch.no_grad():
        alias(param).mul_(2.0)
        alias(param)[0] = 1.0
    assert torch.equal(param.values()[1:], 2 * weight().values()[1:])
    assert torch.equal(param.values()[0], torch.ones(32))


def stepped(view: Tensor) -> None:
    param = nn.Parameter(view)
    param.grad = torch.ones(8, 32)
    torch.optim.SGD([param], lr=0.1, foreach=False).step()


@torch.library.custom_op("fp8_views::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    x.mul_(2)


def converted(how: Callable[[nn.Module], object]) -> Callable[[nn.Parameter], object]:
    def convert(param: nn.Parameter) -> None:
        module = nn.Linear(32, 64, bias=False)
        module.weight = param
        try:
            how(module)
        finally:
            assert module.weight is param

    return convert


SHAPE = r"would change the shape .* from \(64, 32\) to"
LOST: dict[str, tuple[Callable[[nn.Parameter], object], str]] = {
    "orthogonal_": (nn.init.orthogonal_, REFUSED),
    "rows in a list": (lambda p: torch._foreach_mul_(list(p.unbind()), 2.0), REFUSED),
    "resize_ of a view": (lambda p: p.detach()[0].resize_(1), REFUSED),
    "an optimizer over a view": (lambda p: stepped(p.detach()[:8]), REFUSED),
    "a custom operation": (lambda p: torch.ops.fp8_views.double_(p[0]), REFUSED),
    "shared memory": (lambda p: p[0].share_memory_(), REFUSED),
    "dlpack": (lambda p: np.from_dlpack(p.detach()[0]), REFUSED),
    "zero_": (lambda p: p[0].zero_(), r"aten\.zero_.*param\[index\] = .*param\.copy_\(values\)"),  # says what to do
    "unsqueeze_": (lambda p: p.unsqueeze_(0), SHAPE),
    "t_": (lambda p: p.t_(), SHAPE),
    "resize_": (lambda p: p.data.resize_(2, 2), SHAPE),
    "set_": (lambda p: p.set_(torch.ones(32)), SHAPE),
    "out": (lambda p: torch.ones(32, out=p), SHAPE),
    "half": (converted(nn.Module.half), "convert the model first"),
    "bfloat16": (converted(nn.Module.bfloat16), "convert the model first"),
    "double": (converted(nn.Module.double), "convert the model first"),
    "round trip": (converted(lambda m: m.to(torch.float16).to(torch.float32)), "convert the model first"),
}


@pytest.mark.parametrize(("write", "message"), LOST.values(), ids=LOST)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_would_be_lost_is_refused(write: Callable[[nn.Parameter], object], message: str) -> None:
    param = weight()
    before = param.values()
    with torch.no_grad(), pytest.raises(QuantizationError, match=message):
        write(param)
    assert torch.equal(param.values(), before)


def test_an_array_of_a_view_cannot_be_written() -> None:
    array = weight().detach().t().numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1.0
    with pytest.raises(RuntimeError, match="requires grad"):
        weight()[0].numpy()


def test_copies_of_a_view_are_ordinary_tensors_that_can_be_written() -> None:
    view = weight().detach()[2]
    file = io.BytesIO()
    torch.save(view, file)
    file.seek(0)
    for made in (view.clone(), view.double(), copy.deepcopy(view), torch.load(file, weights_only=True), view[[1, 2]]):
        assert type(made) is Tensor
        made.zero_()
    assert view.any()
    assert "ReadOnlyView(tensor([" in repr(view)


def test_gradients_pass_through_views() -> None:
    param, dense = weight(), nn.Parameter(weight().values())
    for one in (param, dense):
        (one[2:5].t() @ normal(3, 4) + one.view(-1)[7] + one.unbind()[3].view(4, 8).sum()).square().sum().backward()
    assert type(param.grad) is Tensor
    assert torch.equal(param.grad, dense.grad)


@pytest.mark.parametrize("mode", ["read", "write"])
def test_a_compiled_function_reads_views_and_does_not_lose_writes(mode: str) -> None:
    param = nn.Parameter(QuantizedTensor.of(normal(64, 32), "blockwise", keep_initial=False))
    before = param.values()

    def read(x: Tensor) -> Tensor:
        return nn.functional.linear(x, param)[:, 3:9]

    def write(x: Tensor) -> Tensor:
        with torch.no_grad():
            param.view(-1).zero_()
        return x + 1

    made = torch.compile(read if mode == "read" else write, backend="aot_eager")
    if mode == "read":
        assert torch.equal(made(normal(4, 32)), read(normal(4, 32)))
        return
    with pytest.raises(Exception, match="view"):
        made(normal(4, 32))
    assert torch.equal(param.values(), before)
