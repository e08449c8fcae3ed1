"""Run Triton's kernels under its interpreter on machines without a GPU, repeat the same tests in every run, and cache
what every test would read again.

Triton reads the variable when a kernel is defined, so it is set before any test module is imported.
"""

import gc
import os
from importlib.util import find_spec
from inspect import ismodule
from typing import Any

import tiers
from installed_packages import read_entry_points_once

pytest_plugins = ["outcomes"]  # of integration_tests/support: the markers, and the record of what ran

if find_spec("torch") is not None:  # opt-scheduler is also tested without it
    import torch

    torch.set_num_threads(1)  # many ranks and workers share the cores; and one order of summation
    if not torch.cuda.is_available():
        os.environ.setdefault("TRITON_INTERPRET", "1")

if find_spec("hypothesis") is not None:  # some GPU machines have pytest only
    from hypothesis import HealthCheck, settings

    # The same examples in every run, however slow the machine; `--hypothesis-profile=default` draws others.
    repeatable = {"deadline": None, "derandomize": True, "suppress_health_check": [HealthCheck.too_slow]}
    settings.register_profile("repeatable", **repeatable)
    settings.load_profile("repeatable")


def pytest_report_header() -> str:
    return f"torch: {torch.__version__ if find_spec('torch') is not None else 'not installed'}"


def pytest_terminal_summary(terminalreporter: Any, exitstatus: int) -> None:
    if exitstatus and not tiers.NIGHT:
        terminalreporter.write_line(f"grids are sampled: OPT_SEED={tiers.SEED} draws the same cases again")


def pytest_collection_finish() -> None:
    gc.freeze()  # modules and tests live until the end; looking through them takes a tenth of the time of small tests
    read_entry_points_once()
    if os.environ.get("TRITON_INTERPRET") == "1" and find_spec("triton") is not None:
        enter_device_functions_faster()
        round_fma_once()


def pytest_unconfigure() -> None:
    gc.unfreeze()  # at exit, extension modules print what they take for leaks


def enter_device_functions_faster() -> None:
    """Let Triton's interpreter replace the functions of its language once a launch, not again in each device function.

    Looking through the language's modules takes half of the time that kernels run.
    """
    from triton.language import core
    from triton.runtime import interpreter

    scope_of_patches = getattr(interpreter, "_LangPatchScope", None)
    if scope_of_patches is None:  # older versions of Triton never restore what they replaced
        return
    patch = interpreter._patch_lang

    def patch_once(function: Any) -> Any:
        languages = [one for one in function.__globals__.values() if ismodule(one) and one in (interpreter.tl, core)]
        is_patched = languages and not any(core.is_builtin(language.load) for language in languages)
        return scope_of_patches() if is_patched else patch(function)

    interpreter._patch_lang = patch_once


def round_fma_once() -> None:
    """Let the interpreter of Triton before 3.9 round a fused multiply-add once, as GPUs do.

    It rounds the product, too, so that tests of bits would differ by a unit in the last place.
    """
    import numpy as np
    import triton
    from triton.runtime import interpreter

    if tuple(map(int, triton.__version__.split(".")[:2])) >= (3, 9):
        return

    def create_fma(builder: Any, x: Any, y: Any, z: Any) -> Any:
        product = x.data.astype(np.float64) * y.data.astype(np.float64)  # exact
        total = product + z.data.astype(np.float64)
        return interpreter.TensorHandle(total.astype(z.data.dtype), z.dtype.scalar)

    interpreter.InterpreterBuilder.create_fma = create_fma
