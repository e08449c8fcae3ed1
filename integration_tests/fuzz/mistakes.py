"""Cases to be refused on every rank, by a ValueError, before the first step. Torch and the standard library only.

A mistake is laid over a case that would be right without it. The list says why each is one; a refusal of anything else
is a failure of the case, and so is a mistake that goes through, or that only some ranks hear of.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import Any

import torch

from fuzz.cases import MATRIX_RULES, Case, Mistake, is_trained


def _is_unknown(case: Case) -> bool:
    cuts = case.setup.grid.tp > 1
    parts = any(not p.frozen and (p.expert is not None or (p.cut is not None and cuts)) for p in case.params)
    return case.setup.processes and case.setup.layout == "plain" and case.setup.grid.size > 1 and parts


def _needs_whole(case: Case) -> bool:
    is_plain = case.setup.sharding == "replicated" and case.setup.layout == "plain" and not case.setup.wrapped
    moves = any(is_trained(param) and case.rule_of(param) == case.rule for param in case.params)
    return case.rule in MATRIX_RULES and is_plain and moves


def _buckets_differ(case: Case) -> bool:
    is_world = case.setup.grid.dp == case.setup.grid.size > 1
    return case.setup.wrapped and case.setup.overlap_grads and is_world and case.setup.num_buckets is None


def _mistake(words: str, *, rank: int | None = None, ddp: dict[str, Any] | None = None, **fields: Any) -> Mistake:
    """`ddp`: fields of the wrapper's configuration; `fields`: of the optimizer's."""
    return Mistake(words=words, fields=tuple(fields.items()), ddp_fields=tuple((ddp or {}).items()), rank=rank)


# Why each is a mistake, in which cases it is one, and the mistake.
KINDS: tuple[tuple[Callable[[Case], bool], Mistake], ...] = (
    # Nobody can guess which ranks hold the other parts of a matrix, or copies of an expert.
    (_is_unknown, Mistake(words="pg_collection", groups_none=True)),
    # Newton-Schulz needs whole matrices, and flat shards cut them.
    (_needs_whole, _mistake("whole matrices", use_distributed_optimizer=True)),
    # Lion supports only decoupled weight decay.
    (lambda case: case.rule == "lion", _mistake("decoupled_weight_decay", decoupled_weight_decay=False)),
    # SGD has no second moment that could be kept in fewer bits.
    (
        lambda case: case.rule == "sgd" and case.overrides == () and case.numbers in ("bf16", "fp16_constant"),
        _mistake("exp_avg_sq_dtype", use_precision_aware_optimizer=True, exp_avg_sq_dtype=torch.bfloat16),
    ),
    # Gathers overlap with the forward of a wrapper, and the chunks are plain.
    (
        lambda case: case.setup.is_sharded and not case.setup.wrapped,
        _mistake("overlap_param_gather", overlap_param_gather=True),
    ),
    # A single chunk is gathered: no other can be stepped meanwhile.
    (
        lambda case: case.setup.overlap_gather and case.setup.sharding == "flat" and case.setup.chunks == 1,
        _mistake("overlap_param_gather_with_optimizer_step", overlap_param_gather_with_optimizer_step=True),
    ),
    # The optimizer shards what the wrapper does not.
    (
        lambda case: case.setup.wrapped and case.setup.sharding == "flat" and not case.setup.gathers_with_step,
        _mistake(
            "use_distributed_optimizer",
            ddp={"use_distributed_optimizer": False, "overlap_param_gather": False, "align_param_gather": False},
        ),
    ),
    # Ranks step by different rates.
    (lambda case: case.setup.grid.size > 1, _mistake("lr", lr=0.5, rank=1)),
    # A rank does not know the optimizer.
    (lambda case: case.setup.grid.size > 1, _mistake("optimizer", optimizer="adma", rank=0)),
    # Replicas cut their buffers into different buckets.
    (_buckets_differ, _mistake("bucket_size", ddp={"bucket_size": 11}, rank=0)),
    # Gradients are averaged in the collective and divided by tokens.
    (
        lambda case: case.setup.per_token,
        _mistake(
            "average_in_collective", ddp={"average_in_collective": True, "reduce_scatter_with_fp32_accumulation": False}
        ),
    ),
    # Only shards are summed in fp32 on the way.
    (
        lambda case: case.setup.wrapped and not case.setup.is_sharded,
        _mistake(
            "reduce_scatter_with_fp32_accumulation",
            ddp={
                "reduce_scatter_with_fp32_accumulation": True,
                "average_in_collective": False,
                "grad_reduce_in_fp32": False,
            },
        ),
    ),
)


def with_mistake(rng: random.Random, case: Case) -> Case:
    fitting = [mistake for fits, mistake in KINDS if fits(case)]
    if not fitting:
        return case
    mistake = rng.choice(fitting)
    setup = dataclasses.replace(case.setup, groups_none=case.setup.groups_none or mistake.groups_none)
    return dataclasses.replace(case, mistake=mistake, setup=setup, resume=None)
