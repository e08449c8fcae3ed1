"""Over gloo processes: torch.distributed.checkpoint saves and reshards the state of these optimizers."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from processes import Job, run_jobs
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_optimizer_state_dict,
    get_state_dict,
    set_optimizer_state_dict,
)
from torch_checkpoint_ranks import (
    AFTER,
    BEFORE,
    CONFIGS,
    DROP_INS,
    SHARDED,
    Run,
    broadcast_full,
    finished,
    finished_sharded,
    full_state,
    refusal_by_name,
    resume,
    resume_sharded,
    round_trip_before_the_first_step,
    save,
    save_sharded,
)

from opt_checkpoint import load_optimizer

KINDS = (*CONFIGS, *DROP_INS)
RESHARDED = [kind for kind in KINDS if kind != "drop-in, 8 bit"]  # its blocks follow the shards: other roundings
FLAT = ("adamw", "bf16", "drop-in")
FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("alone")
    for kind in KINDS:
        save(kind, str(folder / kind))
    return folder


@pytest.fixture(scope="module")
def worlds(alone: Path, tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Three ranks save; two load that, and what one process saved."""
    folder = tmp_path_factory.mktemp("worlds")
    three = {f"save {kind}": Job(save, (kind, str(folder / kind))) for kind in KINDS}
    three |= {f"save flat {kind}": Job(save, (kind, str(folder / f"flat {kind}"), True)) for kind in FLAT}
    three |= {f"again {kind}": Job(resume, (kind, str(folder / kind))) for kind in KINDS}
    three |= {f"finished {kind}": Job(finished, (kind,)) for kind in KINDS}
    three |= {f"before {kind}": Job(round_trip_before_the_first_step, (kind,)) for kind in KINDS}
    three |= {f"other {kind}": Job(save_sharded, (kind, str(folder / f"other {kind}"))) for kind in SHARDED}
    results = run_jobs(3, three)
    two = {f"resume {kind}": Job(resume, (kind, str(folder / kind))) for kind in KINDS}
    two |= {f"resume flat {kind}": Job(resume, (kind, str(folder / f"flat {kind}"), True)) for kind in FLAT}
    two |= {f"from alone {kind}": Job(resume, (kind, str(alone / kind))) for kind in KINDS}
    two |= {f"full {kind}": Job(full_state, (kind, True)) for kind in FLAT}
    two |= {f"broadcast {kind} {offload}": Job(broadcast_full, (kind, offload)) for kind in FLAT for offload in (0, 1)}
    two["refused dealt"] = Job(refusal_by_name, ("dealt",))
    for kind in SHARDED:
        two[f"refused {kind}"] = Job(refusal_by_name, (kind,))
        two[f"finished {kind}"] = Job(finished_sharded, (kind,))
        two[f"save {kind}"] = Job(save_sharded, (kind, str(folder / kind)))
        two[f"resume {kind}"] = Job(resume_sharded, (kind, str(folder / kind)))
        two[f"other {kind}"] = Job(resume_sharded, (kind, str(folder / f"other {kind}")))
    results |= run_jobs(2, two)
    results |= {f"alone {kind}": [resume(kind, str(folder / kind))] for kind in RESHARDED}
    return results


def assert_all_equal(got: list[dict[str, torch.Tensor]], want: dict[str, torch.Tensor], *, rtol: float = 0) -> None:
    for of_rank in got:
        assert of_rank.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(of_rank[name], want[name], rtol=rtol, atol=rtol)


@pytest.mark.parametrize("kind", RESHARDED)
@pytest.mark.parametrize("where", ["again", "resume", "from alone", "alone"])
def test_a_run_resumed_by_dcp_on_other_ranks_is_the_run_never_stopped(
    worlds: dict[str, list[Any]], where: str, kind: str
) -> None:
    # Products of gathered matrices may be summed in another order.
    assert_all_equal(worlds[f"{where} {kind}"], finished(kind), rtol=1e-6 if kind == "muon" else 0)


def test_eight_bit_state_resumes_exactly_on_the_same_ranks(worlds: dict[str, list[Any]]) -> None:
    assert_all_equal(worlds["again drop-in, 8 bit"], worlds["finished drop-in, 8 bit"][0])


@pytest.mark.parametrize("kind", FLAT)
def test_the_flattened_form_reshards_too(worlds: dict[str, list[Any]], kind: str) -> None:
    assert_all_equal(worlds[f"resume flat {kind}"], finished(kind))


@pytest.mark.parametrize("kind", FLAT)
@pytest.mark.parametrize("offload", [0, 1])
def test_the_whole_state_of_rank_0_loads_by_broadcast(worlds: dict[str, list[Any]], kind: str, offload: int) -> None:
    assert_all_equal(worlds[f"broadcast {kind} {offload}"], finished(kind))


@pytest.mark.parametrize("kind", FLAT)
def test_the_whole_state_has_the_shapes_of_whole_parameters(worlds: dict[str, list[Any]], kind: str) -> None:
    state, elsewhere = worlds[f"full {kind}"][0]["state"], worlds[f"full {kind}"][1]
    assert elsewhere == {}
    assert {name: tuple(of["exp_avg"].shape) for name, of in state.items()} == {
        "column.weight": (10, 10),
        "row.weight": (6, 7),
        "qkv.weight": (20, 3),
        "vector.weight": (9,),
    }
    assert all(float(of["step"]) == 3.0 for of in state.values())


@pytest.mark.parametrize("kind", RESHARDED)
def test_a_round_trip_before_the_first_step_changes_nothing(worlds: dict[str, list[Any]], kind: str) -> None:
    assert_all_equal(worlds[f"before {kind}"], finished(kind), rtol=1e-6 if kind == "muon" else 0)


def test_the_flattened_form_is_refused_where_it_loses_the_main_values() -> None:
    run = Run("drop-in, remainder").train(0, 2)
    state = get_optimizer_state_dict(run.model, run.optimizer, options=FLATTENED)
    with pytest.raises(ValueError, match="flatten_optimizer_state_dict=True loses it"):
        set_optimizer_state_dict(run.model, run.optimizer, state, options=FLATTENED)


def saved_without_choices(folder: Path, kind: str) -> dict[str, Any]:
    """Save a run in `folder`, with a flattened state that has no record of choices. Return this state."""
    run = Run(kind).train(0, BEFORE)
    model, optim = get_state_dict(run.model, run.optimizer, options=FLATTENED)
    older = {key: value for key, value in optim.items() if not key.endswith(".choices")}
    assert len(older) < len(optim)
    dcp.save({"model": model, "optim": older}, checkpoint_id=folder)
    return older


@pytest.mark.parametrize("kind", ["adamw", "bf16"])
def test_a_flattened_state_without_choices_is_refused_by_key_and_loads_as_documented(kind: str, tmp_path: Path) -> None:
    """The page on troubleshooting gives both ways to load it."""
    saved, missing = saved_without_choices(tmp_path, kind), "param_groups.column.weight.choices"
    by_file, in_memory = Run(kind, seed=50), Run(kind, seed=51)
    model, present = get_state_dict(by_file.model, by_file.optimizer, options=FLATTENED)
    with pytest.raises(CheckpointException, match=f"Missing key in checkpoint state_dict: optim.{missing}"):
        dcp.load({"optim": present}, checkpoint_id=tmp_path)
    with pytest.raises(KeyError, match=missing):
        set_optimizer_state_dict(in_memory.model, in_memory.optimizer, saved, options=FLATTENED)

    dcp.load({"model": model}, checkpoint_id=tmp_path)
    by_file.model.load_state_dict(model)
    load_optimizer(by_file.model, by_file.optimizer, tmp_path, at=("optim",))
    in_memory.model.load_state_dict(model)
    present = get_optimizer_state_dict(in_memory.model, in_memory.optimizer, options=FLATTENED)
    set_optimizer_state_dict(in_memory.model, in_memory.optimizer, {**present, **saved}, options=FLATTENED)
    resumed = [run.train(BEFORE, BEFORE + AFTER).weights() for run in (by_file, in_memory)]
    assert_all_equal(resumed, finished(kind))


@pytest.mark.parametrize("kind", [*SHARDED, "dealt"])
def test_state_of_several_ranks_is_refused_by_parameter_name(worlds: dict[str, list[Any]], kind: str) -> None:
    for message in worlds[f"refused {kind}"]:
        assert "use optimizer.sharded_state_dict" in message


@pytest.mark.parametrize("kind", SHARDED)
def test_state_of_several_ranks_saved_by_index_loads_on_the_same_ranks(worlds: dict[str, list[Any]], kind: str) -> None:
    assert_all_equal(worlds[f"resume {kind}"], worlds[f"finished {kind}"][0])


@pytest.mark.parametrize("kind", SHARDED)
def test_state_of_several_ranks_saved_by_index_is_refused_on_other_ranks(
    worlds: dict[str, list[Any]], kind: str
) -> None:
    for message in worlds[f"other {kind}"]:
        assert "Missing key in checkpoint state_dict" in message
