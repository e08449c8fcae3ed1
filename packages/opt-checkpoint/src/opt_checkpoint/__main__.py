"""`optckpt`: inspect, verify, compare and convert checkpoints; one process, streaming."""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import json
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import NamedTuple

import torch

from opt_checkpoint.convert import command
from opt_checkpoint.convert.compare import differences, read_whole
from opt_checkpoint.disk.detect import read_index
from opt_checkpoint.disk.dtype_names import dtype_name
from opt_checkpoint.disk.files import LocalFiles
from opt_checkpoint.disk.index import PATHS, CheckpointIndex
from opt_checkpoint.disk.lease import clock_of, is_leftover, leftovers, remove_leftover, writer_of
from opt_checkpoint.disk.object_target import Leftover, clock_of_store, leftovers_of
from opt_checkpoint.disk.verify import size_problems, verify_checkpoint
from opt_checkpoint.errors import (
    CheckpointCorruptError,
    CheckpointingException,
    CheckpointNotFoundError,
    CheckpointValueError,
)
from opt_checkpoint.objects.path import Location, ObjectPath, location_of, subdirectories

FINE, FOUND, WRONG_USE = 0, 1, 2


class _Command(NamedTuple):
    """One subcommand: what it is for, its arguments, and what it does."""

    about: str
    arguments: Callable[[argparse.ArgumentParser], None]
    run: Callable[[argparse.Namespace], int]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command line without the program's name; None for the process's own.

    Returns:
        0 on success, 1 if damage or differences were found, 2 if the command could not be run.
    """
    parser = argparse.ArgumentParser(prog="optckpt", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="command")
    for name, one in _commands().items():
        own = commands.add_parser(name, help=one.about, description=one.about)
        one.arguments(own)
        own.set_defaults(run=one.run)
    options = parser.parse_args(arguments)
    try:
        code: int = options.run(options)
    except (CheckpointingException, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USE
    return code


def _commands() -> dict[str, _Command]:
    return {
        "ls": _Command("list the checkpoints in a directory", _one_path, _ls),
        "show": _Command("list what a checkpoint holds", _show_arguments, _show),
        "verify": _Command("read every byte and compare it with its checksum", _one_path, _verify),
        "diff": _Command("compare two checkpoints, however each was sharded", _diff_arguments, _diff),
        "convert": _Command("convert from or to other formats", command.add_arguments, command.run),
        "extract": _Command("write one stored tensor to a .pt file", _extract_arguments, _extract),
        "gc": _Command("delete leftovers of interrupted saves in a directory, after asking", _gc_arguments, _gc),
    }


def _location(text: str) -> Location:
    try:
        return location_of(text)
    except CheckpointingException as error:
        raise argparse.ArgumentTypeError(str(error)) from None


def _one_path(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("path", type=_location, help="a path, or the URL of an object store")


def _size(nbytes: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024  # type: ignore[assignment]
    return f"{nbytes:.1f} TiB"


def _ls(options: argparse.Namespace) -> int:
    """List checkpoints. Checks sizes and manifests; does not read values."""
    found = False
    if isinstance(options.path, Path):
        options.path.stat()  # a directory that is missing is an error, not an empty one
    try:
        read_index(options.path)
    except CheckpointNotFoundError:
        pass
    except CheckpointCorruptError as error:
        print(f"{options.path} is a damaged checkpoint: {error}")
        return FOUND
    else:
        print(f"{options.path} is a checkpoint: {_summary(options.path).strip()}; `optckpt show` lists what it holds")
        return FINE
    for entry in subdirectories(options.path):
        found = True
        print(f"{entry.name:<28} {_summary(entry)}")
    if not found:
        print(f"no checkpoints in {options.path}")
    return FINE


def _summary(path: Location) -> str:
    if is_leftover(path.name):
        return "temporary directory of a save or deletion; `gc` removes it once it has no writer"
    try:
        index = read_index(path)
    except CheckpointingException as error:
        return f"not a complete checkpoint: {error}"
    wrong = size_problems(index)
    state = f"damaged: {', '.join(wrong)}" if wrong else "committed"
    return f"{_size(index.nbytes):>10}  {len(index.tensors):>6} tensors  {index.kind.value}  {state}"


def _show_arguments(parser: argparse.ArgumentParser) -> None:
    _one_path(parser)
    parser.add_argument("--tensor", metavar="GLOB", default="*", help="only keys that match")
    parser.add_argument("--stats", action="store_true", help="read the values: minimum, maximum, mean, non-finite")
    parser.add_argument("--chunks", action="store_true", help="which rank wrote which box")


def _show(options: argparse.Namespace) -> int:
    index = read_index(options.path)
    print(f"{index.path}: {index.kind.value}, {len(index.tensors)} tensors, {_size(index.nbytes)}")
    for name, value in index.details.items():
        if name == PATHS:
            continue
        print(f"  {name}: {json.dumps(value)}")
    for key, stored in sorted(index.tensors.items()):
        if fnmatch.fnmatchcase(key, options.tensor):
            shape = "x".join(map(str, stored.shape)) or "scalar"
            print(f"{key}  {dtype_name(stored.dtype)}  {shape}  {len(stored.chunks)} chunk(s)")
            for line in _details(index, key, options):
                print(f"    {line}")
    for key in sorted(k for k in index.objects if fnmatch.fnmatchcase(k, options.tensor)):
        print(f"{key}  object  {_size(index.objects[key].nbytes)}")
    return FINE


def _details(index: CheckpointIndex, key: str, options: argparse.Namespace) -> Iterator[str]:
    if options.stats and index.tensors[key].nbytes:
        values = read_whole(index, key).to(torch.float64)
        finite = values[values.isfinite()]
        bad = values.numel() - finite.numel()
        span = f"min {finite.min():.6g}  max {finite.max():.6g}  mean {finite.mean():.6g}" if finite.numel() else ""
        yield f"{span}  non-finite {bad}"
    if options.chunks:
        for chunk in index.tensors[key].chunks:
            box = ", ".join(f"{o}:{o + n}" for o, n in zip(chunk.box.offsets, chunk.box.sizes))
            yield f"[{box}]  {chunk.place.file} at {chunk.place.start}"


def _verify(options: argparse.Namespace) -> int:
    findings = verify_checkpoint(options.path)
    for finding in findings:
        print(finding)
    if not findings:
        print(f"{options.path}: every byte is as it was saved")
    return FOUND if findings else FINE


def _diff_arguments(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("first", type=_location)
    parser.add_argument("second", type=_location)
    parser.add_argument("--rtol", type=float, default=0.0, help="allowed relative difference; 0 asks for equal bits")


def _diff(options: argparse.Namespace) -> int:
    code = FINE
    for difference in differences(read_index(options.first), read_index(options.second), rtol=options.rtol):
        print(f"{difference.key}: {difference.text}")
        code = FOUND
    if code == FINE:
        print("equal")
    return code


def _extract_arguments(parser: argparse.ArgumentParser) -> None:
    _one_path(parser)
    parser.add_argument("key", help="the stored key, as `show` lists it")
    parser.add_argument("target", type=Path, help="the file to write, for torch.load; it must not exist")


def _extract(options: argparse.Namespace) -> int:
    index = read_index(options.path)
    if options.key not in index.tensors:
        near = ", ".join(difflib.get_close_matches(options.key, index.tensors, 3))
        raise CheckpointValueError(f"{options.path} holds no tensor {options.key!r}{near and f'; similar: {near}'}")
    values = read_whole(index, options.key)
    with options.target.open("xb") as file:
        try:
            torch.save(values, file)
        except BaseException:
            options.target.unlink()  # else it would block the next attempt
            raise
    print(options.target)
    return FINE


def _gc_arguments(parser: argparse.ArgumentParser) -> None:
    _one_path(parser)
    parser.add_argument("--yes", action="store_true", help="delete without asking")
    parser.add_argument("--dry-run", action="store_true", help="only list what would be deleted")


def _gc(options: argparse.Namespace) -> int:
    """List leftovers of interrupted saves, ask, and delete them. Keep directories that a running save may still use."""
    dead = []
    for left in _leftovers(options.path):
        print(f"{left.place}" if left.writer is None else f"{left.place}: kept, {left.writer} may still write to it")
        if left.writer is None:
            dead.append(left)
    if not dead:
        print(f"nothing to delete in {options.path}")
    if not dead or options.dry_run:
        return FINE
    if not options.yes and not _agreed_to(f"delete {len(dead)} directories?"):
        print("nothing was deleted; --yes deletes without asking")
        return FINE
    for left in dead:
        left.remove()
    return FINE


class _LeftDirectory(NamedTuple):
    """A temporary directory, and who may still write to it."""

    place: Path
    writer: str | None

    def remove(self) -> None:
        remove_leftover(LocalFiles(), self.place)


def _leftovers(directory: Location) -> Iterator[_LeftDirectory | Leftover]:
    if not isinstance(directory, ObjectPath):
        found = leftovers(directory)
        now = clock_of(LocalFiles(), directory) if found else 0.0
        yield from (_LeftDirectory(path, writer_of(path, now)) for path in found)
        return
    now = clock_of_store(directory)
    for place in directory.folders():
        yield from leftovers_of(place, now)


def _agreed_to(question: str) -> bool:
    """Whether the user at a terminal agrees."""
    return sys.stdin.isatty() and input(f"{question} [y/N] ").strip().lower() in ("y", "yes")


if __name__ == "__main__":
    sys.exit(main())
