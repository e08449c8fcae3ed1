"""The command `optsched`: shows schedules as tables and plots."""

import argparse
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields
from pathlib import Path
from typing import Any

from . import closed_form
from .by_name import SCHEDULE_NAMES, get_schedule
from .draw import text_plot
from .errors import ScheduleError, refuse, unknown_name
from .schedule import Schedule
from .settings import LR_STYLES, WD_STYLES, WSD_STYLES, Settings
from .show import rows_to_show, save_png, table

_EPILOG = f"""\
By name:                   optsched plot cosine peak=1e-3 steps=1000 warmup_steps=100
From Megatron-Core flags:  optsched plot --max-lr 1e-3 --lr-warmup-steps 100 --lr-decay-steps 1000
From a file:               optsched table --file run.toml

Names: {", ".join(SCHEDULE_NAMES)}.

A TOML file has one table per schedule: with a name and the arguments of get_schedule, such as
  [lr]
  name = "cosine"
  peak = 1e-3
  steps = 1000
or with a kind, as Schedule.to_dict() writes it. A table [scheduler] has the Megatron-Core flags as keys
(max_lr = 1e-3); flags on the command line override it.
"""

# Values of flags that are not given. The other flags are required.
_DEFAULTS: Mapping[str, Any] = {
    "init_lr": 0.0, "min_lr": 0.0, "lr_warmup_steps": 0.0, "lr_decay_style": "linear",
    "start_wd": 0.0, "end_wd": 0.0, "wd_incr_style": "constant",
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return 0, or 2 with the reason on stderr if the request is invalid."""
    args = _parser().parse_args(argv)
    try:
        schedules = _schedules(args)
        print(_table(schedules, args) if args.command == "table" else _plot(schedules, args), flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at exit
    except (ScheduleError, OSError, tomllib.TOMLDecodeError) as error:
        print(f"optsched: {error}", file=sys.stderr)
        return 2
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="optsched",
        description="Show learning-rate and weight-decay schedules.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", required=True)
    as_table = commands.add_parser("table", help="numbers, one row per step")
    as_table.add_argument("--at", metavar="0,10,20", help="these steps only")
    as_table.add_argument(
        "--rows", type=int, default=11, help="number of rows, in addition to the boundaries (%(default)s)"
    )
    as_plot = commands.add_parser("plot", help="curves in the terminal, or as a PNG")
    as_plot.add_argument("--png", type=Path, help="write a PNG; needs opt-scheduler[plot]")
    as_plot.add_argument("--steps", type=float, help="last step; by default a little past the end")
    as_plot.add_argument("--width", type=int, default=72, help="characters (%(default)s)")
    as_plot.add_argument("--height", type=int, default=14, help="lines (%(default)s)")
    for command in (as_table, as_plot):
        _add_settings(command)
    return parser


def _add_settings(command: argparse.ArgumentParser) -> None:
    command.add_argument(
        "schedule", nargs="*", metavar="NAME KEY=VALUE", help="a schedule by name and its arguments, see optsched -h"
    )
    command.add_argument("--file", type=Path, help="a TOML file, see optsched -h")
    choices = {"lr_decay_style": LR_STYLES, "lr_wsd_decay_style": WSD_STYLES, "wd_incr_style": WD_STYLES}
    for field in fields(Settings):
        flag = "--" + field.name.replace("_", "-")
        if field.name in choices:
            command.add_argument(flag, choices=choices[field.name])
        else:
            command.add_argument(flag, type=_first if field.name == "warmup_first" else float, metavar="X")


def _first(text: str) -> str | float:
    return text if text in ("init", "one") else float(text)


def _schedules(args: argparse.Namespace) -> dict[str, Schedule]:
    """Return everything to show, by label: from the file, the name, the flags, or several of them."""
    tables: dict[str, Any] = tomllib.loads(args.file.read_text()) if args.file else {}
    flags = {field.name: getattr(args, field.name) for field in fields(Settings)}
    given = tables.pop("scheduler", {}) | {name: value for name, value in flags.items() if value is not None}
    shown = {label: _from_table(label, plain) for label, plain in tables.items()}
    if args.schedule:
        shown["lr"] = _from_words(args.schedule)
    if given:
        if both := sorted({"lr", "weight_decay"} & set(shown)):
            raise ScheduleError(f"{', '.join(both)} is set twice, directly and by the Megatron-Core settings")
        shown |= _from_settings(given)
    if not shown:
        raise ScheduleError("nothing to show: pass a name, --max-lr and --lr-decay-steps, or --file")
    return shown


def _from_table(label: str, plain: object) -> Schedule:
    if not isinstance(plain, Mapping):
        raise ScheduleError(f"{label}={plain!r} is outside of a table: put it under [scheduler], or under [lr]")
    if "name" not in plain:
        return Schedule.from_dict(plain)
    known = plain["name"] in SCHEDULE_NAMES  # get_schedule refuses another name, with a suggestion
    missing = [name for name in ("peak", "steps") if known and name not in plain]
    refuse([f"{name} is missing" for name in missing], where=f"[{label}]")
    return get_schedule(**{"peak": 1.0, "steps": 1, **plain})


def _from_words(words: Sequence[str]) -> Schedule:
    name, *pairs = words
    plain: dict[str, Any] = {"name": name}
    for pair in pairs:
        key, equals, value = pair.partition("=")
        if not equals:
            raise ScheduleError(f"{pair!r} must be KEY=VALUE, for example peak=1e-3")
        plain[key] = _number_or_text(value)
    return _from_table(name, plain)


def _number_or_text(text: str) -> float | str:
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _from_settings(given: Mapping[str, Any]) -> dict[str, Schedule]:
    names = [field.name for field in fields(Settings)]
    refuse([unknown_name("field", name, names) for name in given if name not in names], where="[scheduler]")
    filled = dict(_DEFAULTS) | {"wd_incr_steps": given.get("lr_decay_steps")} | dict(given)
    required = [field.name for field in fields(Settings) if field.default is MISSING]
    refuse(
        [f"{name} is missing" for name in required if filled.get(name) is None and name != "wd_incr_steps"],
        where="settings",
    )
    s = Settings(**filled)
    shown = {"lr": closed_form.lr_schedule(s, max_lr=s.max_lr, min_lr=s.min_lr)}
    if s.end_wd > 0:
        shown["weight_decay"] = closed_form.wd_schedule(s, start_wd=s.start_wd, end_wd=s.end_wd)
    return shown


def _table(schedules: Mapping[str, Schedule], args: argparse.Namespace) -> str:
    if args.at is None:
        return table(schedules, rows_to_show(schedules, num_rows=args.rows))
    try:
        steps = [float(step) for step in args.at.split(",")]
    except ValueError as error:
        raise ScheduleError(f"--at={args.at!r} must be numbers separated by commas") from error
    return table(schedules, steps)


def _plot(schedules: Mapping[str, Schedule], args: argparse.Namespace) -> str:
    steps = args.steps if args.steps is not None else max(schedule.horizon() for schedule in schedules.values())
    if args.png:
        save_png(schedules, args.png, steps=steps)
        return f"wrote {args.png}"
    plots = (
        f"{name}\n{text_plot([s], steps=steps, width=args.width, height=args.height)}" for name, s in schedules.items()
    )
    return "\n\n".join(plots)


if __name__ == "__main__":
    sys.exit(main())
