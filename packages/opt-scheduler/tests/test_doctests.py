"""Every example in a docstring is true."""

import doctest
import importlib
import importlib.util
import pkgutil

import pytest

import opt_scheduler

MODULES = sorted(module.name for module in pkgutil.iter_modules(opt_scheduler.__path__))


@pytest.mark.needs_extra
@pytest.mark.parametrize("name", MODULES)
def test_the_examples_in_its_docstrings_are_true(name: str) -> None:
    needed = {"lr_scheduler": "torch", "keras_callback": "keras"}.get(name, "doctest")
    if importlib.util.find_spec(needed) is None:
        pytest.skip(f"the adapter needs {needed}")
    module = importlib.import_module(f"opt_scheduler.{name}")
    assert doctest.testmod(module).failed == 0


@pytest.mark.parametrize("name", ["shapes", "curves", "compose", "recipes"])
def test_every_public_curve_has_an_example(name: str) -> None:
    module = importlib.import_module(f"opt_scheduler.{name}")
    functions = [f for f in vars(module).values() if callable(f) and getattr(f, "__module__", "") == module.__name__]
    public = [f for f in functions if not f.__name__.startswith("_") and not isinstance(f, type)]
    assert public
    assert [f.__name__ for f in public if ">>>" not in (f.__doc__ or "")] == []
