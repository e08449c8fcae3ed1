"""Views of a `QuantizedTensor`: reads give the dequantised values, writes are refused instead of lost."""

import copy
import io
from collections.abc import Callable

import numpy as np
import pytest
import torch
from matrix_works import tensor as normal
from torch import Tensor, nn

from opt_kernels.quantized import QuantizationError, QuantizedTensor

REFUSED = "would write a view of an fp8 parameter"


def weight() -> nn.Parameter:
    return nn.Parameter(QuantizedTensor.of(normal(64, 32), "blockwise"))


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "one element": lambda p: p[3, 5],
    "slice": lambda p: p[2:9, ::3],
    "view": lambda p: p.view(-1),
    "view of a dtype": lambda p: p.view(torch.int32),
    "t": lambda p: p.t(),
    "diagonal": lambda p: p.diagonal(),
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
ON_VIEWS = pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)


@ON_VIEWS
def test_views_read_the_values_and_writes_through_them_are_refused(view: Callable[[Tensor], Tensor]) -> None:
    param = weight()
    before = param.values()
    ours, dense = view(param.detach()), view(before)
    assert (ours.shape, ours.stride()) == (dense.shape, dense.stride())
    assert type(ours * 2) is Tensor
    assert torch.equal(ours, dense)
    assert ours.tolist() == dense.tolist()
    np.testing.assert_array_equal(np.asarray(ours), dense.numpy())
    for write in WRITES.values():
        with torch.no_grad(), pytest.raises(QuantizationError, match=REFUSED):
            write(view(param))
        assert torch.equal(param.values(), before)


def test_a_view_of_everything_in_the_same_shape_writes_the_parameter() -> None:
    for alias in (Tensor.detach, lambda p: p.data, lambda p: p[...]):
        param = weight()
        with torch.no_grad():
            alias(param).mul_(2.0)
            alias(param)[0] = 1.0
        assert torch.equal(param.values()[1:], 2 * weight().values()[1:])
        assert torch.equal(param.values()[0], torch.ones(32))


@torch.library.custom_op("fp8_views::double_", mutates_args=("x",))
def double_(x: Tensor) -> None:
    x.mul_(2)


CONVERT, SHAPE = "convert the model first", r"would change the shape .* from \(64, 32\) to"
LOST: dict[str, tuple[Callable[[nn.Parameter], object], str]] = {
    "orthogonal_": (nn.init.orthogonal_, REFUSED),
    "rows in a list": (lambda p: torch._foreach_mul_(list(p.unbind()), 2.0), REFUSED),
    "resize_ of a view": (lambda p: p.detach()[0].resize_(1), REFUSED),
    "a custom operation": (lambda p: torch.ops.fp8_views.double_(p[0]), REFUSED),
    "shared memory": (lambda p: p[0].share_memory_(), REFUSED),
    "dlpack": (lambda p: np.from_dlpack(p.detach()[0]), REFUSED),
    "zero_": (lambda p: p[0].zero_(), r"aten\.zero_.*param\[index\] = .*param\.copy_\(values\)"),  # says what to do
    "unsqueeze_": (lambda p: p.unsqueeze_(0), SHAPE),
    "t_": (lambda p: p.t_(), SHAPE),
    "resize_": (lambda p: p.data.resize_(2, 2), SHAPE),
    "set_": (lambda p: p.set_(torch.ones(32)), SHAPE),
    "out": (lambda p: torch.ones(32, out=p), SHAPE),
    "data of another dtype, as by Module.half": (lambda p: setattr(p, "data", p.data.half()), CONVERT),
    "data of another shape": (lambda p: setattr(p, "data", torch.ones(32, 64)), CONVERT),
}


@pytest.mark.parametrize(("write", "message"), LOST.values(), ids=LOST)
@pytest.mark.filterwarnings("ignore:An output with one or more elements was resized")
def test_what_would_be_lost_is_refused(write: Callable[[nn.Parameter], object], message: str) -> None:
    param = weight()
    before = param.values()
    with torch.no_grad(), pytest.raises(QuantizationError, match=message):
        write(param)
    assert torch.equal(param.values(), before)


def test_an_array_of_a_view_cannot_be_written_and_copies_are_ordinary_tensors_that_can() -> None:
    array = weight().detach().t().numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1.0
    with pytest.raises(RuntimeError, match="requires grad"):
        weight()[0].numpy()
    view, file = weight().detach()[2], io.BytesIO()
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


def test_a_compiled_function_reads_views_and_does_not_lose_writes() -> None:
    param = nn.Parameter(QuantizedTensor.of(normal(64, 32), "blockwise", keep_initial=False))
    before = param.values()

    def read(x: Tensor) -> Tensor:
        return nn.functional.linear(x, param)[:, 3:9]

    def write(x: Tensor) -> Tensor:
        with torch.no_grad():
            param.view(-1).zero_()
        return x + 1

    assert torch.equal(torch.compile(read, backend="aot_eager")(normal(4, 32)), read(normal(4, 32)))
    with pytest.raises(Exception, match="view"):
        torch.compile(write, backend="aot_eager")(normal(4, 32))
    assert torch.equal(param.values(), before)
