"""What a message or a README names can be typed: it exists, and it is importable from the top of a package."""

import ast
import importlib
import pkgutil
import re
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint.state_dict as checkpoint_state_dict
from torch.distributed import fsdp, tensor

ROOT = Path(__file__).parents[2]
SOURCES = sorted(ROOT.glob("packages/*/src/**/*.py"))
PACKAGES = sorted(path.name for path in ROOT.glob("packages/*/src/opt_*"))
# `name(`, dotted.names, CamelCase and snake_case; plain words are prose.
NAME = re.compile(r"[A-Za-z_][\w.]*\w(?=\()|[A-Za-z_]\w*(?:\.[A-Za-z_]\w+)+|\b[A-Z][a-z]+[A-Z]\w*|\b[a-z]+_\w+")
# Where torch's own names are looked up.
TORCH = (torch, torch.nn, torch.nn.Module, torch.Tensor, torch.optim.lr_scheduler, torch.distributed, fsdp, tensor)
TORCH += (checkpoint_state_dict, tensor.DTensor, tensor.parallel)
# Plurals, and names that belong to other projects' files, optimizers and trainers.
ELSEWHERE = """
    NaN ParamKeys ShardedObjects ShardedTensors adjust_lr_fn base_model_chunks checkpoint.ckpt_format
    checkpoint.exclude_from_loading training_step
    data_offsets dp_group_idx_0.gbuf_idx_0.dtype_ dp_reshardable expandable_segments
    flatten_optimizer_state_dict fully_reshardable
    metadata.json my_project.model ns_coefficients parallel_state prepare shard_OFFSET_SHAPE
"""


def messages(tree: ast.AST) -> Iterator[str]:
    """The texts of errors, problems and warnings."""
    for node in ast.walk(tree):
        called = getattr(node.func, "attr", getattr(node.func, "id", "")) if isinstance(node, ast.Call) else ""
        if called in ("warning", "warn") or called.endswith(("Error", "Exception", "Problem")):
            constants = (part.value for part in ast.walk(node) if isinstance(part, ast.Constant))
            yield from (value for value in constants if isinstance(value, str))


@cache
def defined() -> dict[str, set[str]]:
    """`top`: public functions and classes of modules. `inside`: methods, parameters, attributes, keywords and keys."""
    top: set[str] = set()
    inside: set[str] = set()
    for path in SOURCES:
        tree = ast.parse(path.read_text())
        top |= {node.name for node in tree.body if isinstance(node, ast.FunctionDef | ast.ClassDef)}
        for node in ast.walk(tree):
            match node:
                case ast.arg(arg=str(name)) | ast.keyword(arg=str(name)) | ast.Attribute(attr=str(name)):
                    inside.add(name)
                case ast.AnnAssign(target=ast.Name(id=str(name))):
                    inside.add(name)
                case ast.Constant(value=str(name)) if name.isidentifier():
                    inside.add(name)
                case ast.FunctionDef(name=name) if node not in tree.body:
                    inside.add(name)
    return {"top": {name for name in top if not name.startswith("_")}, "inside": inside}


def resolves(dotted: str) -> bool:
    """Whether an absolute dotted name can be imported, regardless of which part of it is a module."""
    try:
        pkgutil.resolve_name(dotted)
    except (ImportError, AttributeError):
        return False
    return True


def problem(name: str) -> str:
    """Why `name` cannot be typed; empty where it can."""
    first = name.split(".")[0]
    last = name.split(".")[-1]
    if first == "torch" or first in PACKAGES:
        return "" if resolves(name) else "cannot be imported"
    if name in ELSEWHERE.split() or any(hasattr(owner, last) for owner in TORCH):
        return ""
    if last in defined()["top"] - defined()["inside"] and first == last:
        modules = [importlib.import_module(package) for package in PACKAGES]
        return "" if any(hasattr(module, last) for module in modules) else "is not at the top of any package"
    known = last in defined()["inside"] or resolves(name)
    return "" if known else "is not a name of the source"


@pytest.mark.parametrize("package", PACKAGES)
def test_every_name_in_a_message_can_be_typed(package: str) -> None:
    named = {
        (name, path.name)
        for path in SOURCES
        if package in path.parts
        for text in messages(ast.parse(path.read_text()))
        for name in NAME.findall(text)
    }
    assert named
    assert {named_in: why for named_in in sorted(named) if (why := problem(named_in[0]))} == {}
    assert all(map(problem, ("no_such_function", "opt_stack.NoSuchName", "torch.optim.NoSuch", "NoSuchClass")))


@pytest.mark.parametrize("package", PACKAGES)
def test_every_public_name_exists(package: str) -> None:
    module = importlib.import_module(package)
    names = getattr(module, "__all__", None) or importlib.import_module(f"{package}.public").__all__
    assert sorted(set(names)) == sorted(names)
    assert [name for name in names if not hasattr(module, name)] == []
