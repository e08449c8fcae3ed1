"""Names of modules without the parts that wrappers add, and the names that earlier versions gave instead.

A wrapper is recognised by its class, so that a module of a model that is called `module` or `_orig_mod` keeps its name.
"""

from __future__ import annotations

import re
import sys
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import NamedTuple

from torch import nn
from torch.nn.parallel import DataParallel, DistributedDataParallel

from opt_checkpoint.errors import CheckpointValueError

# Wrappers by module and class, which exist only once their module is imported: the name of the module inside, and
# whether it is a part of the names in the state dict.
_LATER = (
    ("torch._dynamo.eval_frame", "OptimizedModule", "_orig_mod", True),
    ("torch.distributed.fsdp.fully_sharded_data_parallel", "FullyShardedDataParallel", "_fsdp_wrapped_module", False),
    (
        "torch.distributed.algorithms._checkpoint.checkpoint_wrapper",
        "ActivationWrapper",
        "_checkpoint_wrapped_module",
        False,
    ),
)


class NamedModule(NamedTuple):
    """A module of a model.

    Args:
        module: it.
        path: its name among the modules, with a dot at the end unless it is empty; so are the others.
        key: its name in the state dict.
        name: its name without wrappers.
    """

    module: nn.Module
    path: str
    key: str
    name: str


def named_modules(module: nn.Module, path: str = "", key: str = "", name: str = "") -> Iterator[NamedModule]:
    """Yield all modules of a model, a wrapper before what it wraps. A module that is used twice is yielded twice."""
    yield NamedModule(module, path, key, name)
    wrapped, is_in_keys = _wrapped_child(module)
    for child_name, child in module._modules.items():
        if child is None:
            continue
        part = f"{child_name}."
        if child_name == wrapped:
            yield from named_modules(child, path + part, key + part if is_in_keys else key, name)
        else:
            yield from named_modules(child, path + part, key + part, name + part)


def _wrapped_child(module: nn.Module) -> tuple[str | None, bool]:
    """The name of the module that a wrapper contains, and whether it is in the state dict; None for other modules."""
    if isinstance(module, DistributedDataParallel | DataParallel):
        return "module", True
    for place, class_name, child_name, is_in_keys in _LATER:
        if isinstance(module, getattr(sys.modules.get(place), class_name, ())):
            return child_name, is_in_keys
    # As ours and Megatron-Core's, whose state dict is that of the module inside.
    names = [*module._parameters, *module._buffers, *module._modules]
    if type(module).state_dict is not nn.Module.state_dict and len(names) == len(module._modules) == 1:
        child = module._modules[names[0]]
        is_same = child is not None and module.state_dict(keep_vars=True).keys() == child.state_dict().keys()
        return (names[0] if is_same else None), False
    return None, False


def named_parameters(modules: Iterable[NamedModule]) -> dict[str, nn.Parameter]:
    """Return the parameters of a model by their names without wrappers; a tied one has several.

    Raises:
        CheckpointingException: two parameters would have one name.
    """
    params: dict[str, nn.Parameter] = {}
    paths: dict[str, str] = {}
    for module, path, _, prefix in modules:
        for last, param in module._parameters.items():
            name = f"{prefix}{last}"
            if param is not None and params.setdefault(name, param) is not param:
                raise _two_of_one_name(paths[name], f"{path}{last}", name)
            paths.setdefault(name, f"{path}{last}")
    return params


def _two_of_one_name(first: str, second: str, name: str) -> CheckpointValueError:
    return CheckpointValueError(f"{first} and {second} would both be stored as {name}; rename one module")


def plain_names(modules: Collection[NamedModule], keys: Collection[str]) -> dict[str, str]:
    """Map keys of a state dict to names without wrappers.

    Args:
        modules: of the model, from `named_modules`.
        keys: in its state dict.

    Raises:
        CheckpointingException: two keys would become one name.
    """
    prefixes = {module.key: module.name for module in modules}
    found: dict[str, str] = {}
    for key in keys:
        ends = [0, *(at + 1 for at, letter in enumerate(key) if letter == ".")]
        end = next(end for end in reversed(ends) if key[:end] in prefixes)
        name = prefixes[key[:end]] + key[end:]
        if name in found:
            raise _two_of_one_name(found[name], key, name)
        found[name] = key
    return {key: name for name, key in found.items()}


_PARTS = re.compile(r"_orig_mod\.|_fsdp_wrapped_module\.|_checkpoint_wrapped_module\.")


def former_names(names: Collection[str], is_stored: Callable[[str], bool]) -> dict[str, str]:
    """Return the names that versions up to 0.1 gave to tensors of a model, as far as they are stored and the names are
    not.

    These versions removed `module.` from models in which every name began with it, kept the one of
    `torch.compile(DistributedDataParallel(model))`, and removed the names that wrappers use wherever they stood.

    Args:
        names: of all tensors of the model, or of their states of one kind.
        is_stored: whether something is stored under a name.
    """
    every = set(names)
    if all(map(is_stored, every)):
        return {}
    is_in_module = all(name.startswith("module.") for name in every)
    for bare in ({name: name for name in every}, {name: _PARTS.sub("", name) for name in every}):
        forms = [bare, {name: f"module.{old}" for name, old in bare.items()}]
        if is_in_module:
            forms.append({name: old.removeprefix("module.") for name, old in bare.items()})
        for form in forms:
            changed = {name: old for name, old in form.items() if old != name}
            is_former = not any(map(is_stored, changed)) and every.isdisjoint(changed.values())
            if is_former and (found := {name: old for name, old in changed.items() if is_stored(old)}):
                return found
    return {}
