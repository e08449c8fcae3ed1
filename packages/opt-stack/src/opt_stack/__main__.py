"""python -m opt_stack plan | groups CONFIG, or why DIR: show a configuration's plan or groups, or what went wrong."""

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path

import torch
from torch import nn

from opt_checkpoint import CheckpointingException
from opt_config import ConfigError, FlatShards, OptimizerConfig, Replicated, WholeParams, load_config
from opt_distributed.buffers import WorldSizes, short
from opt_paramgroups import aligned, as_text, group_rows, model_chunks_of
from opt_stack.diagnosis.why import why
from opt_stack.factory import make_design, read_groups
from opt_stack.planning.design import Request
from opt_stack.planning.plan import MAIN_FORMAT_TEXTS, kept_bytes, main_bytes, state_text
from opt_stack.planning.ranks import check_effects, check_ranks
from opt_stack.records import warn_of_guesses
from opt_stack.rules.registry import Registry, warn_of_unread_fields

WIDTH = 1024  # of the stand-ins; state that is not elementwise costs less per element for larger ones


def meaning(config: OptimizerConfig, rules: Registry) -> str:
    """Return a table of each kind of parameter in each dtype that `config` allows, then sharding, gradients and clip.

    The bytes per element are those of unsharded state and main values. Raises ConfigError if the configuration is not
    valid for any model.
    """
    cells = [["kind", "dtype", "rule", "lr", "weight decay", "numbers", "state", "bytes per element"]]
    for dtype in dict.fromkeys((torch.float32, config.precision.params)):
        module = nn.Module()  # with one parameter of each kind, on the meta device
        for name, shape in (("embedding", (WIDTH, WIDTH)), ("matrix", (WIDTH, WIDTH)), ("vector", (WIDTH,))):
            module.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
        module.embedding.is_embedding_or_output_parameter = True  # type: ignore[union-attr]  # Megatron-Core's mark
        if config.apply_wd_to_qk_layernorm:
            module.q_layernorm = nn.RMSNorm(WIDTH, dtype=dtype, device="meta")
        request = Request(config=config, chunks=(module,), registry=rules)
        model, groups = read_groups(request)
        design = make_design(request, model, groups, WorldSizes())
        unit_of = {id: unit for unit in design.plan.units for id in unit.ids}
        for id, meta in model.metas.items():
            group = groups[design.groups.index_of[id]]
            unit = unit_of[id]
            kept = kept_bytes(unit.rule, meta.shape, averages=unit.averages.specs)
            num_bytes = main_bytes(unit.numbers[dtype], meta.numel) + sum(kept.values())
            lr = "-" if group["lr"] is None else f"{group['lr']:g}"
            mains = MAIN_FORMAT_TEXTS[unit.numbers[dtype]]
            row = [id.name, short(dtype), unit.rule.name, lr, f"{group['weight_decay']:g}"]
            cells.append([*row, mains, state_text(kept), f"{num_bytes / meta.numel:g}"])
    match config.sharding:
        case Replicated():
            state = "whole on every data-parallel rank"
        case FlatShards():
            state = "cut into equal runs of elements, one on each data-parallel rank"
        case WholeParams():
            state = "of matrices, whole ones dealt to the data-parallel ranks; of the rest, equal runs of elements"
    grads = f"{short(config.precision.grads)}; clip: {config.clip_grad or 'off'}; {config.loss_scaling}"
    return "\n".join([*aligned(cells), "", f"state: {state}", f"gradients: {grads}"])


REFUSED = 2  # exit status for a configuration or a model that is not valid


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and print its result. Print an error of the input to stderr, and return `REFUSED`."""
    options = _parser().parse_args(arguments)
    try:
        if options.command == "why":
            diagnosis = why(options.directory, options.other)
            print(diagnosis)
            if options.plot is not None:
                options.plot.write_text(diagnosis.svg(), encoding="utf-8")
            return 0
        config = load_config(options.config, section=options.section)
        rules = Registry().with_installed()
        if options.model is None:
            print(meaning(config, rules))
        else:
            print(_model_report(options, config, rules))
    except (CheckpointingException, OSError, ValueError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m opt_stack", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="which rule updates what, where, in which dtypes, with how many bytes")
    groups = commands.add_parser("groups", help="the parameter groups of a model")
    reason = commands.add_parser("why", help="what changed first in a recording, or between two, or two checkpoints")
    reason.add_argument("directory", help="a directory with recordings, a file of JSON lines, or a checkpoint")
    reason.add_argument("other", nargs="?", help="another one, to compare with")
    reason.add_argument("--plot", type=Path, metavar="FILE", help="also draw norms and ratios, as SVG")
    for command in (plan, groups):
        command.add_argument("config", help="an OptimizerConfig as a .toml, .json or .yaml file")
        command.add_argument("--section", default="", help="the table in the file, such as train.optimizer")
        command.add_argument(
            "--device", choices=("meta", "cpu"), default="meta", help="the device on which the factory makes the model"
        )
    plan.add_argument("--model", metavar="module:factory", help="a callable that returns a module, or a list of chunks")
    plan.add_argument("--world", type=_count, default=1, help="data-parallel ranks (1)")
    plan.add_argument("--rank", type=int, help="also list the state of this rank")
    groups.add_argument("--model", metavar="module:factory", required=True)
    return parser


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of ranks; pass 1 or more")
    return int(text)


def _model_report(options: argparse.Namespace, config: OptimizerConfig, rules: Registry) -> str:
    """Return the groups or the plan of a model. On the meta device, a model of any size needs no memory."""
    with torch.device(options.device):
        chunks = model_chunks_of(options.model)
    request = Request(config=config, chunks=tuple(chunks), registry=rules)
    model, groups = read_groups(request)
    if options.command == "groups":
        return as_text(group_rows(groups))
    rank = options.rank
    if rank is not None and not 0 <= rank < options.world:
        raise ConfigError(f"--rank {rank}: a world of {options.world} has ranks 0 to {options.world - 1}")
    design = make_design(request, model, groups, WorldSizes(dense=options.world, expert=options.world))
    plan = design.plan
    check_ranks(design, [check_effects])
    warn_of_guesses(plan, model.metas)
    warn_of_unread_fields(groups, rules, config)
    if rank is None:
        return str(plan)
    lines = [f"{plan}\n", f"rank {rank}: {plan.state_bytes(rank):,} bytes of state"]
    for buffer in plan.buffers:
        owned = list(buffer.layout.owned(rank % buffer.layout.num_shards))
        numel = sum(piece.numel for _, piece in owned)
        lines.append(f"  {buffer.name}: {numel:,} {short(buffer.dtype)} elements in {len(owned)} pieces")
    return "\n".join(lines)


if __name__ == "__main__":
    sys.exit(main())
