"""Over gloo processes: torch.distributed.checkpoint and opt_checkpoint save and reshard the state of our optimizers."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import cut_ranks
import pytest
import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
import torch.distributed.checkpoint.state_dict as torch_states
from cut_ranks import fsdp
from processes import FSDP2_RUNS, Job, refusal, run_jobs
from torch import Tensor
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict, set_optimizer_state_dict

import opt_checkpoint
from opt_checkpoint import sharded_model, sharded_optimizer
from opt_config import OptimizerConfig
from opt_kernels.optim import AdamW

pytestmark = pytest.mark.skipif(not FSDP2_RUNS, reason="this torch runs FSDP2 on GPUs only")
SHAPES = {"column": (10, 10), "row": (6, 7), "qkv": (20, 3)}
BEFORE = 3  # steps before a checkpoint
AFTER = 2  # steps after it
BASE: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0, "muon_fp32_matmul_prec": "highest"}
CONFIGS: Mapping[str, dict[str, Any]] = {
    "adamw": {},
    "sgd": {"optimizer": "sgd"},
    "muon": {"optimizer": "muon"},
    "bf16": {"bf16": True},
    "bf16, remainder": {"bf16": True, "use_precision_aware_optimizer": True, "store_param_remainders": True},
}
# Of parameters that torch did not shard: state cut over ranks. "dealt": a rank each keeps SOAP's factors of a matrix.
SHARDED: Mapping[str, dict[str, Any]] = {
    "flat shards": {"bf16": True, "use_distributed_optimizer": True},
    "layer-wise": {"bf16": True, "optimizer": "muon", "use_layer_wise_distributed_optimizer": True},
}
BY_RANK = {**SHARDED, "dealt": {"optimizer": "soap"}}
DROP_INS: Mapping[str, dict[str, Any]] = {
    "drop-in": {},
    "drop-in, fp32 mains": {"mains": "float32"},
    "drop-in, remainder": {"mains": "remainder"},
    "drop-in, 8 bit": {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8},
}
KINDS = (*CONFIGS, *DROP_INS)
EIGHT_BIT = "drop-in, 8 bit"
# Blocks of eight-bit state follow the shards: on other shards they round otherwise, by about one part in 127.
RESHARDED = [kind for kind in KINDS if kind != EIGHT_BIT]
FLAT = ("adamw", "bf16", "drop-in")
FLATTENED = StateDictOptions(flatten_optimizer_state_dict=True)
Weights = dict[str, Tensor]


class Run(cut_ranks.Run):
    """Sharded by FSDP2 where there are ranks, and after some steps."""

    def __init__(self, kind: str, *, seed: int = 0, steps: int = 0):
        self.drop_in = DROP_INS.get(kind)
        fields = {**CONFIGS, **BY_RANK}.get(kind, {"bf16": "mains" in (self.drop_in or {})})
        super().__init__(OptimizerConfig(**{**BASE, **fields}), SHAPES, None if kind in SHARDED else fsdp, seed=seed)
        self.train(0, steps)

    def build(self) -> Any:
        if self.drop_in is None:
            return super().build()
        return AdamW(self.net.parameters(), lr=0.02, weight_decay=0.1, **self.drop_in)

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            self.set_grads(step)
            self.optimizer.step()
        self.optimizer.zero_grad()

    def finish(self) -> Weights:
        self.train(BEFORE, BEFORE + AFTER)
        return self.weights()

    def states(self, options: StateDictOptions | None = None) -> dict[str, Any]:
        model, optim = torch_states.get_state_dict(self.net, self.optimizer, options=options)
        return {"model": model, "optim": optim}

    def by_index(self) -> dict[str, Any]:
        """As dcp takes any state dict."""
        return {"model": self.net.state_dict(), "optim": self.optimizer.state_dict()}

    def set_states(self, model: dict[str, Any], optim: dict[str, Any], options: StateDictOptions | None) -> None:
        torch_states.set_model_state_dict(self.net, model, options=options)
        set_optimizer_state_dict(self.net, self.optimizer, optim, options=options)


# --- what a rank does; a resuming run begins with another model and an optimizer without a step -----------------------


def finished(kind: str) -> Weights:
    return Run(kind, steps=BEFORE).finish()


def save(kind: str, path: str, options: StateDictOptions | None = None) -> None:
    dcp.save(Run(kind, steps=BEFORE).states(options), checkpoint_id=path)


def resume(kind: str, path: str, options: StateDictOptions | None = None) -> Weights:
    run = Run(kind, seed=50)
    state = run.states(options)
    dcp.load(state, checkpoint_id=path)
    run.set_states(state["model"], state["optim"], options)
    return run.finish()


def save_with_ours(kind: str, path: str) -> None:
    run = Run(kind, steps=BEFORE)
    state = {"model": sharded_model(run.net), "optimizer": sharded_optimizer(run.net, run.optimizer)}
    opt_checkpoint.save(state, path)


def resume_with_ours(kind: str, path: str) -> Weights:
    run = Run(kind, seed=50)
    opt_checkpoint.load({"model": sharded_model(run.net)}, path)
    opt_checkpoint.load_optimizer(run.net, run.optimizer, path)
    return run.finish()


def broadcast_full(kind: str, cpu_offload: bool) -> tuple[dict[str, Any], Weights]:
    """Rank 0's whole state, and the weights where it gave that to all."""
    state = Run(kind, steps=BEFORE).states(StateDictOptions(full_state_dict=True, cpu_offload=cpu_offload))
    given = state if dist.get_rank() == 0 else {"model": {}, "optim": {}}
    again = Run(kind, seed=50)
    again.set_states(**given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True))
    return state["optim"], again.finish()


def round_trip_before_the_first_step(kind: str) -> Weights:
    run = Run(kind)
    set_optimizer_state_dict(run.net, run.optimizer, get_optimizer_state_dict(run.net, run.optimizer))
    run.optimizer.load_state_dict(run.optimizer.state_dict())
    run.train(0, BEFORE)
    return run.finish()


def refusal_by_name(kind: str) -> str:
    """What torch's function for states by parameter name raises."""
    run = Run(kind, steps=BEFORE)
    return refusal(lambda: get_optimizer_state_dict(run.net, run.optimizer))


def save_by_index(kind: str, path: str) -> None:
    dcp.save(Run(kind, steps=BEFORE).by_index(), checkpoint_id=path)


def resume_by_index(kind: str, path: str) -> Weights | str:
    """Weights after the last steps, or what dcp raised."""
    run = Run(kind, seed=50)
    state = run.by_index()
    try:
        dcp.load(state, checkpoint_id=path)
    except CheckpointException as error:
        return str(error)
    run.net.load_state_dict(state["model"])
    run.optimizer.load_state_dict(state["optim"])
    return run.finish()


# --- tests ------------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """One process and three ranks save; two load both."""
    folder = tmp_path_factory.mktemp("worlds")
    at = lambda name: str(folder / name)

    def jobs(name: str, kinds: Any, main: Any, path: str = "", *others: Any) -> dict[str, Job]:
        return {f"{name} {k}": Job(main, (k, *[at(path.format(k))][: bool(path)], *others)) for k in kinds}

    for kind in KINDS:
        save(kind, at(f"alone {kind}"))
    for kind in DROP_INS:
        save_with_ours(kind, at(f"ours alone {kind}"))
    three = jobs("save", KINDS, save, "{}") | jobs("again", KINDS, resume, "{}")
    three |= jobs("finished", [EIGHT_BIT], finished) | jobs("before", KINDS, round_trip_before_the_first_step)
    three |= jobs("save flat", FLAT, save, "flat {}", FLATTENED)
    three |= jobs("save other", SHARDED, save_by_index, "other {}")
    two = jobs("resume", KINDS, resume, "{}") | jobs("from alone", KINDS, resume, "alone {}")
    two |= jobs("save ours", DROP_INS, save_with_ours, "ours {}") | jobs("ours", DROP_INS, resume_with_ours, "ours {}")
    two |= jobs("ours from alone", DROP_INS, resume_with_ours, "ours alone {}")
    two |= jobs("resume flat", FLAT, resume, "flat {}", FLATTENED)
    two |= jobs("broadcast", FLAT, broadcast_full, "", False) | jobs("to the CPU", FLAT, broadcast_full, "", True)
    two |= jobs("save", SHARDED, save_by_index, "{}") | jobs("resume", SHARDED, resume_by_index, "{}")
    two |= jobs("other", SHARDED, resume_by_index, "other {}") | jobs("finished", SHARDED, finished)
    found = run_jobs(3, three) | run_jobs(2, two | jobs("refused", BY_RANK, refusal_by_name))
    found |= {f"alone {kind}": [resume(kind, at(kind))] for kind in RESHARDED}
    found |= {f"ours alone {kind}": [resume_with_ours(kind, at(f"ours {kind}"))] for kind in DROP_INS}
    return found | {f"ours never left {kind}": [resume_with_ours(kind, at(f"ours alone {kind}"))] for kind in DROP_INS}


def assert_all_equal(got: list[Weights], want: Weights, *, rtol: float = 0) -> None:
    for of_rank in got:
        assert of_rank.keys() == want.keys()
        for name in want:
            torch.testing.assert_close(of_rank[name], want[name], rtol=rtol, atol=rtol)


@pytest.mark.parametrize("kind", RESHARDED)
def test_resume_by_dcp_on_other_ranks_equals_the_unbroken_run(worlds: Any, kind: str) -> None:
    for where in ("again", "resume", "from alone", "alone", "before"):
        # Products of gathered matrices may be summed in another order.
        assert_all_equal(worlds[f"{where} {kind}"], finished(kind), rtol=1e-6 if kind == "muon" else 0)


def test_eight_bit_state_resumes_exactly_on_the_same_ranks(worlds: Any) -> None:
    assert_all_equal(worlds[f"again {EIGHT_BIT}"], worlds[f"finished {EIGHT_BIT}"][0])


@pytest.mark.parametrize("kind", DROP_INS)
def test_drop_ins_alone_and_under_fsdp2_are_saved_and_resharded(worlds: Any, kind: str) -> None:
    """The state is local shards, while parameters are DTensors."""
    assert_all_equal(worlds[f"ours never left {kind}"], finished(kind))
    for where in ("ours", "ours from alone", "ours alone"):
        assert_all_equal(worlds[f"{where} {kind}"], finished(kind), rtol=1e-2 if "8 bit" in kind else 0)


@pytest.mark.parametrize("kind", FLAT)
def test_flattened_and_broadcast_states_reshard_too(worlds: Any, kind: str) -> None:
    assert_all_equal(worlds[f"resume flat {kind}"], finished(kind))
    for name in ("broadcast", "to the CPU"):
        (whole, weights), (elsewhere, others) = worlds[f"{name} {kind}"]
        assert_all_equal([weights, others], finished(kind))
        assert elsewhere == {} or name == "broadcast"
        shapes = {name: tuple(of["exp_avg"].shape) for name, of in whole["state"].items()}
        assert shapes == {f"{name}.weight": shape for name, shape in {**SHAPES, "vector": (9,)}.items()}
        assert all(float(of["step"]) == 3.0 for of in whole["state"].values())


def test_a_flattened_form_that_loses_main_values_is_refused() -> None:
    run = Run("drop-in, remainder", steps=2)
    state = get_optimizer_state_dict(run.net, run.optimizer, options=FLATTENED)
    with pytest.raises(ValueError, match="flatten_optimizer_state_dict=True loses it"):
        set_optimizer_state_dict(run.net, run.optimizer, state, options=FLATTENED)


@pytest.mark.parametrize("kind", ["adamw", "bf16"])
def test_flattened_state_without_choices_is_refused_by_key(kind: str, tmp_path: Path) -> None:
    """The page on troubleshooting gives both ways to load it."""
    state = Run(kind, steps=BEFORE).states(FLATTENED)
    missing = "param_groups.column.weight.choices"
    saved = {key: value for key, value in state["optim"].items() if not key.endswith(".choices")}
    assert len(saved) < len(state["optim"])
    dcp.save({"model": state["model"], "optim": saved}, checkpoint_id=tmp_path)
    by_file = Run(kind, seed=50)
    in_memory = Run(kind, seed=51)
    present = by_file.states(FLATTENED)
    with pytest.raises(CheckpointException, match=f"Missing key in checkpoint state_dict: optim.{missing}"):
        dcp.load({"optim": present["optim"]}, checkpoint_id=tmp_path)
    with pytest.raises(KeyError, match=missing):
        set_optimizer_state_dict(in_memory.net, in_memory.optimizer, saved, options=FLATTENED)

    dcp.load({"model": present["model"]}, checkpoint_id=tmp_path)
    by_file.net.load_state_dict(present["model"])
    opt_checkpoint.load_optimizer(by_file.net, by_file.optimizer, tmp_path, at=("optim",))
    in_memory.net.load_state_dict(present["model"])
    complete = {**in_memory.states(FLATTENED)["optim"], **saved}
    set_optimizer_state_dict(in_memory.net, in_memory.optimizer, complete, options=FLATTENED)
    assert_all_equal([by_file.finish(), in_memory.finish()], finished(kind))


@pytest.mark.parametrize("kind", BY_RANK)
def test_state_of_several_ranks_loads_by_index_but_not_by_name(worlds: Any, kind: str) -> None:
    assert all("use optimizer.sharded_state_dict" in message for message in worlds[f"refused {kind}"])
    if kind in SHARDED:
        assert_all_equal(worlds[f"resume {kind}"], worlds[f"finished {kind}"][0])
        assert all("Missing key in checkpoint state_dict" in message for message in worlds[f"other {kind}"])
