"""Docstrings of public functions and methods begin with a verb, as far as a test can tell."""

import importlib
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "docs" / "make"))

import api  # noqa: E402  (of docs/make, which is only now on the path)

# First words that are no verbs: articles, pronouns, nouns that earlier docstrings began with.
NOT_VERBS = (
    "A All An Any As Each Every For How If It Its Names One Parameters Position Same Statistics The This What Where"
)


def documented() -> Iterator[tuple[str, str]]:
    """The name and the docstring of every public function and method."""
    for package in api.PACKAGES:
        module = importlib.import_module(package)
        for name in api.public_names(package):
            value: Any = getattr(module, name)
            if inspect.isfunction(value):
                yield f"{package}.{name}", inspect.getdoc(value) or ""
            elif inspect.isclass(value):
                for method, function in api.members(value):
                    if not isinstance(function, property):
                        plain = getattr(function, "__func__", function)
                        yield f"{package}.{name}.{method}", inspect.getdoc(plain) or ""


def test_public_docstrings_begin_with_a_verb() -> None:
    texts = dict(documented())
    assert len(texts) > 300
    noun = re.compile(rf"(?:{'|'.join(NOT_VERBS.split())})\b|[^A-Z]")
    assert {name: text.partition("\n")[0] for name, text in texts.items() if not text or noun.match(text)} == {}
