"""Parameters in fp8 (codes of one byte, and scales): recipes, a torch tensor subclass, and adapters for libraries."""

from opt_kernels.quantized.adapters import is_quantized, quantized
from opt_kernels.quantized.scaled import FP8, RECIPES, QuantizationError, QuantizedParam, Recipe
from opt_kernels.quantized.tensor import QuantizedTensor, quantize_linears_

__all__ = [
    "FP8", "RECIPES", "QuantizationError", "QuantizedParam", "QuantizedTensor", "Recipe", "is_quantized",
    "quantize_linears_", "quantized",
]  # fmt: skip
