"""Examples as modules."""

import importlib.util
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def small_example(monkeypatch: pytest.MonkeyPatch) -> Callable[..., ModuleType]:
    """`small_example("leaderboard", dim=16)`: a fresh copy of the example, on a model and a budget of a second."""

    def load(name: str, *, dim: int) -> ModuleType:
        spec = importlib.util.spec_from_file_location(name, EXAMPLES / f"{name}.py")
        assert spec is not None
        assert spec.loader is not None
        module = importlib.util.module_from_spec(spec)
        monkeypatch.setitem(sys.modules, name, module)
        spec.loader.exec_module(module)
        module.STEPS, module.WARMUP, module.EVAL_EVERY, module.BATCH = 4, 2, 2, 2
        module.MODEL = {"dim": dim, "depth": 1, "num_heads": 2}
        return module

    return load
