"""Fields of dataclasses, with their defaults and the docstrings that follow them in the source."""

import ast
import dataclasses
import inspect
import textwrap
from collections.abc import Iterator
from fnmatch import fnmatch
from pathlib import Path
from typing import NamedTuple

from docstrings import markdown

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_config.data_parallel_config import UNSUPPORTED_DATA_PARALLEL_FIELDS


class Field(NamedTuple):
    """A documented field."""

    name: str
    kind: str  # source text of its type
    default: str  # source text; empty if the field has none
    text: str  # Markdown


def fields_of(kind: type) -> Iterator[Field]:
    """Yield the fields that a dataclass or named tuple itself declares and documents."""
    if not (dataclasses.is_dataclass(kind) or hasattr(kind, "_fields")):
        return
    try:
        (tree,) = ast.parse(textwrap.dedent(inspect.getsource(kind))).body
    except (OSError, TypeError):
        return
    assert isinstance(tree, ast.ClassDef)
    for line, after in zip(tree.body, tree.body[1:], strict=False):
        if isinstance(line, ast.AnnAssign) and isinstance(line.target, ast.Name):
            match after:
                case ast.Expr(value=ast.Constant(value=str(text))):
                    default = ast.unparse(line.value) if line.value else ""
                    default = "" if default.startswith("field(") else default
                    yield Field(line.target.id, ast.unparse(line.annotation), default, markdown(text))


def field_list(kind: type) -> list[str]:
    """The documented fields as lines of a Markdown list."""
    return [_item(field) for field in fields_of(kind)]


def _item(field: Field) -> str:
    default = f" = {field.default}" if field.default else ""
    return f"- `{field.name}: {field.kind}{default}`: {' '.join(field.text.split())}"


# The fields of both configurations by topic: patterns of names.
TOPICS = {
    "OptimizerConfig": {
        "Rule": "optimizer optimizer_options decoupled_weight_decay",
        "Learning rates and weight decay": "*lr weight_decay apply_wd_to_qk_layernorm",
        "Precision": "fp16 bf16 fp8_recipe params_dtype main_* *_dtype store_param_remainders "
        "use_precision_aware_optimizer reuse_grad_buf_for_mxfp8_param_ag",
        "Loss scale": "loss_scale* initial_loss_scale min_loss_scale hysteresis",
        "Clipping and skipped steps": "clip_grad grad_norm_skip_threshold skip_*",
        "Sharding and communication": "use_distributed_optimizer use_layer_wise_distributed_optimizer overlap_param_*",
        "CPU offload": "optimizer_cpu_offload optimizer_offload_* *cpu*",
        "Adam, SGD, Lion": "adam_* sgd_* lion_*",
        "Muon": "muon_*",
        "AdaptiveMuon": "adaptive_muon_*",
        "SOAP": "soap_*",
        "Averages of weights": "ema_*",
        "Logging and graphs": "*",
    },
    "DistributedDataParallelConfig": {
        "Reduction of gradients": "grad_* overlap_grad_reduce reduce_* average_* param_name_* *bucket*",
        "Gathering of parameters": "overlap_param_gather align_param_gather fp8_param_gather reuse_*",
        "Sharding": "use_distributed_optimizer num_distributed_optimizer_instances",
        "Checks: NaN and large gradients": "check_*",
        "NCCL": "*",
    },
}


def by_topic(kind: type) -> Iterator[tuple[str, list[Field]]]:
    """The documented fields of a configuration by topic, each in the first topic that names it."""
    left = list(fields_of(kind))
    for topic, patterns in TOPICS[kind.__name__].items():
        chosen = [field for field in left if any(fnmatch(field.name, pattern) for pattern in patterns.split())]
        left = [field for field in left if field not in chosen]
        yield topic, chosen


def write(folder: Path) -> None:
    """Write `config_fields.md`: the fields of both configurations, by topic."""
    parts = []
    for kind in (OptimizerConfig, DistributedDataParallelConfig):
        parts += [f"## {kind.__name__}", ""]
        for topic, chosen in by_topic(kind):
            parts += [f"### {topic}", "", *map(_item, chosen), ""]
    parts += ["### Accepted with their defaults only", "", "These fields of Megatron-Core exist for its callers:", ""]
    parts += [f"- `{name}`: {reason}" for name, reason in UNSUPPORTED_DATA_PARALLEL_FIELDS.items()]
    (folder / "config_fields.md").write_text("\n".join([*parts, ""]))
