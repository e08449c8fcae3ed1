"""The API reference: one page for each package, one entry for each of its public names, made from its docstrings."""

import importlib
import inspect
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

from docstrings import markdown
from fields import field_list

PACKAGES = {
    "opt_stack": "get_optimizer, its plan and the optimizer",
    "opt_distributed": "layouts, buffers and the sharded step",
    "opt_checkpoint": "sharded checkpoints",
    "opt_kernels": "drop-in optimizers, rules and hooks",
    "opt_paramgroups": "parameter groups",
    "opt_scheduler": "schedules",
    "opt_config": "configuration",
}
FENCE = "`" * 6
MOST_PARAMETERS = 24  # of a signature that is written out; the fields of a longer one have a page of their own


def write(folder: Path) -> None:
    """Write `index.md` and a page for each package."""
    rows = "\n".join(f"| [{name}]({name}.md) | {about} |" for name, about in PACKAGES.items())
    toc = "\n".join(PACKAGES)
    (folder / "index.md").write_text(
        "# API reference\n\nEvery public name, from its docstring. All of them can be imported from the top of their "
        f"package.\n\n| package | what is in it |\n|---|---|\n{rows}\n\n```{{toctree}}\n:hidden:\n\n{toc}\n```\n"
    )
    for name in PACKAGES:
        (folder / f"{name}.md").write_text(page(name))


def public_names(package: str) -> list[str]:
    """The names that can be imported from the top of `package`."""
    module = importlib.import_module(package)
    listed = getattr(module, "__all__", None) or importlib.import_module(f"{package}.public").__all__
    return sorted(listed, key=str.casefold)


def page(package: str) -> str:
    module = importlib.import_module(package)
    names = public_names(package)
    parts = [f"# {package}\n\n{markdown(module.__doc__)}\n", f"```{{py:module}} {package}\n```\n"]
    kinds = {"Classes": inspect.isclass, "Functions": callable, "Values": lambda value: True}
    for title, is_kind in kinds.items():
        chosen = [name for name in names if is_kind(getattr(module, name))]
        names = [name for name in names if name not in chosen]
        if chosen:
            parts.append(f"## {title}\n")
            parts += [entry(module, name) for name in chosen]
    return "\n".join(parts)


def entry(module: ModuleType, name: str) -> str:
    """The directive of one public name."""
    value = getattr(module, name)
    if inspect.isclass(value):
        bases = ", ".join(f"`{base.__name__}`" for base in value.__bases__ if base is not object)
        text = "\n\n".join([text_of(value), fields_section(value), f"Bases: {bases}" if bases else ""])
        body = "\n\n".join([text, *(member(*found) for found in members(value))])
        return directive("exception" if issubclass(value, Exception) else "class", name + signature(value), body)
    if callable(value) and hasattr(value, "__name__"):
        return directive("function", name + signature(value), text_of(value))
    return directive("data", name, "")


def text_of(value: Any) -> str:
    """Its docstring as Markdown. A class without one of its own has none: not that of `dict` or `ValueError`."""
    own = value.__dict__.get("__doc__") if inspect.isclass(value) else inspect.getdoc(value)
    is_generated = inspect.isclass(value) and own and own.startswith(f"{value.__name__}(")  # dataclass writes this
    return "" if is_generated else markdown(own)


def fields_section(kind: type) -> str:
    """The documented fields of a class as a list; empty if there are none."""
    lines = field_list(kind)
    return "\n".join(["**Fields**", "", *lines]) if lines else ""


def members(kind: type) -> Iterator[tuple[str, Any]]:
    """Public methods and properties with docstrings; of bases, those that have no entry of their own."""
    package = kind.__module__.partition(".")[0]
    seen: set[str] = set()
    for base in kind.__mro__:
        is_ours = base.__module__.partition(".")[0] in PACKAGES
        if not is_ours or (base is not kind and base.__name__ in public_names(package)):
            continue
        for name, value in vars(base).items():
            plain = value.__func__ if isinstance(value, classmethod | staticmethod) else value
            if name in seen or name.startswith("_") or not getattr(plain, "__doc__", None):
                continue
            if inspect.isfunction(plain) or isinstance(plain, property):
                seen.add(name)
                yield name, value


def member(name: str, value: Any) -> str:
    if isinstance(value, property):
        return directive("property", name, markdown(value.__doc__), fence=FENCE[:-1])
    is_bound = isinstance(value, classmethod | staticmethod)
    plain = value.__func__ if is_bound else value
    options = ":classmethod:" if isinstance(value, classmethod) else ":staticmethod:" if is_bound else ""
    skip_first = not isinstance(value, staticmethod)
    text = name + signature(plain, skip_first=skip_first)
    return directive("method", text, markdown(plain.__doc__), options=options, fence=FENCE[:-1])


def directive(kind: str, head: str, body: str, *, options: str = "", fence: str = FENCE) -> str:
    return "\n".join([f"{fence}{{py:{kind}}} {head}", *([options] if options else []), "", body, fence, ""])


def signature(value: Any, *, skip_first: bool = False) -> str:
    """Its parameters and defaults in parentheses, without annotations, which would not fit."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = list(found.parameters.values())[1 if skip_first else 0 :]
    if len(parameters) > MOST_PARAMETERS:
        return "(...)"
    shown = [p.replace(annotation=p.empty, default=_shown(p.default)) for p in parameters]
    return str(inspect.Signature(shown))


class _Text:
    """A default that prints as the given text."""

    def __init__(self, text: str) -> None:
        self.text = text

    def __repr__(self) -> str:
        return self.text


def _shown(default: Any) -> Any:
    """The source text of a default value; `...` if its repr is not valid source."""
    if default is inspect.Parameter.empty:
        return default
    text = repr(default)
    if inspect.isclass(default) or inspect.isfunction(default):
        text = default.__qualname__
    return _Text(text if re.fullmatch(r"[\w.\-+'\"(), ]{1,48}", text) else "...")
