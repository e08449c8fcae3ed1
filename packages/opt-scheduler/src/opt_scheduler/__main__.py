"""The command `optsched`: shows schedules as tables and plots."""

import argparse
import os
import sys
import tomllib
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from .curves import constant, ramp
from .draw import save_png, table, text_plot
from .errors import ScheduleError, is_number, refuse, unknown_name
from .recipes import get_schedule, schedule_signatures
from .schedule import Schedule
from .settings import CHOICES, SETTINGS, Settings

_EPILOG = """\
By name:                   optsched plot cosine peak=1e-3 steps=1000 warmup_steps=100
                           optsched plot piecewise_linear points=0:0,100:1e-3,1000:0
From Megatron-Core flags:  optsched plot --max-lr 1e-3 --lr-warmup-steps 100 --lr-decay-steps 1000
From a file:               optsched table --file run.toml

`optsched list` shows the names and their arguments.

A TOML file has one table per schedule: with a name and the arguments of get_schedule, such as
  [lr]
  name = "cosine"
  peak = 1e-3
  steps = 1000
or with a kind, as Schedule.to_dict() writes it. A table [scheduler] has the Megatron-Core flags as keys
(max_lr = 1e-3); flags on the command line override it.
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line. Return 0, or 2 with the reason on stderr if the request is invalid."""
    try:
        args = _parser().parse_args(argv)
        if args.command == "list":
            text = "\n".join(f"{name:<22} {arguments}" for name, arguments in schedule_signatures().items())
        else:
            show = _table if args.command == "table" else _plot
            text = show(_schedules(args), args)
        print(text, flush=True)
    except BrokenPipeError:  # the reader, such as `head`, has enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())  # Python flushes it once more at exit
    except (ScheduleError, OSError, tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
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
    commands.add_parser("list", help="the names of schedules, with their arguments")
    table_parser = commands.add_parser("table", help="numbers, one row per step")
    table_parser.add_argument("--at", type=_value, metavar="0,10,20", help="these steps only")
    table_parser.add_argument(
        "--rows", type=int, default=11, help="number of rows, in addition to the boundaries (%(default)s)"
    )
    plot_parser = commands.add_parser("plot", help="curves in the terminal, or as a PNG")
    plot_parser.add_argument("--png", type=Path, help="write a PNG; needs opt-scheduler[plot]")
    plot_parser.add_argument("--steps", type=float, help="last step; by default a little past the end")
    plot_parser.add_argument("--width", type=int, default=72, help="characters (%(default)s)")
    plot_parser.add_argument("--height", type=int, default=14, help="lines (%(default)s)")
    for command in (table_parser, plot_parser):
        command.add_argument(
            "schedule", nargs="*", metavar="NAME KEY=VALUE", help="a schedule and its arguments, see optsched list"
        )
        command.add_argument("--file", type=Path, help="a TOML file, see optsched -h")
        for name in SETTINGS:
            flag = "--" + name.replace("_", "-")
            if name in CHOICES:
                command.add_argument(flag, choices=[*filter(None, CHOICES[name])])
            else:
                command.add_argument(flag, type=_value if name == "warmup_first" else float, metavar="X")
    return parser


def _schedules(args: argparse.Namespace) -> dict[str, Schedule]:
    """Return everything to show, by label: from the file, the name, the flags, or several of them."""
    tables: dict[str, Any] = tomllib.loads(args.file.read_text()) if args.file else {}
    flags = {name: getattr(args, name) for name in SETTINGS if getattr(args, name) is not None}
    settings = tables.pop("scheduler", {})
    if not isinstance(settings, dict):
        raise ScheduleError(f"scheduler={settings!r} is not a table: put settings under [scheduler]")
    given = settings | flags
    shown = {label: _from_table(label, plain) for label, plain in tables.items()}
    if args.schedule:
        name, *pairs = args.schedule
        arguments = {}
        for pair in pairs:
            key, equals, text = pair.partition("=")
            if not equals:
                raise ScheduleError(f"{key!r} must be KEY=VALUE, for example peak=1e-3")
            if key == "name":
                raise ScheduleError(f"'name' is set twice: by {name!r} and by {text!r}")
            arguments[key] = _value(text)
        shown["lr"] = get_schedule(name, **arguments)
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
    try:
        return get_schedule(**plain) if "name" in plain else Schedule.from_dict(plain)
    except ScheduleError as error:
        raise ScheduleError(f"[{label}] {error}") from error


def _value(text: str) -> Any:
    """Read a number, a list such as "1,0.1", a list of pairs such as "0:1,100:0", or else text."""
    if "," in text:
        return [_value(part) for part in text.split(",") if part]
    if ":" in text:
        return tuple(_value(part) for part in text.split(":"))
    for read in (int, float):
        try:
            return read(text)
        except ValueError:
            continue
    return text


def _from_settings(given: Mapping[str, Any]) -> dict[str, Schedule]:
    problems = [unknown_name("field", name, SETTINGS) for name in given if name not in SETTINGS]
    problems += [f"{name} is missing" for name in ("max_lr", "lr_decay_steps") if name not in given]
    refuse(problems, where="[scheduler]")
    settings = Settings(**{"wd_incr_steps": given["lr_decay_steps"], **given})
    shown: dict[str, Schedule] = {"lr": settings}
    end = settings.end_wd
    if end > 0 and settings.wd_incr_style == "constant":
        shown["weight_decay"] = constant(end)
    elif end > 0:
        shown["weight_decay"] = ramp(settings.start_wd, end, steps=settings.wd_incr_steps, shape=settings.wd_incr_style)
    return shown


def _table(schedules: Mapping[str, Schedule], args: argparse.Namespace) -> str:
    if args.at is None:  # about evenly spaced steps of the longest schedule, and every boundary
        end = max(schedule.horizon() for schedule in schedules.values())
        rows = {0.0}.union(*(schedule.boundaries for schedule in schedules.values()))
        rows.update(float(round(end * i / (args.rows - 1))) for i in range(1, args.rows))
        return table(schedules, sorted(rows))
    steps = args.at if isinstance(args.at, list) else [args.at]
    if not all(map(is_number, steps)):
        raise ScheduleError(f"--at={args.at!r} must be numbers separated by commas")
    return table(schedules, steps)


def _plot(schedules: Mapping[str, Schedule], args: argparse.Namespace) -> str:
    steps = args.steps if args.steps is not None else max(schedule.horizon() for schedule in schedules.values())
    if args.png:
        save_png(schedules, args.png, steps=steps)
        return f"wrote {args.png}"
    plots = []
    for name, schedule in schedules.items():
        picture = text_plot([schedule], steps=steps, width=args.width, height=args.height)
        plots.append(f"{name}\n{picture}")
    return "\n\n".join(plots)


if __name__ == "__main__":
    sys.exit(main())
