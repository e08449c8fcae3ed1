"""Writes a checkpoint of opt-stack's Adam as a `torch_dist` directory that Megatron-Core's own optimizer loads.

Data files are linked; `.metadata` gives their tensors Megatron-Core's names, and lists no plain values, which its
strict modes cannot parse. Plain values are in `common.pt`, which all of its releases read.
"""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from opt_checkpoint.convert.megatron import EXPERT
from opt_checkpoint.convert.reading import read_whole
from opt_checkpoint.convert.torch_files import write_linked
from opt_checkpoint.disk.checkpoint import open_checkpoint
from opt_checkpoint.disk.foreign import MEGATRON_COMMON, MEGATRON_MARK, MEGATRON_MARKED, read_dcp_index
from opt_checkpoint.disk.index import COMMON_KEY, CheckpointIndex, Kind, StoredTensor
from opt_checkpoint.disk.main_weights import Moments
from opt_checkpoint.errors import CheckpointKeyError, CheckpointValueError
from opt_checkpoint.run.save_load import PathLike
from opt_checkpoint.run.saved_optimizer import PREFIX
from opt_checkpoint.state.groups import Group
from opt_checkpoint.state.megatron_types import RESHARDABLE, optimizer_entry
from opt_checkpoint.state.tree import lookup
from opt_checkpoint.store import store_at
from opt_checkpoint.store.paths import local_path

_MOMENTS = ("exp_avg", "exp_avg_sq")
# Fields of Megatron-Core's groups, torch's and Transformer Engine's, that ours do not store.
_DEFAULTS: Mapping[str, Any] = {
    "is_expert_parallel": False, "is_decoupled_lr": False, "default_config": True, "bias_correction": True,
    "amsgrad": False, "maximize": False, "foreach": None, "capturable": False, "differentiable": False, "fused": None,
    "decoupled_weight_decay": True,
}  # fmt: skip
_OURS = ("optimizer", "choices", "name")
_CONTENT = {"distrib_optim_sharding_type": RESHARDABLE, "chained_optim_avoid_prefix": True}


def checkpoint_to_megatron(
    path: PathLike, folder: PathLike, *, is_distributed: bool = True, moments: Moments = "saved"
) -> None:
    """Write a directory for Megatron-Core's `dist_checkpointing.load` and its Adam.

    Weights are stored under the names that the optimizer's groups have for them. If experts have groups of their own,
    as with expert parallelism, the directory is for Megatron-Core with expert parallelism, whose optimizer is a chain
    of two.

    Args:
        path: a checkpoint with the model and the `sharded_state_dict` of an optimizer of `opt_stack` in it, under
            `optimizer`.
        folder: the directory to write; on the file system of `path`, files are linked, else copied.
        is_distributed: whether its `DistributedOptimizer` is to load it (`use_distributed_optimizer`), whose format is
            `fully_reshardable`; else the optimizers whose state is on every rank.
        moments: `"new"` converts no state of the optimizer, whose rule may then be any.

    Raises:
        CheckpointExistsError: something is at `folder`.
        CheckpointKeyError: the checkpoint has no such optimizer, or lacks a weight.
        CheckpointValueError: its optimizer is not Adam, or has different step counts.
    """
    source = local_path(path, "a checkpoint whose files are to be linked")
    target = local_path(folder, "a directory")
    opened = open_checkpoint(source)
    groups = lookup(opened.common, ("optimizer", "groups"))
    if opened.index.kind is not Kind.OURS or not isinstance(groups, dict) or "names" not in groups:
        raise CheckpointKeyError(f"{path} holds no optimizer of opt_stack at optimizer, saved by opt_checkpoint")
    names = {name.partition("/")[0] for own in groups["names"] for name in own}
    others = sorted({rule for group in groups["groups"] if (rule := group.get("optimizer", "adam")) != "adam"})
    if others and moments == "saved":
        raise CheckpointValueError(
            f"{path} holds groups of {', '.join(others)}; only the states of adam are converted (Megatron-Core's sgd "
            f"loads no sharded state, and its other rules are chains with adam): pass moments='new' (--moments new) to "
            f"convert the weights, and start Megatron-Core's optimizer anew (--no-load-optim)"
        )
    archives = read_dcp_index(source, store_at(source).sizes())
    tensors = _renamed(archives, names, is_distributed=is_distributed, moments=moments)
    objects = {key: place for key, place in archives.objects.items() if "/shard_" in key and key != COMMON_KEY}
    common = {**opened.common, "content_metadata": _CONTENT}
    if moments == "new":
        del common["optimizer"]
    else:
        form = "distributed"
        if not is_distributed:
            has_mains = any(key.startswith(f"{PREFIX}fp32_param.") for key in tensors)
            form = "mixed" if has_mains else "fp32"
        scale = lookup(opened.common, ("optimizer", "grad_scaler"))
        step = _common_step(opened.index)
        parts = []
        for rows in _rows_of_chain(groups):
            parts.append(optimizer_entry(form, [{**row, "step": step} for row in rows], step, scale))
        common["optimizer"] = parts[0] if len(parts) == 1 else dict(enumerate(parts))

    def write_more(out: Path) -> None:
        torch.save(common, out / MEGATRON_COMMON)
        (out / MEGATRON_MARK).write_bytes(MEGATRON_MARKED)

    write_linked(archives, target, tensors, objects, write_more)


def _rows_of_chain(groups: Mapping[str, Any]) -> list[list[Group]]:
    """The groups of each optimizer of the chain, in Megatron-Core's form: experts have the second one.

    Without expert parallelism, groups have parameters of experts and others, and there is one optimizer.
    """
    has_experts = [{EXPERT.match(name) is not None for name in names} for names in groups["names"]]
    is_chain = {True} in has_experts and {True, False} not in has_experts
    chain: list[list[Group]] = [[], []] if is_chain else [[]]
    for group, experts in zip(groups["groups"], has_experts, strict=True):
        is_expert = is_chain and experts == {True}
        # Choices, as amsgrad=False, are fields there.
        choices = [choice.partition("=") for choice in group.get("choices", ())]
        chosen = {field: value == "True" for field, _, value in choices if field in _DEFAULTS}
        kept = {field: value for field, value in group.items() if field not in _OURS}
        chain[is_expert].append({**_DEFAULTS, **chosen, **kept, "is_expert_parallel": is_expert})
    return chain


def _renamed(
    index: CheckpointIndex, names: set[str], *, is_distributed: bool, moments: Moments
) -> dict[str, StoredTensor]:
    """The stored tensors by Megatron-Core's names, without steps, and without states if `moments` are new.

    Raises:
        CheckpointKeyError: no weight, or several, are stored for a parameter.
        CheckpointValueError: the optimizer has states that Megatron-Core's Adam has not.
    """
    tensors: dict[str, StoredTensor] = {}
    taken = set[str]()
    for key, stored in index.tensors.items():
        state, _, name = key.removeprefix(PREFIX).partition(".")
        if not key.startswith(PREFIX):
            continue
        taken.add(key)
        if moments == "new":
            continue
        if state == "fp32_param":
            tensors[f"{PREFIX}{'param' if is_distributed else state}.{name}"] = stored
        elif state in _MOMENTS:
            tensors[key] = stored
        elif state != "step":
            raise CheckpointValueError(f"{key} is a state that Megatron-Core's Adam does not have")
    for name in names:
        found = [key for key in index.tensors if key not in taken and f".{key}".endswith(f".{name}")]
        if len(found) != 1:
            raise CheckpointKeyError(f"{len(found)} tensors are stored as the weight {name}: {', '.join(found)}")
        taken.add(found[0])
        tensors[name] = index.tensors[found[0]]
        if is_distributed and moments == "saved":  # the main weights of fp32 parameters are the weights
            tensors.setdefault(f"{PREFIX}param.{name}", index.tensors[found[0]])
    return {**{key: stored for key, stored in index.tensors.items() if key not in taken}, **tensors}


def _common_step(index: CheckpointIndex) -> int:
    """The step count of all parameters.

    Raises:
        CheckpointValueError: there is none, or they have different ones.
    """
    keys = [key for key in index.tensors if key.startswith(f"{PREFIX}step.")]
    steps = {int(step) for key in keys for step in read_whole(index, key).reshape(-1)}
    if len(steps) != 1:
        raise CheckpointValueError(
            f"{index.path} holds the step counts {sorted(steps)}; Megatron-Core has one for all parameters"
        )
    return steps.pop()
