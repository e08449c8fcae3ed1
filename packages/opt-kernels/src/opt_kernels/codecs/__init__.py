"""Storage formats: states in narrow codes, float32 mains as bfloat16 and remainder, and stochastic rounding."""

from opt_kernels.codecs.codec import (
    BLOCK,
    TINY,
    CodecError,
    Companded,
    Plain,
    Root,
    Scaled,
    StateCodec,
    codec_for,
    codecs_of,
    init_state,
    scale_name,
    state_specs,
    without_outliers,
)
from opt_kernels.codecs.narrow import join, split_

__all__ = [
    "BLOCK", "TINY", "CodecError", "Companded", "Plain", "Root", "Scaled", "StateCodec", "codec_for", "codecs_of",
    "init_state", "join", "scale_name", "split_", "state_specs", "without_outliers",
]  # fmt: skip
