"""Plant faults in a copy of the packages, and name those that the default tests do not notice.

    python integration_tests/project/plant_faults.py --seed 1 --count 100 --jobs 2

Fault number i of a seed is the same in every run on one tree: an operator, a constant, a statement, an argument, a
condition or a slice of a file drawn by its size. A first run of all tests records which test files call which functions
of the packages, how long they take and what passes. Then each fault meets the files that call the changed function,
then those that call others of its module, the quickest first, until a test fails that passes without the fault.
Survivors meet all other tests at the end.

What was found is kept in the folder `--record`, and a run continues where the last one ended; delete the folder when
sources or tests have changed. Read what survives: some faults change nothing that anybody could see; each other one is
a test that is missing. Exit status 1 if fewer than 70 of 100 are noticed, which is less than chance explains: 93 of 116
drawn afresh were.
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
from collections import defaultdict
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from queue import SimpleQueue
from typing import Any

ROOT = Path(__file__).parents[2]
NEEDED = 0.7
FOLDERS = ("packages/*/tests", "kernels/tests", "integration_tests")
CHUNK_S = 30  # of tests that one process runs, as recorded
CALLERS_S = 240  # of tests that call the module, for one fault; the others come with the rest
HANGS = "a run that does not end"
_PAIRS = [(ast.Lt, ast.LtE), (ast.Gt, ast.GtE), (ast.Eq, ast.NotEq), (ast.Is, ast.IsNot), (ast.In, ast.NotIn)]
COMPARED: dict[Any, Any] = dict([*_PAIRS, *((b, a) for a, b in _PAIRS)])
COMPUTED: dict[Any, Any] = {
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
        case ast.If(test=test) | ast.While(test=test) | ast.IfExp(test=test) if "TYPE_CHECKING" not in ast.unparse(
            test
        ):
            yield "negated condition", ast.UnaryOp(ast.Not(), test)
        case ast.Slice(lower=lower, upper=upper) if lower is not None or upper is not None:
            edge = "upper" if upper is not None else "lower"
            setattr(new, edge, ast.BinOp(getattr(new, edge), ast.Sub() if upper else ast.Add(), ast.Constant(1)))
            yield "slice", new


def _can_swap(call: ast.Call) -> bool:
    name = getattr(call.func, "attr", getattr(call.func, "id", ""))
    same = ast.dump(call.args[0]) == ast.dump(call.args[1])
    return not same and name not in SYMMETRIC and not any(isinstance(arg, ast.Starred) for arg in call.args)


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
    lines = [0, *accumulate(len(line.encode()) for line in source.splitlines(keepends=True))]
    text = source.encode()
    found = []
    for node in runtime_nodes(ast.parse(source)):
        for kind, new in changes(node):
            at = node.test if kind == "negated condition" else node  # type: ignore[attr-defined]
            start = lines[at.lineno - 1] + at.col_offset
            end = lines[at.end_lineno - 1] + at.end_col_offset
            changed = ast.unparse(ast.fix_missing_locations(new))
            after = changed if isinstance(new, ast.stmt | ast.Slice | ast.Constant) else f"({changed})"
            found.append(Fault(file, at.lineno, kind, start, end, text[start:end].decode(), after))
    return found


def planted(source: str, fault: Fault) -> str:
    text = source.encode()
    return (text[: fault.start] + fault.after.encode() + text[fault.end :]).decode()


def draw(root: Path, seed: int, number: int) -> Fault:
    """Fault `number` of a seed: a file by its size, then a kind, then a place."""
    random_ = random.Random(f"{seed}/{number}")
    files = sorted(root.glob("packages/*/src/**/*.py"))
    while True:
        (path,) = random_.choices(files, weights=[file.stat().st_size for file in files])
        by_kind = defaultdict(list)
        for fault in faults_in(path.read_text(), str(path.relative_to(root))):
            by_kind[fault.kind].append(fault)
        if by_kind:
            return random_.choice(by_kind[random_.choice(sorted(by_kind))])


class Calls:
    """What the tests of a tree call, as `called_functions` recorded it."""

    def __init__(self, lines: Iterable[str]):
        self.seconds: dict[str, float] = defaultdict(float)  # of each test file
        self.passed: set[str] = set()
        self.callers: dict[str, dict[str, set[int]]] = defaultdict(lambda: defaultdict(set))  # module, test: functions
        for line in lines:
            test, kind, value = line.rstrip("\n").split("\t")
            if kind == "took":
                self.seconds[test] += float(value)
            elif kind == "passed":
                self.passed.add(value)
            else:
                module, _, first_line = value.partition("::")
                self.callers[module][test].add(int(first_line))

    def order(self, fault: Fault, function: int) -> tuple[list[str], list[str]]:
        """Test files: those that call the function or its module, those that most likely notice first; and the rest."""
        called = self.callers.get(fault.file, {})

        def cost(test: str) -> tuple[bool, float]:
            return function > 0 and function not in called[test], (1 + self.seconds[test]) / len(called[test])

        near = sorted(called, key=cost)
        until = 0
        taken = 0.0
        while until < len(near) and taken < CALLERS_S:
            taken += self.seconds[near[until]]
            until += 1
        others = sorted(self.seconds.keys() - called.keys(), key=lambda test: self.seconds[test])
        return near[:until], near[until:] + others

    def chunks(self, tests: list[str]) -> Iterator[tuple[list[str], float]]:
        """The tests in runs of about `CHUNK_S` seconds, each with its seconds."""
        chunk: list[str] = []
        for test in tests:
            chunk.append(test)
            if (seconds := sum(self.seconds[one] for one in chunk)) > CHUNK_S or test is tests[-1]:
                yield chunk, seconds
                chunk = []


def function_at(source: str, line: int) -> int:
    """The first line of the innermost function around a line, with its decorators; 0 outside of functions."""
    found = 0
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            first = min(part.lineno for part in (node, *node.decorator_list))
            if first <= line <= (node.end_lineno or first):
                found = max(found, first)
    return found


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
        self._passes: dict[str, bool] = {}

    def record_calls(self, folder: Path, jobs: int) -> None:
        """Run the default tests once; takes about twice as long as without recording."""
        folder.mkdir(parents=True)
        tests = [str(path.relative_to(self.root)) for pattern in FOLDERS for path in self.root.glob(pattern)]
        self._run("-p", "called_functions", "-n", str(jobs), "--dist", "loadfile", *tests, RECORD_CALLS=str(folder))

    def noticed_by(self, fault: Fault, tests: list[str], calls: Calls) -> str:
        """The first test that fails with the fault and passes without it; empty if there is none."""
        path = self.root / fault.file
        source = path.read_text()
        for chunk, seconds in calls.chunks(tests):
            excepted: list[str] = []  # tests that fail without the fault too
            while True:
                path.write_text(planted(source, fault))
                try:
                    failed = self._first_failure(chunk, excepted, 120 + 6 * seconds)
                finally:
                    path.write_text(source)
                if not failed or failed in excepted:
                    break
                if failed == HANGS or failed in calls.passed or self._passes_alone(failed):
                    return failed
                excepted.append(failed)
        return ""

    def _passes_alone(self, test: str) -> bool:
        if test not in self._passes:
            self._passes[test] = not self._first_failure([test], [], 600)
        return self._passes[test]

    def _first_failure(self, tests: list[str], excepted: list[str], limit_s: float) -> str:
        without = [f"--deselect={test}" if "::" in test else f"--ignore={test}" for test in excepted]
        status, output = self._run("-x", *without, *tests, limit_s=limit_s)
        if status in (0, 5):  # 5: no tests, where all of a chunk run at night only
            return ""
        failures = re.findall(r"^(?:FAILED|ERROR) (\S+\.py(?:::.+?)?)(?: - .*)?$", output, re.MULTILINE)
        return HANGS if status is None else failures[0] if failures else f"exit status {status}"

    def _run(self, *arguments: str, limit_s: float | None = None, **environment: str) -> tuple[int | None, str]:
        """The exit status of pytest, None past the limit; and its output."""
        command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--no-header", "--tb=no"]
        folders = [*sorted(self.root.glob("packages/*/src")), ROOT / "integration_tests" / "project"]
        env = os.environ | environment | {"PYTHONPYCACHEPREFIX": str(self.root / ".bytecode")}
        env["PYTHONPATH"] = os.pathsep.join(map(str, folders))
        pipes: dict[str, Any] = {"stdout": subprocess.PIPE, "stderr": subprocess.STDOUT, "text": True}
        with subprocess.Popen([*command, *arguments], cwd=self.root, env=env, start_new_session=True, **pipes) as run:
            try:
                output, _ = run.communicate(timeout=limit_s)
                return run.returncode, output
            except subprocess.TimeoutExpired:
                os.killpg(run.pid, signal.SIGKILL)
                return None, ""


class Search:
    """Which of the faults are noticed, as far as known."""

    def __init__(self, folder: Path, jobs: int, deadline: float):
        self.deadline = deadline
        self.jobs = jobs
        self._file = folder / "faults.json"
        self.found: dict[str, dict[str, Any]] = json.loads(self._file.read_text()) if self._file.exists() else {}
        self._scratch = tempfile.TemporaryDirectory()
        self._trees: SimpleQueue[Tree] = SimpleQueue()
        trees = [Tree(Path(self._scratch.name, str(number))) for number in range(jobs)]
        if not (calls := folder / "calls.txt").exists():
            print("recording which functions each test file calls", flush=True)
            raw = Path(self._scratch.name, "calls")
            trees[0].record_calls(raw, jobs)
            calls.write_text("".join(sorted({line for file in raw.glob("*.calls") for line in file.open()})))
        self.calls = Calls(calls.open())
        for tree in trees:
            self._trees.put(tree)

    def run(self, faults: list[Fault], *, last: bool) -> None:
        """Run the tests that call the changed module on each fault; or, on what these left, the `last` ones."""
        open_ = [fault for fault in faults if self._is_open(fault, last)]
        with ThreadPoolExecutor(self.jobs) as pool:
            list(pool.map(lambda fault: self._search(fault, last), open_))

    def _is_open(self, fault: Fault, last: bool) -> bool:
        known = self.found.get(str(fault))
        return known is None if not last else known is not None and not known["by"] and not known["all"]

    def _search(self, fault: Fault, last: bool) -> None:
        if (begun := time.monotonic()) > self.deadline:
            return
        tree = self._trees.get()
        near, rest = self.calls.order(fault, function_at((ROOT / fault.file).read_text(), fault.line))
        by = tree.noticed_by(fault, rest if last else near, self.calls)
        self._trees.put(tree)
        self.found[str(fault)] = {"by": by, "all": last, "callers": len(near)}
        self._file.write_text(json.dumps(self.found, indent=1))
        answer = by or ("NOT NOTICED" if last else f"not noticed by {len(near)} files that call its module")
        print(f"{fault}\n    {answer} ({time.monotonic() - begun:.0f} s)", flush=True)

    def report(self, faults: list[Fault]) -> bool:
        """Print the survivors by package; whether too many survived."""
        run = [fault for fault in faults if str(fault) in self.found]
        survivors = sorted((fault for fault in run if not self.found[str(fault)]["by"]), key=lambda fault: fault.file)
        print(f"{len(run) - len(survivors)} of {len(run)} faults noticed; {len(faults) - len(run)} not run")
        for fault in survivors:
            print(f"{'all tests' if self.found[str(fault)]['all'] else 'callers only':13}{fault}")
        return len(run) - len(survivors) < NEEDED * len(run)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    for name, default in {"seed": 0, "count": 100, "jobs": 2}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--minutes", type=float, default=170, help="no fault is begun later than this")
    parser.add_argument("--record", type=Path, default=ROOT / ".nox" / "planted")
    parser.add_argument("--list", action="store_true", help="print the faults, and run nothing")
    options = parser.parse_args()
    faults = [draw(ROOT, options.seed, number) for number in range(options.count)]
    if options.list:
        print(*faults, sep="\n")
        return 0
    options.record.mkdir(parents=True, exist_ok=True)
    search = Search(options.record, options.jobs, time.monotonic() + 60 * options.minutes)
    for last in (False, True):
        search.run(faults, last=last)
        failed = search.report(faults)
    return failed


if __name__ == "__main__":
    sys.exit(main())
