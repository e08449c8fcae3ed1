"""Recognises fp8 parameters, and adapts those of TransformerEngine (2.x) and torchao (0.13 and later), so that
optimizers update them.

Their tensors are known by the names of class and package, so that neither library is imported. Used are these
attributes:

    transformer_engine  Float8Tensor            _data (uint8), _scale_inv, _fp8_dtype, _quantizer (scale, amax)
    transformer_engine  Float8BlockwiseQTensor  _rowwise_data, _rowwise_scale_inv (padded), _is_2D_scaled
    transformer_engine  MXFP8Tensor             quantises whole values itself, since it also keeps codes by columns
    torchao             Float8TrainingTensor    _data (float8_e4m3fn), _scale (factor of the values)
    torchao             Float8Tensor            qdata, scale (factor of the codes)
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from opt_kernels.quantized.scaled import FP8, RECIPES, QuantizationError, QuantizedParam, as_matrix
from opt_kernels.quantized.tensor import QuantizedTensor


class Form(NamedTuple):
    """The attributes in which a class of tensors keeps its codes and scales."""

    codes: str  # float8_e4m3fn or its bits, of the shape of the tensor
    scales: str = ""  # factors of the codes, perhaps padded; empty: only the library writes them
    is_inverse: bool = False  # factors of the values instead


@dataclass(eq=False, kw_only=True)
class AdaptedTensor(QuantizedParam):
    """A `QuantizedParam` over a library's tensor. Codes are shared with it; scales are written to it by `finish_`.

    Modules of TransformerEngine save their histories themselves.
    """

    tensor: Any
    form: Form

    def move_(self, codes: Tensor, scales: Tensor | None) -> None:
        """Move the codes, and let the library's tensor use the new memory."""
        super().move_(codes, scales)
        dtype = getattr(self.tensor, self.form.codes).dtype
        setattr(self.tensor, self.form.codes, codes.view(dtype).view(self.tensor.shape))

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

    def rescale_(self, largest: Tensor) -> None:
        """With delayed scaling, use the scale of the tensor's quantizer, and record the largest magnitude in it."""
        quantizer = getattr(self.tensor, "_quantizer", None)
        if self.recipe.name != "delayed":
            super().rescale_(largest)
            return
        unchanged = largest < 0
        new = 1.0 / quantizer.scale.view(1)  # type: ignore[union-attr]
        self.scales.copy_(torch.where(unchanged, self.scales, new))
        amax = quantizer.amax.view(1)  # type: ignore[union-attr]
        amax.copy_(torch.where(unchanged, amax, torch.maximum(amax, largest)))

    def quantize_(self, values: Tensor) -> None:
        """Write scales and codes from `values` (shape), of any float dtype."""
        super().quantize_(values)
        self.finish_()

    def finish_(self) -> None:
        """Write the scales, and drop or recompute what the tensor derives from its codes."""
        target = _unpadded(getattr(self.tensor, self.form.scales), self)
        scales = self.scales.reciprocal() if self.form.is_inverse else self.scales
        target.copy_(scales.view(target.shape))
        reset = getattr(self.tensor, "_reset_caches", None)
        if reset is not None:
            reset()
        if getattr(self.tensor, "_columnwise_data", None) is not None and hasattr(self.tensor, "_create_columnwise"):
            self.tensor._create_columnwise()


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
    library = type(tensor).__module__.partition(".")[0]
    form = _FORMS.get((library, type(tensor).__name__))
    if form is None:
        return None
    codes = getattr(tensor, form.codes)
    if tensor not in _KNOWN or _KNOWN[tensor].codes.data_ptr() != codes.data_ptr():  # new, or moved
        recipe = "tensorwise" if library == "torchao" else _recipe_of(tensor)
        _KNOWN[tensor] = _adapted(tensor, form, recipe)
    found: AdaptedTensor = _KNOWN[tensor]
    return found


def _recipe_of(tensor: Any) -> str:
    kind = type(tensor).__name__
    if "E4M3" not in str(tensor._fp8_dtype):
        raise QuantizationError(f"{kind} of {tensor._fp8_dtype}; parameters in fp8 are E4M3")
    if kind == "MXFP8Tensor":
        return "mxfp8"
    if kind == "Float8BlockwiseQTensor":
        if not tensor._is_2D_scaled:
            raise QuantizationError(f"{kind} has 1 x 128 blocks; parameters need 128 x 128 ones")
        return "blockwise"
    return "tensorwise" if "CurrentScaling" in type(tensor._quantizer).__name__ else "delayed"


def _adapted(tensor: Any, form: Form, recipe: str) -> AdaptedTensor:
    codes = getattr(tensor, form.codes).detach()
    kind = AdaptedTensor if form.scales else WholeTensor
    made = kind(
        tensor=tensor,
        form=form,
        recipe=RECIPES[recipe],
        shape=torch.Size(tensor.shape),
        codes=codes.view(-1).view(torch.uint8),
        scales=codes.new_empty(0, dtype=torch.uint8),
    )
    if not form.scales:
        return made
    scales = _unpadded(getattr(tensor, form.scales).detach(), made).float()
    if codes.dtype not in (torch.uint8, FP8) or scales.numel() != made.num_scales:
        raise QuantizationError(
            f"{type(tensor).__name__} of shape {tuple(tensor.shape)} has codes of {codes.dtype} and {scales.numel()} "
            f"scales; the recipe {recipe!r} needs float8_e4m3fn and {made.num_scales}"
        )
    if form.is_inverse:
        scales = scales.reciprocal()
    made.scales = scales.reshape(-1).clone()
    return made


def _unpadded(scales: Tensor, scaled: QuantizedParam) -> Tensor:
    """A view of the scales in use: libraries pad those of squares."""
    if not scaled.recipe.square:
        return scales
    rows, cols = (-(-size // scaled.recipe.square) for size in as_matrix(scaled.shape))
    return scales[:rows, :cols]


_FORMS: Mapping[tuple[str, str], Form] = {
    ("transformer_engine", "Float8Tensor"): Form("_data", "_scale_inv"),
    ("transformer_engine", "Float8BlockwiseQTensor"): Form("_rowwise_data", "_rowwise_scale_inv"),
    ("transformer_engine", "MXFP8Tensor"): Form("_rowwise_data"),
    ("torchao", "Float8TrainingTensor"): Form("_data", "_scale", is_inverse=True),
    ("torchao", "Float8Tensor"): Form("qdata", "scale"),
}


def quantized(tensor: Tensor) -> QuantizedParam | None:
    """The `QuantizedParam` of an fp8 tensor; None for any other tensor.

    Raises:
        QuantizationError: an fp8 tensor in a form that cannot be updated.
    """
    if type(tensor).__module__.startswith("torch.") or type(tensor) is Tensor:
        return None
    if isinstance(tensor, QuantizedTensor):
        return tensor.scaled
    return adapted(tensor)


def is_quantized(tensor: Tensor) -> bool:
    """Whether `tensor` is an fp8 tensor."""
    return quantized(tensor) is not None
