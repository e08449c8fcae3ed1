"""C++ as a language of formulas."""

from opt_kernels.formulas.translate import Dialect


class Cpp(Dialect):
    """Expressions of float. Names of a formula get a prefix, so that none is a keyword of C++."""

    BOTH, EITHER, NEGATION = "({} && {})", "({} || {})", "(!{})"
    CHOICE = "({} ? {} : {})"
    ASSIGNMENT = "x_{} = {};"

    def name(self, name: str) -> str:
        return f"x_{name}"

    def literal(self, value: float) -> str:
        return f"{value!r}f"

    def call(self, function: str, arguments: list[str]) -> str:
        return f"f_{function}({', '.join(arguments)})"

    def branch(self, condition: str, yes: list[str], no: list[str]) -> list[str]:
        otherwise = ["} else {", *no] if no else []
        return [f"if ({condition}) {{", *yes, *otherwise, "}"]


# The tensors of a run, as functions that update its elements need them.
POINTERS = """
MAIN *__restrict main = run.main;
OUT *__restrict out = run.out;
const GRAD *__restrict grad = run.grad;
const uint32_t step = uint32_t(row.step_low) + (uint32_t(row.step_high) << 16);
"""
