"""Parameters in fp8: codes and scales against their definition, runs of elements, a tensor for modules, its views."""

import copy
import io
import pickle
from collections.abc import Callable
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.distributed as dist
from matrix_works import tensor as normal
from processes import world_of_one
from torch import Tensor, nn

from opt_kernels.quantized import RECIPES, QuantizationError, QuantizedTensor, is_quantized, quantize_linears_

ON_RECIPES = pytest.mark.parametrize("recipe", RECIPES)


def groups_of(recipe: str, shape: tuple[int, ...]) -> Tensor:
    """For each element the number of those that share its scale."""
    cols = shape[-1]
    at = torch.arange(torch.Size(shape).numel())
    if recipe == "mxfp8":
        return at // 32
    if recipe == "blockwise":
        return (at // cols // 128) * -(-cols // 128) + at % cols // 128
    return torch.zeros_like(at)


def expected(values: Tensor, recipe: str) -> Tensor:
    """fp32 values of the codes, from the definition, in float64."""
    flat = values.reshape(-1).double()
    groups = groups_of(recipe, tuple(values.shape))
    found = torch.empty_like(flat)
    for group in groups.unique():
        of_group = flat[groups == group]
        largest = of_group.abs().amax()
        if recipe in ("blockwise", "mxfp8"):
            scale = 2.0 ** torch.ceil(torch.log2(largest / 448))
        else:
            scale = (largest.float() / 448).double()
        codes = (of_group / scale).float().clamp(-448, 448).to(torch.float8_e4m3fn)
        found[groups == group] = codes.double() * scale
    return found.float().view(values.shape)


@ON_RECIPES
def test_values_are_those_of_the_definition(recipe: str) -> None:
    # Dividing by a scale that is not a power of two in fp32 may round to the other side of a tie.
    rtol = 0.0 if recipe in ("blockwise", "mxfp8") else 2.0**-23
    for shape in [(192, 160), (5, 64), (128, 128), (1, 32), (3, 130, 32), (7 * 32,)]:
        values = normal(*shape) * torch.exp2(normal(*shape, seed=1) * 4)
        made = QuantizedTensor.of(values, recipe)
        torch.testing.assert_close(made.values(), expected(values, recipe), rtol=rtol, atol=0.0)
        assert made.codes.numel() == values.numel()
        assert made.scales.numel() == made.num_scales == int(groups_of(recipe, shape).max()) + 1
        assert RECIPES[recipe].num_bytes(shape) == made.codes.nbytes + made.scales.nbytes
    for shape in [(0, 32), (3, 0), (0,)]:
        empty = QuantizedTensor.of(torch.empty(shape), recipe)
        empty.encode_(torch.empty(0), 0)
        assert empty.values().shape == shape
    if recipe != "mxfp8":  # which needs runs of 32
        assert torch.equal(QuantizedTensor.of(torch.tensor(3.0), recipe).values(), torch.tensor(3.0))


@ON_RECIPES
@pytest.mark.parametrize("cuts", [(64,), (32, 1024), (64, 128, 192, 320, 12_800), (19_008,)], ids=str)
def test_runs_of_elements_make_the_same_codes(recipe: str, cuts: tuple[int, ...]) -> None:
    values = normal(192, 160)
    whole = QuantizedTensor.of(values, recipe)
    parted = QuantizedTensor.of(torch.zeros(192, 160), recipe)
    flat = values.view(-1)
    bounds = [0, *cuts, values.numel()]
    largest = torch.full((parted.num_scales,), -1.0)
    for start, stop in pairwise(bounds):
        parted.largest_(largest, flat[start:stop], start)
    of_whole = torch.full_like(largest, -1.0)
    whole.largest_(of_whole, flat, 0)
    assert torch.equal(largest, of_whole)
    if recipe != "mxfp8":
        parted.rescale_(largest)
    for start, stop in pairwise(bounds):
        parted.encode_(flat[start:stop], start)
    assert torch.equal(parted.codes, whole.codes)
    assert torch.equal(parted.scales, whole.scales)


@pytest.mark.parametrize("recipe", ["delayed", "tensorwise", "blockwise"])
@pytest.mark.parametrize("size", [2.0**-20, 0.3, 448.0])
def test_the_largest_value_has_a_code_near_the_largest(recipe: str, size: float) -> None:
    made = QuantizedTensor.of(torch.ones(4, 4), recipe)
    for _ in range(17):  # a delayed scale follows the last 16
        made.rescale_(torch.full((made.num_scales,), size))
    made.encode_(torch.full((16,), size), 0)
    codes = made.codes.view(torch.float8_e4m3fn).float()
    assert (codes > 448 / 2).all()  # 448, except with scales that are powers of two


def test_a_delayed_scale_follows_former_updates() -> None:
    made = QuantizedTensor.of(torch.ones(4, 4), "delayed")
    for size in (4.0, 2.0, 1.0):
        made.rescale_(torch.tensor([size]))
    assert made.scales.item() == pytest.approx(4.0 / 448)  # of the largest before the last update
    for _ in range(16):
        made.rescale_(torch.tensor([1.0]))
    assert made.scales.item() == pytest.approx(1.0 / 448)
    made.encode_(torch.full((16,), 2.0), 0)
    assert torch.equal(made.values(), torch.ones(4, 4))  # above what the scale expects: clamped


@ON_RECIPES
def test_elements_sharing_a_scale_with_a_nonfinite_are_nan(recipe: str) -> None:
    groups = groups_of(recipe, (256, 256))
    for bad in (torch.nan, torch.inf):
        values = normal(256, 256)
        values[200, 7] = bad
        found = QuantizedTensor.of(values, recipe).values().isnan().view(-1)
        assert torch.equal(found, groups == groups[200 * 256 + 7]), bad
    assert not QuantizedTensor.of(torch.zeros(64, 64), recipe).values().any()
    tiny = torch.full((64, 64), torch.finfo(torch.float32).tiny)
    assert QuantizedTensor.of(tiny, recipe).values().isfinite().all()


def model_of(recipe: str) -> tuple[nn.Sequential, nn.Sequential]:
    model = nn.Sequential(nn.Linear(64, 96), nn.Tanh(), nn.Linear(96, 32, bias=False))
    with torch.no_grad():
        for param in model.parameters():
            param.copy_(normal(*param.shape) / 8)
    wide = copy.deepcopy(model)
    assert quantize_linears_(model, recipe) == ["0.weight", "2.weight"]
    return model, wide


@ON_RECIPES
def test_modules_compute_and_differentiate_dequantised_weights(recipe: str) -> None:
    model, wide = model_of(recipe)
    with torch.no_grad():
        for i in (0, 2):
            wide[i].weight.copy_(model[i].weight.values())
    for one in (model, wide):
        for seed in (0, 1):  # the second adds to the gradients
            one(normal(5, 64, seed=seed)).square().sum().backward()
    for ours, theirs in zip(model.parameters(), wide.parameters(), strict=True):
        assert type(ours.grad) is Tensor
        assert torch.equal(ours.grad, theirs.grad)


@ON_RECIPES
def test_a_module_is_copied_saved_loaded_and_moved(recipe: str) -> None:
    model, _ = model_of(recipe)
    weight = model[0].weight
    file = io.BytesIO()
    weight.mark = 7
    torch.save(model.state_dict(), file)
    file.seek(0)
    copied = copy.deepcopy(model)[0].weight
    moved = copy.deepcopy(model).to("meta")[0].weight
    for made in (copied, moved):
        assert is_quantized(made)
        assert isinstance(made, nn.Parameter)
    assert copied.mark == 7
    assert copied.codes.data_ptr() != weight.codes.data_ptr()
    tensors = (moved, moved.codes, moved.scales, moved.history)
    assert {t.device.type for t in tensors if t is not None} == {"meta"}
    other = copy.deepcopy(model)
    with torch.no_grad():
        other[0].weight.zero_()
    assert not other[0].weight.values().any()
    other.load_state_dict(torch.load(file, weights_only=True))
    # Values are codes times a scale, and the scale of these is found again from the largest of them.
    torch.testing.assert_close(other[0].weight.values(), weight.values(), rtol=2.0**-22, atol=0.0)
    again = pickle.loads(pickle.dumps(model))[0].weight
    assert (type(again), again.requires_grad, again.mark) == (nn.Parameter, True, 7)
    assert torch.equal(again, weight.values())


def weight_of(values: Tensor, **options: bool) -> nn.Parameter:
    return nn.Parameter(QuantizedTensor.of(values, "blockwise", **options))


def descend(weight: Tensor, *, fused: bool) -> None:
    weight.grad = normal(64, 64, seed=2)
    torch.optim.SGD([weight], lr=0.5, fused=fused).step()


WRITES: dict[str, Callable[[Tensor], object]] = {
    "in place": lambda weight: weight.mul_(2.0),
    "data": lambda weight: setattr(weight, "data", torch.full((64, 64), 3.0)),
    "a list": lambda weight: torch._foreach_mul_([torch.ones(2), weight], 2.0),
    "out": lambda weight: torch.mul(torch.ones(64, 64), 2.0, out=weight),
    "an element": lambda weight: weight.__setitem__((1, 2), 96.0),
    "an element of data": lambda weight: weight.data.__setitem__((1, 2), 96.0),
    "init": lambda weight: nn.init.constant_(weight, 5.0),
    "an optimizer": lambda weight: descend(weight, fused=False),
    "a fused optimizer": lambda weight: descend(weight, fused=True),
}


@pytest.mark.parametrize("write", WRITES.values(), ids=WRITES)
def test_every_way_of_writing_quantises_again(write: Callable[[Tensor], object]) -> None:
    weight = weight_of(normal(64, 64))
    wide = nn.Parameter(weight_of(normal(64, 64)).values())
    with torch.no_grad():
        write(weight)
        write(wide)
    assert torch.equal(weight.values(), QuantizedTensor.of(wide.detach(), "blockwise").values())
    assert not torch.equal(weight.values(), weight_of(normal(64, 64)).values())
    assert weight.initial() is None


def test_collectives_on_copies_and_process_sharing_are_refused() -> None:
    weight = weight_of(normal(64, 64)).data
    with world_of_one():
        for collective in (
            lambda: dist.all_reduce(weight),
            lambda: dist.broadcast(weight, 0),
            lambda: dist.broadcast(weight.view(-1), 0),
        ):
            with pytest.raises(QuantizationError, match="would work on a dequantised copy"):
                collective()
    with pytest.raises(QuantizationError, match="cannot be shared between processes"):
        model_of("blockwise")[0].share_memory()


def test_layers_are_chosen_by_name_and_layer() -> None:
    model = nn.Sequential(nn.Linear(32, 32), nn.Linear(32, 64), nn.Linear(64, 32))
    chosen = quantize_linears_(model, only=lambda name, linear: name != "0" and linear.in_features == 32)
    assert chosen == ["1.weight"]


def test_quantising_keeps_ties_and_freezing_and_refuses_others() -> None:
    layers = nn.ModuleList([nn.Linear(32, 32), nn.Linear(32, 32), nn.Linear(32, 32)])
    layers[1].weight = layers[0].weight
    layers[2].weight.requires_grad_(False)
    quantize_linears_(layers, "mxfp8")
    assert layers[1].weight is layers[0].weight
    assert [linear.weight.requires_grad for linear in layers] == [True, True, False]
    for values, recipe, message in (
        (torch.ones(2, 2), "nvfp4", "recipe='nvfp4': delayed, tensorwise, blockwise, mxfp8 are allowed"),
        (torch.ones(2, 33), "mxfp8", "the recipe 'mxfp8' needs a last dim that is a multiple of 32"),
        (torch.ones(2, 2, dtype=torch.int32), "delayed", "only floating-point tensors can"),
    ):
        with pytest.raises(QuantizationError, match=message):
            QuantizedTensor.of(values, recipe)
    model = nn.Sequential(nn.Linear(32, 4), nn.Linear(4, 2))
    with pytest.raises(QuantizationError, match=r"1\.weight: .*multiple of 32"):
        quantize_linears_(model, "mxfp8")  # leaves other layers as they were
    assert not any(map(is_quantized, model.parameters()))


# --- views: reads give the dequantised values, writes are refused instead of lost -------------------------------------

LOST_IN_A_VIEW = "would write a view of an fp8 parameter"


def weight(**options: bool) -> nn.Parameter:
    return weight_of(normal(64, 32), **options)


VIEWS: dict[str, Callable[[Tensor], Tensor]] = {
    "one element": lambda p: p[3, 5],
    "slice": lambda p: p[2:9, ::3],
    "view": lambda p: p.view(-1),
    "view of a dtype": lambda p: p.view(torch.int32),
    "t": lambda p: p.t(),
    "split": lambda p: p.split(16)[1],
    "unsafe split": lambda p: torch.unsafe_split(p, 16)[1],
    "as_strided": lambda p: p.as_strided((4, 4), (32, 1), 7),
    "a view of a view": lambda p: p.t()[3].view(8, 8),
    "a view of data": lambda p: p.data.view(-1),
    "a detached view": lambda p: p[4].detach(),
}
VIEW_WRITES: dict[str, Callable[[Tensor], object]] = {
    "zero_": lambda v: v.zero_(),
    "mul_": lambda v: v.mul_(2),
    "copy_": lambda v: v.copy_(torch.ones_like(v)),
    "setitem": lambda v: v.__setitem__(..., 5),
    "out": lambda v: torch.add(torch.ones_like(v), 1, out=v),
    "foreach": lambda v: torch._foreach_add_([torch.ones(2), v], 1),
    "set_": lambda v: v.set_(torch.ones_like(v)),
    "data": lambda v: setattr(v, "data", torch.ones_like(v)),
}


@pytest.mark.parametrize("view", VIEWS.values(), ids=VIEWS)
def test_views_read_values_and_refuse_writes(view: Callable[[Tensor], Tensor]) -> None:
    param = weight()
    before = param.values()
    ours = view(param.detach())
    dense = view(before)
    assert (ours.shape, ours.stride()) == (dense.shape, dense.stride())
    assert type(ours * 2) is Tensor
    assert torch.equal(ours, dense)
    assert ours.tolist() == dense.tolist()
    np.testing.assert_array_equal(np.asarray(ours), dense.numpy())
    for write in VIEW_WRITES.values():
        with torch.no_grad(), pytest.raises(QuantizationError, match=LOST_IN_A_VIEW):
            write(view(param))
        assert torch.equal(param.values(), before)


def test_a_view_of_all_in_the_same_shape_writes_the_parameter() -> None:
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


CONVERT = "convert the model first"
SHAPE = r"would change the shape .* from \(64, 32\) to"
LOST: dict[str, tuple[Callable[[nn.Parameter], object], str]] = {
    "orthogonal_": (nn.init.orthogonal_, LOST_IN_A_VIEW),
    "resize_ of a view": (lambda p: p.detach()[0].resize_(1), LOST_IN_A_VIEW),
    "a custom operation": (lambda p: torch.ops.fp8_views.double_(p[0]), LOST_IN_A_VIEW),
    "shared memory": (lambda p: p[0].share_memory_(), LOST_IN_A_VIEW),
    "dlpack": (lambda p: np.from_dlpack(p.detach()[0]), LOST_IN_A_VIEW),
    "zero_": (lambda p: p[0].zero_(), r"aten\.zero_.*param\[index\] = .*param\.copy_\(values\)"),  # says what to do
    "unsqueeze_": (lambda p: p.unsqueeze_(0), SHAPE),
    "resize_": (lambda p: p.data.resize_(2, 2), SHAPE),
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


def test_arrays_of_views_are_read_only_and_copies_are_writable() -> None:
    array = weight().detach().t().numpy()
    with pytest.raises(ValueError, match="read-only"):
        array[0] = 1.0
    with pytest.raises(RuntimeError, match="requires grad"):
        weight()[0].numpy()
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
    param = weight()
    dense = nn.Parameter(weight().values())
    for one in (param, dense):
        (one[2:5].t() @ normal(3, 4) + one.view(-1)[7] + one.unbind()[3].view(4, 8).sum()).square().sum().backward()
    assert type(param.grad) is Tensor
    assert torch.equal(param.grad, dense.grad)


def test_a_compiled_function_reads_views_and_keeps_writes() -> None:
    param = weight(keep_initial=False)
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
