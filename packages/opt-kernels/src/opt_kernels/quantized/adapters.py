"""Adapters for the fp8 tensors of TransformerEngine (2.x) and torchao (0.13 and later), so that optimizers update them.

They are recognised by the names of their class and package, so that neither library is imported. The adapters use these
attributes:

    transformer_engine  Float8Tensor            _data (uint8), _scale_inv, _fp8_dtype, _quantizer (scale, amax)
    transformer_engine  Float8BlockwiseQTensor  _rowwise_data, _rowwise_scale_inv (padded), _is_2D_scaled
    transformer_engine  MXFP8Tensor             quantises whole values itself, since it also keeps codes by columns
    torchao             Float8TrainingTensor    _data (float8_e4m3fn), _scale (factor of the values)
    torchao             Float8Tensor            qdata, scale (factor of the codes)
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from opt_kernels.quantized.protocol import QuantizationError
from opt_kernels.quantized.recipes import FP8, RECIPES, as_matrix
from opt_kernels.quantized.scaled import ScaledCodes, ScaledParam


@dataclass(eq=False)
class AdaptedTensor(ScaledParam):
    """A `QuantizedParam` over a library's tensor. Codes are shared with it; scales are written to it by `finish_`."""

    tensor: Any
    scaled: ScaledCodes
    put_codes: Callable[[Tensor], None]  # makes the tensor keep its codes, (numel,) uint8, in this memory
    put_scales: Callable[[Tensor], None]  # (num_scales,) fp32, factors of the codes

    @property
    def shape(self) -> torch.Size:
        """The shape of the parameter."""
        return self.scaled.shape

    def move_(self, codes: Tensor, scales: Tensor | None) -> None:
        """Move the codes, and let the library's tensor use the new memory."""
        super().move_(codes, scales)
        self.put_codes(codes)

    def values(self) -> Tensor:
        """The values as the library dequantises them, fp32."""
        values: Tensor = self.tensor.dequantize()
        return values.detach().to(torch.float32).view(self.shape)

    def initial(self) -> Tensor | None:
        """The values kept by TransformerEngine's quantized_model_init(preserve_high_precision_init_val=True)."""
        read = getattr(self.tensor, "get_high_precision_init_val", None)
        initial: Tensor | None = None if read is None else read()
        return initial

    def forget_initial(self) -> None:
        """Free the values that `initial` returns."""
        clear = getattr(self.tensor, "clear_high_precision_init_val", None)
        if clear is not None:
            clear()

    def rescale_(self, largest: Tensor, *, skip: Tensor | None = None) -> None:
        """With delayed scaling, use the scale of the tensor's quantizer, and record the largest magnitude in it."""
        quantizer = getattr(self.tensor, "_quantizer", None)
        if self.recipe.name != "delayed":
            super().rescale_(largest, skip=skip)
            return
        stays = largest < 0 if skip is None else (largest < 0) | skip
        self.scales.copy_(torch.where(stays, self.scales, 1.0 / quantizer.scale.view(1)))  # type: ignore[union-attr]
        amax = quantizer.amax  # type: ignore[union-attr]
        amax.copy_(torch.where(stays, amax.view(1), torch.maximum(amax.view(1), largest)).view(amax.shape))

    def quantize_(self, values: Tensor) -> None:
        """Write scales and codes from `values` (shape), of any float dtype."""
        super().quantize_(values)
        self.finish_()

    def finish_(self) -> None:
        """Write the scales, and drop or recompute what the tensor derives from its codes."""
        self.put_scales(self.scales)
        for name in ("_reset_caches", "_create_columnwise"):
            renew = getattr(self.tensor, name, None)
            if renew is not None and (name != "_create_columnwise" or self.tensor._columnwise_data is not None):
                renew()

    def extra(self) -> Mapping[str, Tensor]:
        """Empty: modules of TransformerEngine save their histories themselves."""
        return {}


class WholeTensor(AdaptedTensor):
    """A tensor that only its library can quantise, and only as a whole."""

    def move_(self, codes: Tensor, scales: Tensor | None) -> None:
        """Raise QuantizationError: its codes cannot be gathered."""
        raise QuantizationError(
            f"{type(self.tensor).__name__} keeps codes by rows and by columns, which cannot be gathered in place; set "
            "reuse_grad_buf_for_mxfp8_param_ag=True, so that bf16 values are gathered and each rank quantises them"
        )

    def encode_(self, values: Tensor, start: int, *, skip: Tensor | None = None) -> None:
        """Quantise the whole tensor. Raises QuantizationError for a part of it."""
        if start or values.numel() != self.shape.numel():
            self.move_(values, None)
        self.quantize_(values if skip is None else torch.where(skip, self.values().view(-1), values))

    def quantize_(self, values: Tensor) -> None:
        """Quantise `values` by the tensor's own `copy_`."""
        with torch.no_grad():
            self.tensor.copy_(values.view(self.shape))

    def finish_(self) -> None:
        """Do nothing: the library has updated everything."""


_KNOWN: Any = WeakIdKeyDictionary()  # by tensor; weak, because adapters hold tensors


def adapted(tensor: Tensor) -> AdaptedTensor | None:
    """The adapter of a tensor of one of these libraries; the same object in every call. None for any other tensor.

    Raises:
        QuantizationError: its codes are not float8_e4m3fn, or no recipe has its scaling.
    """
    make = _MAKERS.get((type(tensor).__module__.partition(".")[0], type(tensor).__name__))
    if make is None:
        return None
    if tensor not in _KNOWN:
        _KNOWN[tensor] = make(tensor)
    found: AdaptedTensor = _KNOWN[tensor]
    return found


def _scaled(tensor: Any, recipe: str, codes: Tensor, scales: Tensor) -> ScaledCodes:
    shape, made = torch.Size(tensor.shape), RECIPES[recipe]
    if codes.dtype not in (torch.uint8, FP8) or scales.numel() != made.num_scales(tuple(shape)):
        raise QuantizationError(
            f"{type(tensor).__name__} of shape {tuple(shape)} has codes of {codes.dtype} and {scales.numel()} scales; "
            f"the recipe {recipe!r} needs float8_e4m3fn and {made.num_scales(tuple(shape))}"
        )
    flat = codes.detach().view(-1).view(torch.uint8)
    return ScaledCodes(recipe=made, shape=shape, codes=flat, scales=scales.detach().float().reshape(-1).clone())


def _te_float8(tensor: Any) -> AdaptedTensor:
    _check_e4m3(tensor)
    delayed = "CurrentScaling" not in type(tensor._quantizer).__name__

    def put_codes(codes: Tensor) -> None:
        tensor._data = codes.view(tensor.shape)

    scaled = _scaled(tensor, "delayed" if delayed else "tensorwise", tensor._data, tensor._scale_inv)
    return AdaptedTensor(tensor, scaled, put_codes, lambda scales: tensor._scale_inv.copy_(scales.view(-1)))


def _te_blockwise(tensor: Any) -> AdaptedTensor:
    _check_e4m3(tensor)
    if not tensor._is_2D_scaled:
        raise QuantizationError("Float8BlockwiseQTensor has 1 x 128 blocks; parameters need 128 x 128 ones")
    rows, cols = (-(-size // 128) for size in as_matrix(tuple(tensor.shape)))

    def put_codes(codes: Tensor) -> None:
        tensor._rowwise_data = codes.view(tensor.shape)

    def put_scales(scales: Tensor) -> None:
        tensor._rowwise_scale_inv[:rows, :cols].copy_(scales.view(rows, cols))

    scales = tensor._rowwise_scale_inv[:rows, :cols]
    return AdaptedTensor(tensor, _scaled(tensor, "blockwise", tensor._rowwise_data, scales), put_codes, put_scales)


def _te_mxfp8(tensor: Any) -> AdaptedTensor:
    _check_e4m3(tensor)
    shape, made = torch.Size(tensor.shape), RECIPES["mxfp8"]
    codes = tensor._rowwise_data.detach().view(-1).view(torch.uint8)
    return WholeTensor(tensor, ScaledCodes(recipe=made, shape=shape, codes=codes, scales=codes[:0]), _ignore, _ignore)


def _torchao_training(tensor: Any) -> AdaptedTensor:
    def put_codes(codes: Tensor) -> None:
        tensor._data = codes.view(FP8).view(tensor.shape)

    scaled = _scaled(tensor, "tensorwise", tensor._data, tensor._scale.float().reciprocal())
    return AdaptedTensor(
        tensor, scaled, put_codes, lambda scales: tensor._scale.copy_(scales.reciprocal().view(tensor._scale.shape))
    )


def _torchao_float8(tensor: Any) -> AdaptedTensor:
    def put_codes(codes: Tensor) -> None:
        tensor.qdata = codes.view(FP8).view(tensor.shape)

    scaled = _scaled(tensor, "tensorwise", tensor.qdata, tensor.scale)
    return AdaptedTensor(tensor, scaled, put_codes, lambda scales: tensor.scale.copy_(scales.view(tensor.scale.shape)))


def _check_e4m3(tensor: Any) -> None:
    if "E4M3" not in str(tensor._fp8_dtype):
        raise QuantizationError(f"{type(tensor).__name__} of {tensor._fp8_dtype}; parameters in fp8 are E4M3")


def _ignore(memory: Tensor) -> None:
    return None


_MAKERS: Mapping[tuple[str, str], Callable[[Any], AdaptedTensor]] = {
    ("transformer_engine", "Float8Tensor"): _te_float8,
    ("transformer_engine", "Float8BlockwiseQTensor"): _te_blockwise,
    ("transformer_engine", "MXFP8Tensor"): _te_mxfp8,
    ("torchao", "Float8TrainingTensor"): _torchao_training,
    ("torchao", "Float8Tensor"): _torchao_float8,
}
