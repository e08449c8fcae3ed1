"""Every tensor that a package makes has its dtype and device written down: none follows the caller's defaults."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
MAKERS = frozenset({
    "arange", "as_tensor", "asarray", "empty", "empty_strided", "eye", "full", "linspace", "logspace", "normal", "ones",
    "rand", "randint", "randn", "randperm", "scalar_tensor", "tensor", "tril_indices", "triu_indices", "zeros",
})  # fmt: skip


def undeclared(source: str) -> list[int]:
    """The lines that make a tensor without a dtype or device, or choose between two numbers by `torch.where`."""
    lines = []
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr="where"), args=[_, first, second]):
                if is_number(first) and is_number(second):
                    lines.append(node.lineno)
            case ast.Call(func=ast.Attribute(value=ast.Name("torch"), attr=name), keywords=keywords) if name in MAKERS:
                if not {"dtype", "device"} <= {keyword.arg for keyword in keywords}:
                    lines.append(node.lineno)
    return lines


def is_number(node: ast.expr) -> bool:
    return isinstance(node.operand if isinstance(node, ast.UnaryOp) else node, ast.Constant)


def test_no_tensor_of_ours_follows_the_callers_defaults() -> None:
    """With bfloat16 as the default dtype, step counts stopped at 256."""
    files = sorted(ROOT.glob("packages/*/src/**/*.py"))
    assert not [f"{file.relative_to(ROOT)}:{line}" for file in files for line in undeclared(file.read_text())]


def test_tensors_without_a_dtype_or_device_are_found() -> None:
    found = "torch.zeros(3)\ntorch.full((), 1.0, dtype=d)\ntorch.tensor(x, device=c)\ntorch.where(x, -1.0, 2)\n"
    others = "torch.zeros(3, dtype=d, device=c)\ntorch.where(x, 1.0, y)\ntorch.where(x)\ntorch.zeros_like(x)\n"
    assert undeclared(found + others) == [1, 2, 3, 4]
