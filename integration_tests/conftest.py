"""Fixtures of all integration tests: one thread for each rank, and examples as modules."""

import importlib.util
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from types import ModuleType

import pytest
import torch

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture(scope="module", autouse=True)
def one_thread_for_each_rank() -> Iterator[None]:
    """Avoid oversubscribed cores, and keep one summation order."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


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
