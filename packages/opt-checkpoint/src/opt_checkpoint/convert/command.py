"""`optckpt convert`: checkpoints from and to other formats. Each converter is imported when it is used."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the arguments of the command."""
    parser.add_argument("source", help="what to convert; a checkpoint may be the URL of an object store")
    parser.add_argument("target", help="what to write, which must not exist; likewise")
    form = parser.add_mutually_exclusive_group(required=True)
    form.add_argument("--from", dest="from_", choices=_FROM, help="write a checkpoint from SOURCE, which is ...")
    form.add_argument("--to", choices=_TO, help="write another format from SOURCE, a checkpoint")
    parser.add_argument("--tensor", metavar="GLOB", default="*", help="to safetensors: only keys that match")
    parser.add_argument("--prefix", default="", help="safetensors: prefix of the checkpoint's keys, as model.")
    parser.add_argument("--map", type=Path, help="safetensors: JSON list of {ours, theirs, ...}; see NameRule")
    parser.add_argument("--dtype", help="to safetensors: convert floating-point tensors, as to bfloat16")
    parser.add_argument("--at", default="optimizer", help="torch, dcp: where in the state the optimizer is")
    parser.add_argument("--name", default="", help="dcp: where dcp.load looks for the optimizer, as optim")
    parser.add_argument("--names", type=Path, help="torch: JSON list of parameter names in the optimizer's order")
    parser.add_argument("--slots", type=Path, help="megatron: JSON list of {name, shape, start, ...}")
    parser.add_argument("--step", type=int, help="megatron: number of optimizer steps taken")


def run(options: argparse.Namespace) -> int:
    """Convert, and print what was written.

    Raises:
        CheckpointingException: as the converters.
    """
    convert = _FROM[options.from_] if options.from_ else _TO[options.to]
    for path in convert(options) or [options.target]:
        print(path)
    return 0


def _from_torch(options: argparse.Namespace) -> None:
    from opt_checkpoint.convert.foreign_files import read_names
    from opt_checkpoint.convert.torch_file import torch_file_to_checkpoint

    names = read_names(options.names) if options.names else None
    torch_file_to_checkpoint(options.source, options.target, names=names)


def _from_megatron(options: argparse.Namespace) -> None:
    from opt_checkpoint.convert.megatron import megatron_to_checkpoint, read_bucket_slots

    slots = None if options.slots is None else read_bucket_slots(options.slots)
    megatron_to_checkpoint(options.source, options.target, slots=slots, step=options.step)


def _to_torch(options: argparse.Namespace) -> None:
    from opt_checkpoint.convert.torch_file import checkpoint_to_torch_file

    checkpoint_to_torch_file(options.source, options.target, at=tuple(options.at.split(".")))


def _to_dcp(options: argparse.Namespace) -> None:
    from opt_checkpoint.convert.stock_dcp import checkpoint_to_dcp

    checkpoint_to_dcp(options.source, options.target, at=tuple(options.at.split(".")), name=options.name)


def _to_safetensors(options: argparse.Namespace) -> list[Path]:
    from opt_checkpoint.convert.safetensors_directories import checkpoint_to_safetensors, left_out
    from opt_checkpoint.disk.dtype_names import dtype_from_name

    dtype = None if options.dtype is None else dtype_from_name(options.dtype)
    names, select = _name_rules(options), options.tensor
    files = checkpoint_to_safetensors(
        options.source, options.target, names=names, select=select, prefix=options.prefix, dtype=dtype
    )
    if others := left_out(options.source, select=select, prefix=options.prefix):
        print(f"left out, as safetensors files hold tensors only: {', '.join(others)}", file=sys.stderr)
    return files


def _from_safetensors(options: argparse.Namespace) -> None:
    from opt_checkpoint.convert.safetensors_directories import safetensors_to_checkpoint

    safetensors_to_checkpoint(options.source, options.target, names=_name_rules(options), prefix=options.prefix)


def _name_rules(options: argparse.Namespace) -> Sequence[Any]:
    from opt_checkpoint.convert.name_rules import SAME_NAMES, read_name_rules

    return SAME_NAMES if options.map is None else read_name_rules(options.map)


_Convert = Callable[[argparse.Namespace], list[Path] | None]
_FROM: Mapping[str, _Convert] = MappingProxyType(
    {"torch": _from_torch, "safetensors": _from_safetensors, "megatron": _from_megatron}
)
_TO: Mapping[str, _Convert] = MappingProxyType({"torch": _to_torch, "safetensors": _to_safetensors, "dcp": _to_dcp})
