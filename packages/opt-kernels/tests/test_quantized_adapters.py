"""fp8 tensors of other libraries, by stand-ins with their class names, attributes and meaning of scales."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_map

from opt_kernels.quantized import QuantizationError, QuantizedTensor, is_quantized, quantized


class StandIn(Tensor):
    def __new__(cls, shape: tuple[int, ...], **attributes: Any) -> Any:
        made = Tensor._make_wrapper_subclass(cls, shape, dtype=torch.bfloat16)
        vars(made).update(attributes)
        return made

    @classmethod
    def __torch_dispatch__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.detach.default:
            return cls(tuple(args[0].shape), **vars(args[0]))
        if func is torch.ops.aten.copy_.default:
            args[0].taken = args[1]
            return args[0]
        return func(*tree_map(lambda x: x.dequantize() if isinstance(x, StandIn) else x, args), **(kwargs or {}))


def library(package: str, name: str, dequantize: Any = lambda t: torch.zeros(t.shape)) -> type[StandIn]:
    return type(name, (StandIn,), {"__module__": f"{package}.tensor", "dequantize": dequantize})


def fp8(tensor: Tensor) -> Tensor:
    return tensor.view(torch.float8_e4m3fn).float()


TeFloat8 = library("transformer_engine", "Float8Tensor", lambda t: (fp8(t._data) * t._scale_inv).bfloat16())
TeBlockwise = library("transformer_engine", "Float8BlockwiseQTensor")
TeMxfp8 = library("transformer_engine", "MXFP8Tensor")
AoTraining = library("torchao", "Float8TrainingTensor", lambda t: (t._data.float() / t._scale).bfloat16())
AoFloat8 = library("torchao", "Float8Tensor", lambda t: (t.qdata.float() * t.scale).bfloat16())

SHAPE = (192, 160)
VALUES = torch.randn(SHAPE, generator=torch.Generator().manual_seed(0))
CODES = {"te": torch.zeros(SHAPE, dtype=torch.uint8), "ao": torch.zeros(SHAPE).to(torch.float8_e4m3fn)}


def te_float8(quantizer: str, **numbers: float) -> Any:
    made = type(quantizer, (SimpleNamespace,), {})(**{name: torch.tensor([value]) for name, value in numbers.items()})
    data = {"_data": CODES["te"].clone(), "_scale_inv": torch.ones(1), "_fp8_dtype": "DType.kFloat8E4M3"}
    return TeFloat8(SHAPE, _quantizer=made, **data)


def updated(param: Any) -> Any:
    """The adapter after an update of two runs, as of two ranks."""
    found = quantized(param)
    flat = VALUES.view(-1)
    largest = torch.full((found.num_scales,), -1.0)
    found.largest_(largest, flat[:1000], 0)
    found.largest_(largest, flat[1000:], 1000)
    found.rescale_(largest)
    found.encode_(flat[:1000], 0)
    found.encode_(flat[1000:], 1000)
    found.finish_()
    return found


def test_current_scaling_of_transformer_engine() -> None:
    param = nn.Parameter(te_float8("Float8CurrentScalingQuantizer"))
    found = updated(param)
    want = QuantizedTensor.of(VALUES, "tensorwise")
    assert found.recipe.name == "tensorwise"
    assert torch.equal(param._data.view(-1), want.codes)
    assert torch.equal(param._scale_inv, want.scales)
    assert quantized(param) is found  # it keeps scales, so there is one
    cleared: list[int] = []
    found.tensor.get_high_precision_init_val = lambda: VALUES
    found.tensor.clear_high_precision_init_val = lambda: cleared.append(1)
    assert found.initial() is VALUES
    found.forget_initial()
    assert cleared
    memory = torch.zeros(VALUES.numel(), dtype=torch.uint8)
    found.move_(memory, None)
    assert param._data.data_ptr() == memory.data_ptr()
    assert torch.equal(found.values(), want.values().bfloat16().float())


def test_delayed_scaling_uses_the_quantizers_scale_and_sets_amax() -> None:
    param = nn.Parameter(te_float8("Float8Quantizer", scale=64.0, amax=0.25))
    found = updated(param)
    assert found.recipe.name == "delayed"
    assert param._scale_inv.item() == 1 / 64
    assert param._quantizer.amax.item() == VALUES.abs().max().item()
    assert torch.equal(param._data, (VALUES * 64).clamp(-448, 448).to(torch.float8_e4m3fn).view(torch.uint8))
    param._quantizer.amax.fill_(9.0)
    found.rescale_(torch.tensor([2.0]))
    assert param._quantizer.amax.item() == 9.0  # of all updates since the quantizer took it
    param._quantizer.scale.fill_(32.0)
    found.rescale_(torch.tensor([-1.0]))  # no rank has moved it
    found.finish_()
    assert param._scale_inv.item() == 1 / 64


def blockwise(**changes: Any) -> Any:
    attributes = {
        "_rowwise_data": CODES["te"].clone(),
        "_rowwise_scale_inv": torch.full((2, 4), 7.0),  # two columns of squares, padded to four
        "_columnwise_data": torch.zeros(160, 192, dtype=torch.uint8),
        "_is_2D_scaled": True,
        "_fp8_dtype": "DType.kFloat8E4M3",
    }
    return TeBlockwise(SHAPE, **{**attributes, **changes})


def test_squares_of_transformer_engine() -> None:
    param = nn.Parameter(blockwise())
    renewed = []
    want = QuantizedTensor.of(VALUES, "blockwise")
    quantized(param).tensor._create_columnwise = lambda: renewed.append(1)
    updated(param)
    assert torch.equal(param._rowwise_data.view(-1), want.codes)
    assert torch.equal(param._rowwise_scale_inv[:, :2], want.scales.view(2, 2))
    assert (param._rowwise_scale_inv[:, 2:] == 7.0).all()
    assert renewed


def test_mxfp8_of_transformer_engine_quantises_itself_whole() -> None:
    data = CODES["te"].clone()
    found = quantized(nn.Parameter(TeMxfp8(SHAPE, _rowwise_data=data, _fp8_dtype="DType.kFloat8E4M3")))
    found.encode_(VALUES.view(-1), 0)
    assert torch.equal(found.tensor.taken, VALUES)
    for refused in (lambda: found.encode_(VALUES.view(-1)[:32], 0), lambda: found.move_(data.view(-1), None)):
        with pytest.raises(QuantizationError, match="set reuse_grad_buf_for_mxfp8_param_ag=True"):
            refused()


def test_tensors_of_torchao() -> None:
    want = QuantizedTensor.of(VALUES, "tensorwise")
    for kind, data, scales in ((AoTraining, "_data", "_scale"), (AoFloat8, "qdata", "scale")):
        codes = CODES["ao"].clone()
        scale = torch.ones(() if kind is AoTraining else (1, 1))
        found = updated(nn.Parameter(kind(SHAPE, **{data: codes, scales: scale})))
        assert torch.equal(codes.view(torch.uint8).view(-1), want.codes)
        factor = scale.reciprocal() if kind is AoTraining else scale
        torch.testing.assert_close(factor.view(1), want.scales, rtol=1e-6, atol=0)
        torch.testing.assert_close(found.values(), want.values(), rtol=2.0**-7, atol=0)


def test_what_no_recipe_describes_is_refused() -> None:
    for made, message in (
        (blockwise(_is_2D_scaled=False), "parameters need 128 x 128"),
        (blockwise(_fp8_dtype="DType.kFloat8E5M2"), "parameters in fp8 are E4M3"),
        (AoFloat8(SHAPE, qdata=CODES["ao"], scale=torch.ones(192, 1)), "192 scales; the recipe 'tensorwise' needs"),
        (AoFloat8(SHAPE, qdata=CODES["te"].int(), scale=torch.ones(1, 1)), r"codes of torch\.int32"),
    ):
        with pytest.raises(QuantizationError, match=message):
            quantized(made)
    assert not is_quantized(library("elsewhere", "Float8Tensor")(SHAPE))
    assert not is_quantized(torch.ones(2))
