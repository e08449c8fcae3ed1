"""Cases to be refused on every rank, by a ValueError, before the first step. Torch and the standard library only.

A mistake is laid over a case that would be right without it. The list says why each is one; a refusal of anything else
is a failure of the case, and so is a mistake that goes through, or that only some ranks hear of.
"""

import dataclasses
import random
from collections.abc import Callable
from typing import NamedTuple

import torch

from fuzz.cases import MATRIX_RULES, Case, Mistake, is_trained


class Kind(NamedTuple):
    reason: str  # why it cannot be right
    fits: Callable[[Case], bool]  # whether it is a mistake in this case
    mistake: Mistake


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


KINDS = (
    Kind(
        "nobody can guess which ranks hold the other parts of a matrix, or copies of an expert",
        _is_unknown, Mistake(words="pg_collection", groups_none=True),
    ),
    Kind(
        "Newton-Schulz needs whole matrices, and flat shards cut them",
        _needs_whole, Mistake(words="whole matrices", fields=(("use_distributed_optimizer", True),)),
    ),
    Kind(
        "Lion supports only decoupled weight decay",
        lambda case: case.rule == "lion",
        Mistake(words="decoupled_weight_decay", fields=(("decoupled_weight_decay", False),)),
    ),
    Kind(
        "SGD has no second moment that could be kept in fewer bits",
        lambda case: case.rule == "sgd" and case.overrides == () and case.numbers in ("bf16", "fp16_constant"),
        Mistake(
            words="exp_avg_sq_dtype",
            fields=(("use_precision_aware_optimizer", True), ("exp_avg_sq_dtype", torch.bfloat16)),
        ),
    ),
    Kind(
        "gathers overlap with the forward of a wrapper, and the chunks are plain",
        lambda case: case.setup.is_sharded and not case.setup.wrapped,
        Mistake(words="overlap_param_gather", fields=(("overlap_param_gather", True),)),
    ),
    Kind(
        "there is no other chunk to step while the first is gathered",
        lambda case: case.setup.overlap_gather and case.setup.sharding == "flat" and case.setup.chunks == 1,
        Mistake(
            words="overlap_param_gather_with_optimizer_step",
            fields=(("overlap_param_gather_with_optimizer_step", True),),
        ),
    ),
    Kind(
        "the optimizer shards what the wrapper does not",
        lambda case: case.setup.wrapped and case.setup.sharding == "flat" and not case.setup.gathers_with_step,
        Mistake(
            words="use_distributed_optimizer",
            ddp_fields=tuple(
                (name, False) for name in ("use_distributed_optimizer", "overlap_param_gather", "align_param_gather")
            ),
        ),
    ),
    Kind(
        "ranks step by different rates",
        lambda case: case.setup.grid.size > 1, Mistake(words="lr", fields=(("lr", 0.5),), rank=1),
    ),
    Kind(
        "a rank does not know the optimizer",
        lambda case: case.setup.grid.size > 1, Mistake(words="optimizer", fields=(("optimizer", "adma"),), rank=0),
    ),
    Kind(
        "replicas cut their buffers into different buckets",
        _buckets_differ, Mistake(words="bucket_size", ddp_fields=(("bucket_size", 11),), rank=0),
    ),
    Kind(
        "gradients are averaged in the collective and divided by tokens",
        lambda case: case.setup.per_token,
        Mistake(
            words="average_in_collective",
            ddp_fields=(("average_in_collective", True), ("reduce_scatter_with_fp32_accumulation", False)),
        ),
    ),
    Kind(
        "only shards are summed in fp32 on the way",
        lambda case: case.setup.wrapped and not case.setup.is_sharded,
        Mistake(
            words="reduce_scatter_with_fp32_accumulation",
            ddp_fields=(
                ("reduce_scatter_with_fp32_accumulation", True), ("average_in_collective", False),
                ("grad_reduce_in_fp32", False),
            ),
        ),
    ),
)  # fmt: skip


def with_mistake(rng: random.Random, case: Case) -> Case:
    fitting = [kind.mistake for kind in KINDS if kind.fits(case)]
    if not fitting:
        return case
    mistake = rng.choice(fitting)
    setup = dataclasses.replace(case.setup, groups_none=case.setup.groups_none or mistake.groups_none)
    return dataclasses.replace(case, mistake=mistake, setup=setup, resume=None)
