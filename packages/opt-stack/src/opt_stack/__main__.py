"""python -m opt_stack plan | groups CONFIG: show the plan or the parameter groups of a configuration."""

import argparse
import sys
from collections.abc import Iterator, Sequence

import torch

from opt_config import ConfigError, OptimizerConfig, load_config
from opt_distributed.buffers import WorldSizes, short
from opt_paramgroups import as_text, get_param_groups, group_rows, model_chunks_of
from opt_stack.factory import plan_of, warn_of_guesses, with_matrix_rule
from opt_stack.meaning import meaning
from opt_stack.planning.draft import Draft
from opt_stack.planning.plan import Plan
from opt_stack.planning.ranks import EFFECTS
from opt_stack.rules.registry import Registry

REFUSED = 2  # exit status for a configuration or a model that is not valid


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command and print its result. On a ConfigError or OSError, print it to stderr and return 2."""
    options = _parser().parse_args(arguments)
    try:
        config = load_config(options.config, section=options.section)
        rules = Registry().with_installed()
        if options.model is None:
            print(meaning(config, rules))
        else:
            print(_of_model(options, config, rules))
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return REFUSED
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m opt_stack", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    plan = commands.add_parser("plan", help="which rule updates what, where, in which dtypes, with how many bytes")
    groups = commands.add_parser("groups", help="the parameter groups of a model")
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


def _of_model(options: argparse.Namespace, config: OptimizerConfig, rules: Registry) -> str:
    """Return the text for a model. On the meta device, a model of any size needs no memory."""
    with torch.device(options.device):
        chunks = model_chunks_of(options.model)
    groups = get_param_groups(chunks, config, with_matrix_rule(config, None, rules))
    if options.command == "groups":
        return as_text(group_rows(groups))
    rank = options.rank
    if rank is not None and not 0 <= rank < options.world:
        raise ConfigError(f"--rank {rank}: a world of {options.world} has ranks 0 to {options.world - 1}")
    sizes = WorldSizes(dense=options.world, expert=options.world)
    draft = Draft(config=config, chunks=chunks, registry=rules, groups=groups, sizes=sizes)
    plan = plan_of(draft)
    EFFECTS.judge(draft, [EFFECTS.facts(draft)])
    warn_of_guesses(plan, draft.metas)
    return str(plan) if rank is None else "\n".join([str(plan), "", *_rank_lines(plan, rank)])


def _rank_lines(plan: Plan, rank: int) -> Iterator[str]:
    """Yield the lines on what one data-parallel rank keeps and updates."""
    yield f"rank {rank}: {plan.state_bytes(rank):,} bytes of state"
    for buffer in plan.buffers:
        owned = list(buffer.layout.owned(rank % buffer.layout.num_shards))
        numel = sum(own.piece.numel for own in owned)
        yield f"  {buffer.name}: {numel:,} {short(buffer.dtype)} elements in {len(owned)} pieces"


if __name__ == "__main__":
    sys.exit(main())
