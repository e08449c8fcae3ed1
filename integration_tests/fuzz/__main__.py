"""Runs cases of the composition fuzz: `python -m fuzz 17`, `python -m fuzz 0 5000`; see the package."""

import argparse
import ast
import dataclasses
import sys
import time
from typing import Any

from fuzz.cases import Case
from fuzz.drawing import draw
from fuzz.running import failures, report


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m fuzz", description=__doc__)
    parser.add_argument("first", type=int, help="the seed, or the first of several")
    parser.add_argument("stop", type=int, nargs="?", help="the seed after the last")
    parser.add_argument("--set", action="append", default=[], metavar="FIELD=VALUE", help="change a field of the case")
    parser.add_argument("--params", help="keep only these parameters, as p0,p3")
    asked = parser.parse_args()
    seeds = range(asked.first, asked.stop or asked.first + 1)
    began, failed = time.perf_counter(), 0
    for seed in seeds:
        case = _changed(draw(seed), asked.set, asked.params)
        found = failures(case)
        failed += bool(found)
        if found:
            print(report(case, found), flush=True)
    print(f"{len(seeds)} cases, {failed} failed, {time.perf_counter() - began:.1f} s")
    return min(failed, 1)


def _changed(case: Case, changes: list[str], params: str | None) -> Case:
    for change in changes:
        path, value = change.split("=", 1)
        case = _with(case, path.split("."), _read(value))
    if params is None:
        return case
    kept = params.split(",")
    return dataclasses.replace(
        case,
        params=tuple(param for param in case.params if param.name in kept),
        skips=tuple(skip for skip in case.skips if skip.param in kept),
        bad=tuple(bad for bad in case.bad if bad.param in kept),
        overrides=case.overrides and tuple(own for own in case.overrides if own[0] in kept),
    )


def _with(value: Any, path: list[str], new: Any) -> Any:
    """A frozen value with the field at `path` replaced."""
    first, *rest = path
    return dataclasses.replace(value, **{first: _with(getattr(value, first), rest, new) if rest else new})


def _read(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (SyntaxError, ValueError):
        return text


if __name__ == "__main__":
    sys.exit(main())
