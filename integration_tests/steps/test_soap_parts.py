"""SOAP on fused rows that are separate matrices: assigned to ranks, saved, loaded, refused under another split."""

from pathlib import Path
from typing import Any

import pytest
import torch
from named import Named
from parity import roles_over, sharded_state
from torch import Tensor, nn

from opt_checkpoint import CheckpointKeyError, load, save
from opt_config import OptimizerConfig
from opt_distributed import StateError, run_threads
from opt_distributed.comm import Alone, Comm
from opt_stack import Optimizer, get_optimizer

# Shapes that differ, so that no two matrices are batched on one rank and not on another.
SHAPES = {"qkv": (12, 8), "heads": (8, 6), "sizes": (9, 5), "whole": (6, 6), "in_turn": (14, 7), "kv": (10, 4)}
MARKS: dict[str, dict[str, Any]] = {
    "qkv": {"qkv_split_shapes": (4, 1, 1)},
    "heads": {"head_rows": 2},
    "sizes": {"split_sizes": (6, 3)},
    "in_turn": {"split_rows": (1, 1)},
    "kv": {"head_rows": (3, 2)},
}
FIELDS: dict[str, Any] = {"optimizer": "soap", "lr": 0.1, "clip_grad": 0.0, "soap_split_qkv": True}
STEPS = 4


def numbers(name: str, step: int) -> Tensor:
    """Gradients of a step, or weights before the first."""
    generator = torch.Generator().manual_seed(10 * step + sorted(SHAPES).index(name))
    return torch.randn(SHAPES[name], generator=generator)


def made(comm: Comm | None = None, marks: Any = MARKS, **changes: Any) -> tuple[nn.Module, Optimizer]:
    model = Named(**{name: numbers(name, 0) for name in SHAPES})
    for name, of_param in marks.items():
        vars(model.get_parameter(name)).update(of_param)
    roles = roles_over(comm or Alone())
    return model, get_optimizer(OptimizerConfig(**{**FIELDS, **changes}), [model], {}, pg_collection=roles)


def train(model: nn.Module, optimizer: Optimizer, steps: range) -> dict[str, Tensor]:
    for step in steps:
        for name, param in model.named_parameters():
            param.grad = numbers(name, 1 + step)
        optimizer.step()
    return {name: param.detach().clone() for name, param in model.named_parameters()}


@pytest.mark.parametrize("rule", ["soap", "soap_muon"])
def test_parts_of_one_process_resume_on_ranks_of_whole_matrices(tmp_path: Path, rule: str) -> None:
    model, optimizer = made(optimizer=rule)
    train(model, optimizer, range(2))
    save(sharded_state(model, optimizer), tmp_path / "saved")
    want = train(model, optimizer, range(2, STEPS))

    def rank_main(comm: Comm) -> list[dict[str, Tensor]]:
        begun, resumed = (made(comm, optimizer=rule, use_layer_wise_distributed_optimizer=True) for _ in range(2))
        resumed[1].load_state_dict(load(sharded_state(*resumed), tmp_path / "saved").state["optimizer"])
        return [train(*begun, range(STEPS)), train(*resumed, range(2, STEPS))]

    for ranks in (1, 2, 4):
        for found in run_threads(ranks, rank_main):
            assert all(torch.equal(weights[name], want[name]) for weights in found for name in SHAPES)


# How rows were split by the saving run; how they are now; what the refusal says.
Split = tuple[Any, dict[str, Any]]
PARTS: Split = (MARKS, {})
OTHERS: dict[str, tuple[Split, Split, str]] = {
    "fused rows whole": (PARTS, (MARKS, {"soap_split_qkv": False}), r"rows split as '4-1-1', .* for whole matrices"),
    "other sizes": (PARTS, ({**MARKS, "sizes": {"split_sizes": (3, 6)}}, {}), r"rows split as '6-3', and is .*'3-6'"),
    "larger heads": (PARTS, ({**MARKS, "heads": {"head_rows": 4}}, {}), r"rows split as '2-each', and is .*'4-each'"),
    "saved whole": (({}, {}), PARTS, r"was saved for whole matrices, and is asked for rows split as"),
}


@pytest.mark.parametrize("other", OTHERS)
def test_state_of_another_split_is_refused_by_option_name(tmp_path: Path, other: str) -> None:
    (marks, changes), (marks_now, changes_now), message = OTHERS[other]
    model, optimizer = made(marks=marks, **changes)
    train(model, optimizer, range(2))
    save(sharded_state(model, optimizer), tmp_path / "saved")
    model, refusing = made(marks=marks_now, **changes_now)
    says = "1 fused q, k and v taken as one matrix each; soap_split_qkv=True splits them" in str(refusing.plan)
    assert says == (other == "fused rows whole")
    with pytest.raises(CheckpointKeyError, match=f"{message}.*set soap_split_qkv, head_rows, split_sizes and split_"):
        load(sharded_state(model, refusing), tmp_path / "saved")
    loaded = load(sharded_state(model, refusing), tmp_path / "saved", strict="return_all").state["optimizer"]
    with pytest.raises(ValueError, match=r"exp_avg, exp_avg_sq was loaded and .*L.* was not"):
        refusing.load_state_dict(loaded)
    with pytest.raises(StateError, match="lacks L"):
        refusing.load_state_dict(optimizer.state_dict())
