"""What is logged and written when an optimizer is built: the configuration, the plan, the group of every parameter."""

import json
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from inspect import signature
from pathlib import Path
from typing import Any

from opt_config import resolved
from opt_distributed.buffers import Metas
from opt_distributed.comm import Comm, agreed
from opt_stack.planning.design import Design
from opt_stack.planning.plan import Plan
from opt_stack.rules.entries import ParamGroups
from opt_stack.rules.registry import warn_of_unread_fields
from opt_stack.state.state_dicts import param_name
from opt_stack.wording import logger

CONFIG_FILE = "optimizer_config.json"
PLAN_FILE = "optimizer_plan.txt"


def record_design(design: Design) -> None:
    """Log the plan and its warnings, on one rank, and write it where the configuration says. Collective."""
    request = design.request
    config = request.config
    everyone = request.roles.everyone
    if everyone.rank == 0:
        logger.info("%s", design.plan)
    if request.roles.dense.dp.rank == 0:
        warn_of_guesses(design.plan, design.metas)
        if request.has_given_groups:
            warn_of_vocabulary(design.plan, design.metas)
    if request.by_name and everyone.rank == 0:  # Megatron-LM's command line sets fields of every rule
        warn_of_unread_fields(design.groups.groups, request.registry, config)
    writes = bool(config.config_logger_dir) and everyone.rank == 0
    agreed(everyone, lambda: _write_plan(config.config_logger_dir, design.plan) if writes else None)


def warn_of_vocabulary(plan: Plan, metas: Metas) -> None:
    """Log a warning for each embedding, output layer and stack of vectors that the caller's groups give to a matrix
    rule, of which `get_optimizer` would not update it."""
    for unit in plan.units:
        for id in sorted(unit.ids) if unit.needs_matrices else ():
            meta = metas[id]
            if meta.is_embedding_or_output:
                guess = f" ({meta.guess})" if meta.guess else ""
                kind = f"an embedding or output layer{guess}"
                mark = "is_embedding_or_output_parameter"
            elif meta.is_vector:
                kind = "a stack of vectors, such as biases of experts"
                mark = "_no_weight_decay"
            else:
                continue
            logger.warning(
                "parameter %r of shape %s is %s, but its group gives it to %s: move it to a group with "
                '"optimizer": "adam", or set its attribute %s to False to treat it as a hidden matrix',
                str(id), meta.shape, kind, unit.rule.name, mark,
            )  # fmt: skip


def warn_of_guesses(plan: Plan, metas: Metas) -> None:
    """Log a warning for each parameter that is treated as an embedding or output layer by its name or shape only."""
    rules = [unit.rule.name for unit in plan.units if unit.needs_matrices]
    if not rules and plan.config.decoupled_lr is None:
        return
    for unit in plan.units:
        for id in sorted(id for id in unit.ids if metas[id].guess and not unit.needs_matrices):
            logger.warning(
                "parameter %r of shape %s is treated as an embedding or output layer: %s. It is updated by %s%s. "
                "Set its attribute is_embedding_or_output_parameter to True to confirm, or to False to treat it as a "
                "hidden matrix",
                str(id), metas[id].shape, metas[id].guess, unit.rule.name, f", not {rules[0]}" if rules else "",
            )  # fmt: skip


def _write_plan(folder: str | Path, plan: Plan) -> None:
    """Write the resolved configuration as JSON and the plan as text to `folder`. Raises OSError."""
    _write_json(Path(folder) / CONFIG_FILE, resolved(plan.config))
    (Path(folder) / PLAN_FILE).write_text(f"{plan}\n", encoding="utf-8")


# --- which parameter is in which group --------------------------------------------------------------------------------


def write_group_map(path: str | Path, groups: ParamGroups, *, everyone: Comm) -> None:
    """Write on rank 0 the group index of every parameter of all ranks. Collective.

    `path` becomes a torch.distributed.checkpoint directory of {parameter name: index}, and `path`.json has the same
    with the groups. A name that is in different groups on different ranks is written as `rank R: name`.

    Raises OSError on rank 0, and ValueError on the other ranks, if writing fails.
    """
    own = {param_name(id): index for index, group in enumerate(groups) for id in group["param_ids"]}
    index_of = merged(everyone.gather_objects(own))

    def write() -> None:
        _save_alone(dict(index_of), str(path))
        named = [{"index": i, "name": g["name"], "optimizer": g["optimizer"]} for i, g in enumerate(groups)]
        _write_json(Path(f"{path}.json"), {"groups": named, "group_of": index_of})

    agreed(everyone, lambda: write() if everyone.rank == 0 else None)


def _save_alone(state: dict[str, Any], path: str) -> None:
    """Write a torch.distributed.checkpoint directory from this process only, in any world."""
    from torch.distributed.checkpoint.filesystem import FileSystemWriter  # half a second; few programs write group maps
    from torch.distributed.checkpoint.state_dict_saver import save, save_state_dict

    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch warns that torch.distributed is not used, which is intended
        if "no_dist" in signature(save).parameters:
            save(state, checkpoint_id=path, no_dist=True)
        else:  # torch 2.6
            save_state_dict(state, FileSystemWriter(path), no_dist=True)


def merged(maps: Sequence[Mapping[str, int]]) -> dict[str, int]:
    """Merge the maps of all ranks. Pipeline stages may have different parameters under one name."""
    different = {(name, index) for of_rank in maps for name, index in of_rank.items()}
    num_groups = Counter(name for name, _ in different)
    found = {}
    for rank, of_rank in enumerate(maps):
        for name, index in of_rank.items():
            found[name if num_groups[name] == 1 else f"rank {rank}: {name}"] = index
    return found


def _write_json(path: Path, value: Mapping[str, Any]) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")
