"""Explain a configuration without a model: for each kind of parameter its rule, dtypes and bytes of state."""

from collections.abc import Iterator
from typing import NamedTuple

import torch
from torch import nn

from opt_config import FlatShards, OptimizerConfig, Replicated, WholeParams
from opt_distributed.buffers import WorldSizes, short
from opt_paramgroups import describe, get_param_groups
from opt_stack.factory import plan_of, with_matrix_rule
from opt_stack.planning.draft import Draft
from opt_stack.planning.plan import NUMBERS_IN_WORDS, UnitPlan, kept_bytes, main_bytes
from opt_stack.rules.registry import Registry

WIDTH = 1024  # of the stand-ins; state that is not elementwise costs less per element for larger ones


class KindRow(NamedTuple):
    """One kind of parameter in one dtype."""

    kind: str
    dtype: str
    rule: str
    lr: float | None
    weight_decay: float
    numbers: str
    state: str
    bytes_per_element: float  # of unsharded state and main values, for a parameter of 1024 x 1024 or 1024 elements


def kind_rows(config: OptimizerConfig, rules: Registry) -> list[KindRow]:
    """Return a row for each kind of parameter in each dtype that `config` allows.

    Raises:
        ConfigError: the configuration is not valid for any model.
    """
    rows = []
    for dtype in dict.fromkeys((torch.float32, config.precision.params)):
        model = _stand_ins(dtype)
        groups = get_param_groups([model], config, with_matrix_rule(config, None, rules))
        plan = plan_of(Draft(config=config, chunks=[model], registry=rules, groups=groups, sizes=WorldSizes()))
        group_of = {id: group for group in groups for id in group["param_ids"]}
        unit_of = {id: unit for unit in plan.units for id in unit.ids}
        for id, meta in describe([model]).items():
            group, unit = group_of[id], unit_of[id]
            rows.append(
                KindRow(
                    kind=id.name,
                    dtype=short(dtype),
                    rule=unit.rule.name,
                    lr=group["lr"],
                    weight_decay=group["weight_decay"],
                    numbers=NUMBERS_IN_WORDS[unit.numbers[dtype]],
                    state=", ".join(f"{spec.name} {short(spec.dtype)}" for spec in unit.rule.state_specs) or "none",
                    bytes_per_element=_bytes(unit, dtype, meta.shape) / meta.numel,
                )
            )
    return rows


def meaning(config: OptimizerConfig, rules: Registry) -> str:
    """Return `kind_rows` as a table, then sharding, gradients and clipping. Raises ConfigError like `kind_rows`."""
    cells = [[name.replace("_", " ") for name in KindRow._fields], *map(_cells, kind_rows(config, rules))]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    table = ["  ".join(c.ljust(w) for c, w in zip(row, widths, strict=True)).rstrip() for row in cells]
    return "\n".join([*table, "", *_step_lines(config)])


def _stand_ins(dtype: torch.dtype) -> nn.Module:
    """Make a module with one parameter of each kind, on the meta device."""
    model = nn.Module()
    for name, shape in (("embedding", (WIDTH, WIDTH)), ("matrix", (WIDTH, WIDTH)), ("vector", (WIDTH,))):
        model.register_parameter(name, nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")))
    model.embedding.is_embedding_or_output_parameter = True  # type: ignore[union-attr]  # Megatron-Core's mark
    return model


def _bytes(unit: UnitPlan, dtype: torch.dtype, shape: tuple[int, ...]) -> int:
    numel = torch.Size(shape).numel()
    return main_bytes(unit.numbers[dtype], numel) + sum(kept_bytes(unit.rule, shape).values())


def _cells(row: KindRow) -> list[str]:
    return ["-" if value is None else f"{value:g}" if isinstance(value, float) else str(value) for value in row]


def _step_lines(config: OptimizerConfig) -> Iterator[str]:
    match config.sharding:
        case Replicated():
            yield "state: whole on every data-parallel rank"
        case FlatShards():
            yield "state: cut into equal runs of elements, one on each data-parallel rank"
        case WholeParams():
            yield "state: of matrices, whole ones dealt to the data-parallel ranks; of the rest, equal runs of elements"
    yield f"gradients: {short(config.precision.grads)}; clip: {config.clip_grad or 'off'}; {config.loss_scaling}"
