"""Run Triton's kernels under its interpreter where there is no GPU.

Triton reads the variable when a kernel is defined, so it is set before any test module is imported.
"""

import os
from importlib.util import find_spec

if find_spec("torch") is not None:  # opt-scheduler is also tested without it
    import torch

    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")
