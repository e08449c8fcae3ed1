"""`optckpt`: inspect, verify, compare and convert checkpoints; one process, streaming."""

from __future__ import annotations

import argparse
import difflib
import fnmatch
import json
import sys
from collections.abc import Callable, Sequence
from importlib import import_module
from pathlib import Path
from typing import Any

import torch

from opt_checkpoint.disk.averages import WEIGHT_STATES
from opt_checkpoint.disk.checkpoint import read_index, size_problems, verify_checkpoint
from opt_checkpoint.disk.index import PATHS
from opt_checkpoint.disk.main_weights import unchecked
from opt_checkpoint.errors import (
    CheckpointCorruptError,
    CheckpointingException,
    CheckpointNotFoundError,
    CheckpointValueError,
)
from opt_checkpoint.state.tensors import DTYPE_NAMES, dtype_from_name
from opt_checkpoint.store import Location, location_of, store_at
from opt_checkpoint.store.directory import is_leftover

FINE = 0
FOUND = 1
WRONG_USE = 2
_UNROUNDED = "they have no 16-bit weights, to which main weights would round"
# Formats that `convert` reads and writes: the function of each, in `opt_checkpoint.convert`, and its options.
_FROM = {
    "torch": ("torch_files.torch_file_to_checkpoint", ("names",)),
    "safetensors": ("safetensors.safetensors_to_checkpoint", ("map", "prefix")),
    "megatron": ("megatron.megatron_to_checkpoint", ("slots", "step", "moments")),
}
_TO = {
    "torch": ("torch_files.checkpoint_to_torch_file", ("at", "force")),
    "safetensors": (
        "safetensors.checkpoint_to_safetensors",
        ("map", "prefix", "tensor", "dtype", "weights"),
    ),
    "dcp": ("torch_files.checkpoint_to_dcp", ("at", "name")),
    "megatron": ("to_megatron.checkpoint_to_megatron", ("replicated", "moments")),
}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command.

    Args:
        arguments: the command line without the program's name; None for the process's own.

    Returns:
        0 on success, 1 if damage or differences were found, 2 if the command could not be run.
    """
    options = _parser().parse_args(arguments)
    try:
        code: int = options.run(options)
    except (CheckpointingException, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return WRONG_USE
    return code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="optckpt", description=__doc__)
    commands = parser.add_subparsers(required=True, metavar="command")

    def add(name: str, about: str, run: Callable[[argparse.Namespace], int], *paths: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(run=run)
        for path in paths:
            command.add_argument(path, help="a path, or the URL of an object store")
        return command

    add("ls", "list the checkpoints in a directory", _ls, "path")
    show = add("show", "list what a checkpoint holds", _show, "path")
    show.add_argument("--tensor", metavar="GLOB", default="*", help="only keys that match")
    show.add_argument("--stats", action="store_true", help="read the values: minimum, maximum, mean, non-finite")
    show.add_argument("--chunks", action="store_true", help="which rank wrote which box")
    add("verify", "read every byte and compare it with its checksum, if it has one", _verify, "path")
    diff = add("diff", "compare two checkpoints, however each was sharded", _diff, "first", "second")
    diff.add_argument("--rtol", type=float, default=0.0, help="allowed relative difference; 0 asks for equal bits")
    convert = add("convert", "convert from or to other formats", _convert)
    convert.add_argument("source", help="what to convert; a checkpoint may be the URL of an object store")
    convert.add_argument("target", help="what to write, which must not exist (but see --force); likewise")
    form = convert.add_mutually_exclusive_group(required=True)
    form.add_argument("--from", dest="from_", choices=_FROM, help="write a checkpoint from SOURCE, which is ...")
    form.add_argument("--to", choices=_TO, help="write another format from SOURCE, a checkpoint")
    convert.add_argument("--tensor", metavar="GLOB", help="to safetensors: only keys that match")
    convert.add_argument("--prefix", help="safetensors: prefix of the checkpoint's keys, as model.")
    convert.add_argument("--map", type=Path, help="safetensors: JSON list of {ours, theirs, ...}; see NameRule")
    convert.add_argument("--dtype", help="to safetensors: convert floating-point tensors, as to bfloat16")
    about = "to safetensors: the averages of weights that optimizers keep, in fp32, in place of the trained weights"
    convert.add_argument("--weights", choices=WEIGHT_STATES, help=about)
    convert.add_argument("--at", help="to torch, dcp: where in the state the optimizer is; default: optimizer")
    convert.add_argument("--name", help="to dcp: where dcp.load looks for the optimizer, as optim")
    convert.add_argument("--names", type=Path, help="from torch: JSON list of parameter names in the optimizer's order")
    convert.add_argument("--slots", type=Path, help="from megatron: JSON list of {name, shape, start, ...}")
    convert.add_argument("--step", type=int, help="from megatron: number of optimizer steps taken")
    convert.add_argument("--moments", choices=("saved", "new"), help="megatron: new converts the weights only")
    about = "to megatron: for an optimizer without use_distributed_optimizer"
    convert.add_argument("--replicated", action="store_true", default=None, help=about)
    replaces = "to torch: replace an existing file; a directory is never replaced"
    convert.add_argument("--force", action="store_true", default=None, help=replaces)
    extract = add("extract", "write one stored tensor to a .pt file", _extract, "path")
    extract.add_argument("key", help="the stored key, as `show` lists it")
    extract.add_argument("target", type=Path, help="the file to write, for torch.load; it must not exist")
    gc = add("gc", "delete leftovers of interrupted saves in a directory, after asking", _gc, "path")
    gc.add_argument("--yes", action="store_true", help="delete without asking")
    gc.add_argument("--dry-run", action="store_true", help="only list what would be deleted")
    return parser


def _size(nbytes: int) -> str:
    for unit in ("B", "KiB", "MiB", "GiB"):
        if nbytes < 1024:
            return f"{nbytes:.0f} {unit}" if unit == "B" else f"{nbytes:.1f} {unit}"
        nbytes /= 1024  # type: ignore[assignment]
    return f"{nbytes:.1f} TiB"


def _ls(options: argparse.Namespace) -> int:
    """List checkpoints. Checks sizes and manifests; does not read values."""
    store = store_at(location_of(options.path))
    try:
        read_index(options.path)
    except CheckpointNotFoundError:
        store.sizes()  # a directory that is missing is an error, not an empty one
    except CheckpointCorruptError as error:
        print(f"{options.path} is a damaged checkpoint: {error}")
        return FOUND
    else:
        print(f"{options.path} is a checkpoint: {_summary(store.path()).strip()}; `optckpt show` lists what it holds")
        return FINE
    summaries = {name: _summary(store.path(name)) for name in store.children()}
    names = [name for name in store.children() if name in summaries]  # a trainer may have removed others
    for name in names:
        print(f"{name:<28} {summaries[name]}")
    if not names:
        print(f"no checkpoints in {options.path}")
    return FINE


def _summary(path: Location) -> str:
    if is_leftover(path.name):
        return "temporary directory of a save or deletion; `gc` removes it once it has no writer"
    try:
        index = read_index(path)
    except CheckpointingException as error:
        return f"not a complete checkpoint: {error}"
    wrong = size_problems(index.path, index.files)
    state = f"damaged: {', '.join(wrong)}" if wrong else "committed"
    return f"{_size(index.nbytes):>10}  {len(index.tensors):>6} tensors  {index.kind.value}  {state}"


def _show(options: argparse.Namespace) -> int:
    from opt_checkpoint.convert.reading import read_whole

    index = read_index(options.path)
    print(f"{index.path}: {index.kind.value}, {len(index.tensors)} tensors, {_size(index.nbytes)}")
    for name, value in index.details.items():
        if name != PATHS:
            print(f"  {name}: {json.dumps(value)}")
    for key in sorted(key for key in index.tensors if fnmatch.fnmatchcase(key, options.tensor)):
        stored = index.tensors[key]
        shape = "x".join(map(str, stored.shape)) or "scalar"
        print(f"{key}  {DTYPE_NAMES[stored.dtype]}  {shape}  {len(stored.chunks)} chunk(s)")
        if options.stats and stored.nbytes:
            values = read_whole(index, key).to(torch.float64)
            finite = values[values.isfinite()]
            span = f"min {finite.min():.6g}  max {finite.max():.6g}  mean {finite.mean():.6g}" if finite.numel() else ""
            print(f"    {span}  non-finite {values.numel() - finite.numel()}")
        for chunk in stored.chunks if options.chunks else ():
            print(f"    {chunk.box.text}  {chunk.place.file} at {chunk.place.start}")
    for key in sorted(key for key in index.objects if fnmatch.fnmatchcase(key, options.tensor)):
        print(f"{key}  object  {_size(index.objects[key].nbytes)}")
    return FINE


def _verify(options: argparse.Namespace) -> int:
    findings = verify_checkpoint(options.path)
    for finding in findings:
        print(finding)
    if not findings:
        index = read_index(options.path)
        some = f"no damage was found, but archives of {index.kind.value} may lack checksums of values"
        print(f"{options.path}: {some if index.save_id is None else 'every byte is as it was saved'}")
        if names := unchecked(index):
            few = f"{', '.join(names[:2])}{', ...' if len(names) > 2 else ''}"
            print(f"states of {len(names)} parameters cannot be checked ({few}): {_UNROUNDED}")
    return FOUND if findings else FINE


def _diff(options: argparse.Namespace) -> int:
    from opt_checkpoint.convert.reading import differences

    code = FINE
    for difference in differences(read_index(options.first), read_index(options.second), rtol=options.rtol):
        print(f"{difference.key}: {difference.text}")
        code = FOUND
    if code == FINE:
        print("equal")
    return code


def _convert(options: argparse.Namespace) -> int:
    """Convert, and print what was written."""
    if options.from_:
        form = f"--from {options.from_}"
        function, allowed = _FROM[options.from_]
    else:
        form = f"--to {options.to}"
        function, allowed = _TO[options.to]
    arguments: dict[str, Any] = {}
    for name in dict.fromkeys(name for _, names in (*_FROM.values(), *_TO.values()) for name in names):
        given = getattr(options, name)
        if given is None:
            continue
        if name not in allowed:
            raise CheckpointValueError(f"--{name} does nothing with {form}, which takes --{', --'.join(allowed)}")
        argument, value = _argument(name, given)
        arguments[argument] = value
    module, _, name = function.partition(".")
    convert = getattr(import_module(f"opt_checkpoint.convert.{module}"), name)
    written = convert(options.source, options.target, **arguments)
    if options.to == "safetensors":
        from opt_checkpoint.convert.safetensors import left_out

        select = arguments.get("select", "*")
        prefix = arguments.get("prefix", "")
        if others := left_out(options.source, select=select, prefix=prefix):
            print(f"left out, as safetensors files hold tensors only: {', '.join(others)}", file=sys.stderr)
    for path in written or [options.target]:
        print(path)
    return FINE


def _argument(option: str, given: Any) -> tuple[str, Any]:
    """The argument of a conversion that an option of the command line stands for."""
    from opt_checkpoint.convert import megatron, name_rules, reading

    match option:
        case "names":
            return option, reading.read_list(given, str, "names")
        case "slots":
            return option, reading.read_rows(given, megatron.BucketSlot)
        case "map":
            return "names", name_rules.read_name_rules(given)
        case "tensor":
            return "select", given
        case "dtype":
            return option, dtype_from_name(given)
        case "at":
            return option, tuple(given.split("."))
        case "replicated":
            return "is_distributed", not given
    return option, given


def _extract(options: argparse.Namespace) -> int:
    from opt_checkpoint.convert.reading import read_whole

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


def _gc(options: argparse.Namespace) -> int:
    """List leftovers of interrupted saves, ask, and delete them. Keep directories that a running save may still use."""
    store = store_at(location_of(options.path))
    dead = []
    for left in store.leftovers():
        kept = "" if left.writer is None else f": kept, {left.writer} may still write to it"
        print(f"{store.path(left.folder)}{kept}")
        if left.writer is None:
            dead.append(left)
    if not dead:
        print(f"nothing to delete in {options.path}")
    if not dead or options.dry_run:
        return FINE
    question = f"delete {len(dead)} directories? [y/N] "
    if not options.yes and not (sys.stdin.isatty() and input(question).strip().lower() in ("y", "yes")):
        print("nothing was deleted; --yes deletes without asking")
        return FINE
    for left in dead:
        store.discard(left.folder)
    return FINE


if __name__ == "__main__":
    sys.exit(main())
