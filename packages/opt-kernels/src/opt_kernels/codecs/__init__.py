"""Storage formats: states in narrow codes, float32 mains as bfloat16 and remainder, and stochastic rounding."""

from opt_kernels.codecs.codec import (
    BLOCK,
    TINY,
    CodecError,
    Codecs,
    Plain,
    Scaled,
    StateCodec,
    codec_for,
    codecs_of,
    init_state,
    largest_beta,
    rows_of,
    scale_name,
    scheme_of,
    stalls,
    state_specs,
    without_outliers,
)
from opt_kernels.codecs.narrow import join, split_

__all__ = [
    "BLOCK", "TINY", "CodecError", "Codecs", "Plain", "Scaled", "StateCodec", "codec_for", "codecs_of", "init_state",
    "join", "largest_beta", "rows_of", "scale_name", "scheme_of", "split_", "stalls", "state_specs", "without_outliers",
]  # fmt: skip
