"""Plant faults in a copy of the packages, and name those that the default tests do not notice.

    python integration_tests/project/plant_faults.py --count 100 --seed 7 --minutes 170 --record .nox/planted.json

Fault number i of a seed is the same in every run on one tree: an operator, a constant, a statement, an argument, a
condition or a slice of a file drawn by its size. Tests run from the narrowest: those of the package that name the
module, the rest of the package's, those of other packages that name it, everything else. A test that fails without the
fault too does not count. Faults that `--record` has are not run again, so that a run continues where the last one
ended. Exit status 1 if fewer than 95 of 100 are noticed.
"""

import argparse
import ast
import copy
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from naming import default_tests, named_in, names_of

ROOT = Path(__file__).parents[2]
NEEDED = 0.95
STAGE_S = 1500
HANGS = "a run that does not end"
COMPARED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.LtE,
    ast.LtE: ast.Lt,
    ast.Gt: ast.GtE,
    ast.GtE: ast.Gt,
    ast.Eq: ast.NotEq,
    ast.NotEq: ast.Eq,
    ast.Is: ast.IsNot,
    ast.IsNot: ast.Is,
    ast.In: ast.NotIn,
    ast.NotIn: ast.In,
}
COMPUTED: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub,
    ast.Sub: ast.Add,
    ast.Mult: ast.Div,
    ast.Div: ast.Mult,
    ast.FloorDiv: ast.Mod,
    ast.Mod: ast.FloorDiv,
    ast.Pow: ast.Mult,
    ast.BitOr: ast.BitAnd,
    ast.BitAnd: ast.BitOr,
}
SYMMETRIC = {"max", "min", "isinstance", "issubclass", "getattr", "hasattr", "setattr", "cast", "TypeVar", "equal"}


@dataclass(frozen=True)
class Fault:
    """A change of the source text between two offsets."""

    file: str  # relative to the root of the repository
    line: int
    kind: str
    start: int
    end: int
    before: str
    after: str

    def __str__(self) -> str:
        before, after = (" ".join(text.split()) for text in (self.before, self.after))
        return f"{self.file}:{self.line} {self.kind}: {before}  ->  {after}"


def changes(node: ast.AST) -> Iterator[tuple[str, ast.AST]]:
    """The kinds of faults that a node may have, with the changed node."""
    new = copy.deepcopy(node)
    match new:
        case ast.Compare(ops=[op]) if type(op) in COMPARED:
            new.ops = [COMPARED[type(op)]()]
            yield "comparison", new
        case ast.BinOp(op=op) if type(op) in COMPUTED and not isinstance(new.left, ast.Constant | ast.JoinedStr):
            new.op = COMPUTED[type(op)]()
            yield "arithmetic", new
        case ast.Constant(value=value) if type(value) is int:
            for by in (1, -1):
                yield "constant", ast.Constant(value + by)
        case ast.Expr(value=ast.Call()) | ast.AugAssign() | ast.Raise():
            yield "dropped statement", ast.Pass()
        case ast.Assign(targets=[ast.Attribute() | ast.Subscript()]):
            yield "dropped statement", ast.Pass()
        case ast.Call(args=[first, second, *rest]) if _can_swap(new):
            new.args = [second, first, *rest]
            yield "swapped arguments", new
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if not _types_only(test):
            yield "negated condition", ast.UnaryOp(ast.Not(), test)
        case ast.Slice(lower=lower, upper=upper) if lower is not None or upper is not None:
            edge = "upper" if upper is not None else "lower"
            setattr(new, edge, ast.BinOp(getattr(new, edge), ast.Sub() if upper else ast.Add(), ast.Constant(1)))
            yield "slice", new


def _can_swap(call: ast.Call) -> bool:
    name = call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")
    same = ast.dump(call.args[0]) == ast.dump(call.args[1])
    return not same and name not in SYMMETRIC and not any(isinstance(arg, ast.Starred) for arg in call.args)


def _types_only(test: ast.expr) -> bool:
    return "TYPE_CHECKING" in ast.unparse(test)


def runtime_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """The nodes that are evaluated: no annotations; no f-strings, whose nodes have no exact positions."""
    for name, value in ast.iter_fields(tree):
        if name in ("annotation", "returns", "decorator_list", "type_params"):
            continue
        for child in value if isinstance(value, list) else [value]:
            if isinstance(child, ast.AST) and not isinstance(child, ast.JoinedStr):
                yield child
                yield from runtime_nodes(child)


def faults_in(source: str, file: str) -> list[Fault]:
    """All faults of a file."""
    lines = [0]
    for line in source.splitlines(keepends=True):
        lines.append(lines[-1] + len(line.encode()))
    text, found = source.encode(), []
    for node in runtime_nodes(ast.parse(source)):
        for kind, new in changes(node):
            at = node.test if kind == "negated condition" else node  # type: ignore[attr-defined]
            start, end = lines[at.lineno - 1] + at.col_offset, lines[at.end_lineno - 1] + at.end_col_offset
            changed = ast.unparse(ast.fix_missing_locations(new))
            after = changed if isinstance(new, ast.stmt | ast.Slice | ast.Constant) else f"({changed})"
            found.append(Fault(file, at.lineno, kind, start, end, text[start:end].decode(), after))
    return found


def planted(source: str, fault: Fault) -> str:
    text = source.encode()
    return (text[: fault.start] + fault.after.encode() + text[fault.end :]).decode()


def draw(root: Path, seed: int, number: int, package: str = "*") -> Fault:
    """Fault `number` of a seed: a file by its size, then a kind, then a place."""
    random_ = random.Random(f"{seed}/{number}")
    files = sorted(root.glob(f"packages/{package}/src/**/*.py"))
    while True:
        (path,) = random_.choices(files, weights=[file.stat().st_size for file in files])
        by_kind: dict[str, list[Fault]] = {}
        for fault in faults_in(path.read_text(), str(path.relative_to(root))):
            by_kind.setdefault(fault.kind, []).append(fault)
        if by_kind:
            return random_.choice(by_kind[random_.choice(sorted(by_kind))])


def stages(root: Path, fault: Fault) -> list[list[str]]:
    """The files of default tests, from those that most likely notice the fault to all the rest."""
    package, names = Path(fault.file).parts[1], names_of(root / fault.file)
    ordered: list[list[str]] = [[], [], [], []]
    for test in default_tests(root):
        is_far = not test.startswith(f"packages/{package}/")
        ordered[2 * is_far + names.isdisjoint(named_in(root / test))].append(test)
    return [stage for stage in ordered if stage]


def copied_files(root: Path) -> list[str]:
    """The files of the repository that git does not ignore."""
    listed = ["git", "ls-files", "--cached", "--others", "--exclude-standard"]
    return subprocess.run(listed, cwd=root, capture_output=True, text=True, check=True).stdout.splitlines()


class Tree:
    """A copy of the repository in which faults are planted."""

    def __init__(self, folder: Path):
        self.root = folder
        for file in copied_files(ROOT):
            if (ROOT / file).is_file():
                (folder / file).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / file, folder / file)
        self._fails_without: dict[str, bool] = {}

    def noticed_by(self, fault: Fault) -> str:
        """The first test that fails with the fault and passes without it; empty if there is none."""
        path = self.root / fault.file
        source = path.read_text()
        for stage in stages(self.root, fault):
            excepted: list[str] = []  # tests that fail without the fault too
            while True:
                path.write_text(planted(source, fault))
                try:
                    failed = self._first_failure(stage, excepted)
                finally:
                    path.write_text(source)
                if not failed or failed in excepted:
                    break
                if self._passes(failed):
                    return failed
                excepted.append(failed)
        return ""

    def _passes(self, test: str) -> bool:
        if test == HANGS:
            return True
        if test not in self._fails_without:
            self._fails_without[test] = bool(self._first_failure([test], []))
        return not self._fails_without[test]

    def _first_failure(self, tests: list[str], excepted: list[str]) -> str:
        command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
        command += ["-n", "2", "--dist", "loadfile"] if len(tests) > 20 else []
        command += [f"--deselect={test}" if "::" in test else f"--ignore={test}" for test in excepted]
        sources = os.pathsep.join(str(path) for path in sorted(self.root.glob("packages/*/src")))
        env = os.environ | {"PYTHONPATH": sources, "PYTHONPYCACHEPREFIX": str(self.root / ".bytecode")}
        with subprocess.Popen(
            [*command, *tests],
            cwd=self.root,
            env=env,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        ) as run:
            try:
                output, _ = run.communicate(timeout=STAGE_S)
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)
                return HANGS
        failures = re.findall(r"^(?:FAILED|ERROR) (\S+\.py(?:::.+?)?)(?: - .*)?$", output, re.MULTILINE)
        if run.returncode in (0, 5):  # 5: no tests, where all of a stage run at night only
            return ""
        return failures[0] if failures else f"exit status {run.returncode}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--count", type=int, default=100)
    parser.add_argument("--first", type=int, default=0, help="number of the first fault")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--package", default="*", help="only of packages of this name, which may have a *")
    parser.add_argument("--minutes", type=float, default=170, help="no fault is begun later than this")
    parser.add_argument("--record", type=Path, default=ROOT / ".nox" / "planted_faults.json")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    options = parser.parse_args()
    deadline = time.monotonic() + 60 * options.minutes
    found: dict[str, str] = json.loads(options.record.read_text()) if options.record.exists() else {}
    numbers = range(options.first, options.first + options.count)
    drawn = [draw(ROOT, options.seed, number, options.package) for number in numbers]
    if options.list:
        print(*drawn, sep="\n")
        return 0
    options.record.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        tree = Tree(Path(folder))
        for fault in drawn:
            if str(fault) not in found and time.monotonic() < deadline:
                begun = time.monotonic()
                found[str(fault)] = tree.noticed_by(fault)
                options.record.write_text(json.dumps(found, indent=1))
                answer = found[str(fault)] or "NOT NOTICED"
                print(f"{fault}\n    {answer} ({time.monotonic() - begun:.0f} s)", flush=True)
    run = [str(fault) for fault in drawn if str(fault) in found]
    survivors = [fault for fault in run if not found[fault]]
    print(f"{len(run) - len(survivors)} of {len(run)} faults noticed; {len(drawn) - len(run)} not run")
    print(*survivors, sep="\n")
    return len(run) - len(survivors) < NEEDED * len(run)


if __name__ == "__main__":
    sys.exit(main())
