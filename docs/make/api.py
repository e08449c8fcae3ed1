"""The API reference: an index by task, a page for each package, and one for each of its public names."""

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
# What a user wants to do, and the names that do it, the most important first.
TASKS = {
    "Build an optimizer": {
        "opt_stack": "get_optimizer OptimizerConfig Optimizer list_optimizers describe_optimizer",
        "opt_kernels": "AdamW Muon Lion SOAP",
    },
    "Choose what differs for some parameters": {
        "opt_stack": "ParamKey",
        "opt_paramgroups": "get_param_groups get_standard_config_overrides get_matrix_rule_overrides describe",
    },
    "Train on several ranks": {
        "opt_stack": "DistributedDataParallel DistributedDataParallelConfig ProcessGroups",
        "opt_distributed": "flat_layout whole_layout",
    },
    "Schedule learning rates and weight decay": {
        "opt_scheduler": "cosine wsd warmup extend get_schedule FieldScheduler OptimizerParamScheduler",
    },
    "Save and resume": {
        "opt_checkpoint": "CheckpointManager save load sharded_model sharded_optimizer load_optimizer",
    },
    "Find out why a run diverged": {"opt_stack": "why StepStats TensorStats SkippedStepWarning"},
    "Need less memory": {"opt_stack": "release_gradients"},
    "Change a rule, or write one": {
        "opt_kernels": "Formula drop_in CautiousDecay ClipUpdateRms",
        "opt_stack": "Registry RuleEntry torch_rule QKClip",
    },
    "Read configurations from files": {"opt_config": "load_config resolved ConfigError"},
}
FENCE = "`" * 6
MOST_PARAMETERS = 24  # of a signature that is written out; the fields of a longer one have a page of their own


def write(folder: Path) -> None:
    """Write `index.md`, a page for each package, and `PACKAGE/NAME.md` for each of its public names."""
    parts = ["# API reference\n", "Names by task. All of them can be imported from the top of their package.\n"]
    for task, names_of in TASKS.items():
        parts += [f"## {task}\n", "| name | |", "|---|---|"]
        parts += [_row(package, name) for package, names in names_of.items() for name in names.split()]
        parts.append("")
    parts += ["## All names\n", "| package | what is in it |", "|---|---|"]
    parts += [f"| [{name}]({name}.md) | {about} |" for name, about in PACKAGES.items()]
    parts += ["", "```{toctree}\n:hidden:\n", *PACKAGES, "```\n"]
    (folder / "index.md").write_text("\n".join(parts))
    for package in PACKAGES:
        module = importlib.import_module(package)
        (folder / f"{package}.md").write_text(page(module))
        (folder / package).mkdir(exist_ok=True)
        for name in public_names(package):
            text = f"---\norphan: true\n---\n\n# {name}\n\n```{{py:currentmodule}} {package}\n```\n\n"
            example = first_example(module, name)
            described = entry(module, name)
            text += example + (described.replace(example, "", 1) if example else described)
            (folder / package / f"{_file(package, name)}.md").write_text(text)


def _file(package: str, name: str) -> str:
    """The name of its page; names that differ in case only (`Restarts`, `restarts`) need two files everywhere."""
    clash = name != name.lower() and name.lower() in public_names(package)
    return f"{name}-class" if clash else name


def _row(package: str, name: str, *, of_package: bool = False) -> str:
    value = getattr(importlib.import_module(package), name)
    first = text_of(value) if callable(value) else ""
    sentence = " ".join(first.partition("\n\n")[0].split())
    sentence = re.split(r"(?<=[.:]) (?=[A-Z`])", sentence)[0]
    home = "" if of_package else f" (`{package}`)"
    return f"| [`{name}`]({package}/{_file(package, name)}.md) | {sentence}{home} |"


def public_names(package: str) -> list[str]:
    """The names that can be imported from the top of `package`."""
    module = importlib.import_module(package)
    listed = getattr(module, "__all__", None) or importlib.import_module(f"{package}.public").__all__
    return sorted(listed, key=str.casefold)


def page(module: ModuleType) -> str:
    """The page of a package: its names by kind, each with its first sentence."""
    package = module.__name__
    names = public_names(package)
    parts = [f"# {package}\n\n{markdown(module.__doc__)}\n", f"```{{py:module}} {package}\n```\n"]
    kinds = {"Functions": inspect.isfunction, "Classes": inspect.isclass, "Values": lambda value: True}
    for title, is_kind in kinds.items():
        chosen = [name for name in names if is_kind(getattr(module, name))]
        names = [name for name in names if name not in chosen]
        if chosen:
            parts += [f"## {title}\n", "| name | |", "|---|---|"]
            parts += [*(_row(package, name, of_package=True) for name in chosen), ""]
    return "\n".join(parts)


def entry(module: ModuleType, name: str) -> str:
    """The directive of one public name, or a link to its entry in the package that it comes from."""
    value = getattr(module, name)
    home = (getattr(value, "__module__", None) or module.__name__).partition(".")[0]
    if home != module.__name__ and home in PACKAGES and name in public_names(home):
        return f"The same as [`{home}.{name}`](../{home}/{_file(home, name)}.md).\n"
    if inspect.isclass(value):
        bases = ", ".join(f"`{base.__name__}`" for base in value.__bases__ if base is not object)
        text = "\n\n".join([text_of(value), fields_section(value), f"Bases: {bases}" if bases else ""])
        body = "\n\n".join([text, *(member(*found) for found in members(value))])
        return directive("exception" if issubclass(value, Exception) else "class", name + signature(value), body)
    if callable(value) and hasattr(value, "__name__"):
        return directive("function", name + signature(value), text_of(value))
    return directive("data", name, "")


LONG = 200  # characters of a signature that push the example of its docstring far down


def first_example(module: ModuleType, name: str) -> str:
    """The first example of a function with a long signature, for the top of its page; empty if it has none."""
    value = getattr(module, name)
    is_ours = getattr(value, "__module__", "").partition(".")[0] == module.__name__
    if not (inspect.isfunction(value) and is_ours and len(signature(value)) > LONG):
        return ""
    example = re.search(r"^```pycon\n.*?^```\n", text_of(value), re.DOTALL | re.MULTILINE)
    return f"{example[0]}\n" if example else ""


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
    """Its parameters with types and defaults in parentheses, and what it returns."""
    try:
        found = inspect.signature(value)
    except (TypeError, ValueError):
        return ""
    parameters = list(found.parameters.values())[1 if skip_first else 0 :]
    if len(parameters) > MOST_PARAMETERS:
        return "(...)"
    shown = [p.replace(annotation=_annotation(p.annotation), default=_shown(p.default)) for p in parameters]
    returns = found.empty if inspect.isclass(value) else _annotation(found.return_annotation)
    return str(inspect.Signature(shown, return_annotation=returns))


def _annotation(annotation: Any) -> Any:
    """A type without the modules that it comes from."""
    if annotation is inspect.Parameter.empty:
        return annotation
    text = annotation if isinstance(annotation, str) else inspect.formatannotation(annotation)
    text = re.sub(r"\b(?:[A-Za-z_]\w*\.)+(?=[A-Za-z_])", "", text.replace("NoneType", "None"))
    # Sphinx reads annotations as Python: an address or a marker such as <factory> is not.
    return _Text(text if re.fullmatch(r"[\w\[\], |.'\"*-]+", text) else "...")


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
