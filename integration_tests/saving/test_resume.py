"""A saved run resumes on other layouts, dtypes and numbers of ranks: on the same ranks with the same losses to the
last bit, on others as near as summation order allows. Real processes over gloo.

Moments kept in blocks of 8-bit codes are loaded where blocks lie elsewhere, or moments are wide, and back. They are
stored decoded, in fp32. What a load does is one encoding, on the blocks that are there; on the same blocks it changes
no value.
"""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from parity import sharded_state
from processes import FSDP2_RUNS, Job, run_jobs
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from tp_model import Grid, Part, cut

from opt_checkpoint import load, save
from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Comm
from opt_kernels.codecs import codecs_of
from opt_kernels.rules import Adam
from opt_stack import Optimizer, Registry, RuleEntry, get_optimizer

BEFORE, AFTER = 4, 8  # steps until the save, and in all
DIM, VOCAB = 16, 31
FSDP2 = "fully_shard"  # among a run's options: torch shards the model


class Tiny(nn.Module):
    """A transformer of one layer: matrices, biases, norms, an embedding, a head. `forward` gives the mean loss."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embedding = nn.Embedding(VOCAB, DIM)
        # No biases inside: a key's bias has no effect on the loss, so its gradient is rounding noise, and Adam turns
        # noise into full-size steps that differ between any two orders of summation.
        self.layer = nn.TransformerEncoderLayer(DIM, 2, 4 * DIM, 0.0, batch_first=True, norm_first=True, bias=False)
        self.head = nn.Linear(DIM, VOCAB)

    def forward(self, codes: Tensor) -> Tensor:
        logits = self.head(self.layer(self.embedding(codes[:, :-1])))
        return nn.functional.cross_entropy(logits.flatten(0, 1).float(), codes[:, 1:].flatten())


class Case(NamedTuple):
    """Configurations of the saving and the loading run, by name."""

    saved: dict[str, Any]
    loaded: dict[str, Any]
    near: float = 1e-4  # of losses on another number of ranks: fp32 summation order, grown by a few steps of Adam


class Run:
    def __init__(self, options: dict[str, Any]):
        self.model = Tiny().to(torch.bfloat16 if "bf16" in options else torch.float32)
        if FSDP2 in options and dist.is_initialized():
            fully_shard(self.model.layer)
            fully_shard(self.model)
        for module in (self.model.embedding, self.model.head):  # sharding makes new parameters, without attributes
            module.weight.is_embedding_or_output_parameter = True
        fields = {name: value for name, value in options.items() if name != FSDP2}
        self.optimizer = get_optimizer(OptimizerConfig(lr=3e-3, clip_grad=0.3, **fields), [self.model])

    def sharded(self) -> dict[str, Any]:
        return sharded_state(self.model, self.optimizer)

    def train(self, *steps: int) -> list[float]:
        """Losses of the joined batch, comparable between numbers of ranks, which train on equal parts of it."""
        losses = []
        for step in range(*steps):
            joined = torch.randint(VOCAB, (8, 13), generator=torch.Generator().manual_seed(100 + step))
            batch = joined.chunk(dist.get_world_size())[dist.get_rank()] if dist.is_initialized() else joined
            self.model(batch).backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            losses.append(self.model(joined).item())
        return losses


def run_and_save(options: dict[str, Any], path: str) -> list[float]:
    run = Run(options)
    run.train(BEFORE)
    save(run.sharded(), path)
    return run.train(BEFORE, AFTER)


def resume(options: dict[str, Any], path: str) -> list[float]:
    run = Run(options)
    run.optimizer.load_state_dict(load(run.sharded(), path, dtype="cast").state["optimizer"])
    return run.train(BEFORE, AFTER)


ZERO: dict[str, Any] = {"use_distributed_optimizer": True}
MUON: dict[str, Any] = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}
WHOLE = {**MUON, "use_layer_wise_distributed_optimizer": True}
BF16: dict[str, Any] = {"bf16": True}
AWARE: dict[str, Any] = {"use_precision_aware_optimizer": True}
NARROW = {**AWARE, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
SHORT = {**AWARE, "main_params_dtype": torch.int8}
FP8 = {**AWARE, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
TORCH: dict[str, Any] = {FSDP2: True}
CASES = {
    "flat": Case(ZERO, ZERO),
    "replicated to flat": Case({}, ZERO),
    "flat to replicated, bf16": Case(ZERO | BF16, BF16, near=0.02),
    "remainders to copies, narrow moments to wide": Case(ZERO | BF16 | NARROW, ZERO | BF16, near=0.02),
    "8-bit moments to wide": Case(ZERO | BF16 | FP8, ZERO | BF16, near=0.02),
    "24-bit mains, flat to fully_shard": Case(ZERO | BF16 | SHORT, TORCH | BF16 | SHORT, near=0.02),
    "24-bit mains, fully_shard to copies": Case(TORCH | BF16 | SHORT, BF16, near=0.02),
    "layer-wise to replicated muon": Case(WHOLE, MUON),
    "fully_shard": Case(TORCH, TORCH),
    "fully_shard to flat, bf16": Case(TORCH | BF16 | NARROW, ZERO | BF16, near=0.02),
    "muon, fully_shard to layer-wise": Case(TORCH | MUON, WHOLE),
    "muon, layer-wise to fully_shard": Case(WHOLE, TORCH | MUON),
}
if not FSDP2_RUNS:
    CASES = {name: case for name, case in CASES.items() if FSDP2 not in case.saved | case.loaded}


@pytest.fixture(scope="module")
def losses(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[float]]:
    """Losses of the steps after the save: of the uninterrupted run, and resumed on two, four and one rank."""
    folder = tmp_path_factory.mktemp("checkpoints")
    paths = {name: str(folder / name.replace(" ", "-")) for name in CASES}
    two = {f"uninterrupted {name}": Job(run_and_save, (case.saved, paths[name])) for name, case in CASES.items()}
    two |= {f"two {name}": Job(resume, (case.saved, paths[name])) for name, case in CASES.items()}
    four = {f"four {name}": Job(resume, (case.loaded, paths[name])) for name, case in CASES.items()}
    found = {job: ranks[0] for job, ranks in (run_jobs(2, two) | run_jobs(4, four)).items()}
    return found | {f"one {name}": resume(case.loaded, paths[name]) for name, case in CASES.items()}


@pytest.mark.parametrize("name", CASES)
def test_on_the_same_ranks_a_resumed_run_has_the_uninterrupted_runs_losses(name: str, losses: Any) -> None:
    assert losses[f"two {name}"] == losses[f"uninterrupted {name}"]


@pytest.mark.parametrize("name", CASES)
def test_on_other_ranks_layouts_and_numbers_it_has_nearly_the_same(name: str, losses: Any) -> None:
    for where in ("four", "one"):
        assert losses[f"{where} {name}"] == pytest.approx(losses[f"uninterrupted {name}"], abs=CASES[name].near)


# --- moments in blocks of codes ---------------------------------------------------------------------------------------

MOMENTS = ("exp_avg", "exp_avg_sq")
RULES = {
    "wide": Adam(),
    "int8": Adam(exp_avg_dtype=torch.int8, exp_avg_sq_dtype=torch.uint8),
    "fp8": Adam(exp_avg_dtype=torch.float8_e4m3fn, exp_avg_sq_dtype=torch.float8_e4m3fn),
}
NARROW_RULES = ("int8", "fp8")
SHAPES = {"rows": ((72, 24), 0), "columns": ((24, 48), 1), "vector": ((24,), None)}  # the dim that is cut
State = dict[str, dict[str, Tensor]]


class Elsewhere(Alone):
    """A communicator with another rank's index, for code that only needs the index."""

    def __init__(self, rank: int, size: int):
        self.rank, self.size = rank, size


def begin(rule: str, *, tp: Comm | None = None, dp: Comm | None = None) -> tuple[nn.Module, Optimizer]:
    """This rank's part of matrices that tensor parallelism cuts by rows and by columns, and of a vector."""
    model, generator = nn.Module(), torch.Generator().manual_seed(0)
    for name, (shape, dim) in SHAPES.items():
        model.add_module(name, Part(torch.randn(shape, generator=generator), tp or Alone(), dim=dim))
    hyper = {"betas": (0.9, 0.95), "eps": 1e-8}
    entry = RuleEntry(name="mine", summary="", make=lambda config: RULES[rule], hyper=lambda config: hyper)
    options = OptimizerConfig(optimizer="mine", lr=1e-2, use_distributed_optimizer=dp is not None)
    roles = Grid(tp=Alone(), dp=dp or Alone(), world=dp or Alone()).roles
    return model, get_optimizer(options, [model], pg_collection=roles, rules=Registry().with_rule(entry))


def sharded(model: nn.Module, optimizer: Optimizer) -> dict[str, Any]:
    weights = {name: part.sharded(name) for name, part in model.named_children()}
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def resumed(path: Path, rule: str, **comms: Comm) -> State:
    model, optimizer = begin(rule, **comms)
    optimizer.load_state_dict(load(sharded(model, optimizer), path).state["optimizer"])
    return states(optimizer)


def states(optimizer: Optimizer) -> State:
    state = optimizer.state_dict()
    return {
        name.removesuffix(".weight"): {key.partition("[")[0]: value.clone() for key, value in state["state"][i].items()}
        for group in state["param_groups"]
        for i, name in zip(group["params"], group["param_names"], strict=True)
        if i in state["state"]
    }


def decoded(rule: str, state: dict[str, Tensor], moment: str) -> Tensor:
    if rule == "wide":
        return state[moment]
    values = torch.empty(state[moment].numel())
    codecs_of(RULES[rule])[moment].decode_(values, state[moment].flatten(), state[f"{moment}_scale"])
    return values.view(state[moment].shape)


def encoded(rule: str, moment: str, values: Tensor) -> dict[str, Tensor]:
    if rule == "wide":
        return {moment: values}
    codec = codecs_of(RULES[rule])[moment]
    codes, scales = torch.empty(values.numel(), dtype=codec.dtype), torch.empty(-(-values.numel() // codec.block))
    codec.encode_(codes, scales, values.flatten())
    return {moment: codes.view(values.shape), f"{moment}_scale": scales}


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, State]]:
    """By rule: a run after three steps, and its state then."""
    found = {}
    for rule in RULES:
        model, optimizer = begin(rule)
        for step in range(3):
            generator = torch.Generator().manual_seed(1 + step)
            for param in model.parameters():  # rows of other sizes, so that blocks differ
                sizes = torch.logspace(-1, 0, param.shape[0]).view(-1, *[1] * (param.dim() - 1))
                param.grad = torch.randn(param.shape, generator=generator) * sizes
            optimizer.step()
        path = tmp_path_factory.mktemp("narrow") / rule
        save(sharded(model, optimizer), path)
        found[rule] = path, states(optimizer)
    return found


def bits_equal(a: Tensor, b: Tensor) -> bool:
    return a.dtype == b.dtype and torch.equal(a.contiguous().view(torch.uint8), b.contiguous().view(torch.uint8))


@pytest.mark.parametrize("ranks", [1, 2, 3])
@pytest.mark.parametrize("rule", NARROW_RULES)
def test_flat_shards_of_any_number_of_ranks_hold_the_very_values(rule: str, ranks: int, saved: Any) -> None:
    """Shards are cut on whole blocks of the parameter, so no block is ever another one. Codes may differ where a scale
    is twice as large and no bit is lost."""
    path, want = saved[rule]
    by_rank = run_threads(ranks, lambda comm: resumed(path, rule, dp=comm))
    for name, state in want.items():
        for moment in MOMENTS:
            got = torch.cat([decoded(rule, part[name], moment).flatten() for part in by_rank if name in part])
            assert torch.equal(got, decoded(rule, state, moment).flatten()), f"{moment} of {name}"


@pytest.mark.parametrize("tp_rank", [None, 0, 1])
@pytest.mark.parametrize(("before", "after"), [(a, b) for a in RULES for b in RULES if {a, b} != {"wide"}])
def test_loaded_moments_are_rounded_once_on_the_blocks_that_are_there(
    before: str, after: str, tp_rank: int | None, saved: Any
) -> None:
    """On a half of each matrix, by rows or by columns, blocks hold elements of several of the saved ones."""
    path, want = saved[before]
    state = resumed(path, after, tp=Alone() if tp_rank is None else Elsewhere(tp_rank, 2))
    for name, (_, dim) in SHAPES.items():
        for moment in MOMENTS:
            values = decoded(before, want[name], moment)
            values = values if tp_rank is None else cut(values, tp_rank, 2, dim=dim)
            expected = encoded(after, moment, values)
            if before == after:  # codes may differ where a scale is twice as large
                assert torch.equal(decoded(after, state[name], moment), decoded(after, expected, moment))
            else:
                assert all(bits_equal(state[name][key], value) for key, value in expected.items())
