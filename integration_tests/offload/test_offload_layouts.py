"""Offload in every layout, with every kind of rule and state: the step, and what is saved, are those without it."""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import laid_out_ranks
import pytest
import torch
import tp_training
from fake_accelerator import DeferredRank, run_deferred
from offloaded import ALL, HALF, built
from on_device import NUM_ORDERS, SHAPES, SIZE, STEPS, Trained, equal, iterate, launched, outcome
from parity import Case, Net, Numbers, Spread, Wrapping, grads_of, roles_over
from processes import Job, run_jobs
from torch import Tensor, nn
from tp_model import Grid, run_grid

from opt_checkpoint import load, save, sharded_model
from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Comm
from opt_distributed.comm.threads import ThreadComm
from opt_kernels import hooks
from opt_stack import Optimizer, get_optimizer

pytestmark = pytest.mark.usefixtures(launched.__name__)

MASK = (hooks.CautiousUpdate(), hooks.CoupledDecay(), hooks.ClipUpdateRms(0.05))
CENTERED = (hooks.CentralizeGradient(), hooks.ClipUpdateRms(0.05))


def same_bits(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> bool:
    return found.keys() == expected.keys() and all(torch.equal(found[name], expected[name]) for name in expected)


# --- layouts, on a CPU ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rule", "mode"),
    [
        ("adam", "blockwise"),
        ("soap", "blockwise"),
        *(("muon", mode) for mode in ("blockwise", "duplicated", "distributed")),
    ],
)
def test_tensor_parallel_ranks_have_the_step_without_offload(rule: str, mode: str) -> None:
    """Ranks that hold parts of a matrix agree on whether it is on the host; otherwise collectives would not match."""
    for whole in (False, True):
        config = tp_training.config(
            optimizer=rule, muon_tp_mode=mode, use_layer_wise_distributed_optimizer=whole, clip_grad=0.0
        )
        expected = run_grid(partial(tp_training.train, config))
        found = run_grid(partial(tp_training.train, replace(config, **HALF)))
        assert all(map(same_bits, [one.weights for one in found], [one.weights for one in expected]))
        assert [one.norms for one in found] == [one.norms for one in expected]


NARROW: Mapping[str, dict[str, Any]] = {
    "bf16": {"exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16},
    "fp16": {"exp_avg_dtype": torch.float16, "exp_avg_sq_dtype": torch.float16},
    "fp8": {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8},
    "fp16 mains": {"main_params_dtype": torch.float16},
    "24-bit mains": {"main_params_dtype": torch.int8},
}


@pytest.mark.parametrize("name", NARROW)
def test_the_plan_counts_narrow_state_on_either_side(name: str) -> None:
    config = replace(flat(Numbers.REMAINDER).config, **NARROW[name])
    without, with_it = (
        get_optimizer(replace(config, **of), [Net(torch.bfloat16)], {}, pg_collection=ALONE) for of in ({}, HALF)
    )
    assert with_it.plan.state_bytes() == without.plan.state_bytes()
    assert sum(unit.state_bytes() for unit in with_it.stepper.units) == with_it.plan.state_bytes()
    host = [unit.state_bytes() for unit in with_it.stepper.units if unit.name.endswith("/host")]
    assert sum(host) == with_it.plan.state_bytes(on_host=True) > 0


ALONE = roles_over(Alone())


class Chunk(nn.Module):
    """Frozen, empty and unused parameters, and one that is trained."""

    def __init__(self, seed: int):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, size in (("weight", 130), ("frozen", 5), ("empty", 0), ("unused", 64)):
            self.register_parameter(name, nn.Parameter(torch.randn(size, generator=generator)))
        self.frozen.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return ((self.weight * x).sum() + self.frozen.sum() + self.empty.sum()).square()


def train_chunks(fields: dict[str, Any], comm: Comm) -> list[Tensor]:
    chunks = [Chunk(0), Chunk(1)]
    config = OptimizerConfig(lr=0.1, use_distributed_optimizer=True, **fields)
    optimizer = get_optimizer(config, chunks, {}, pg_collection=roles_over(comm))
    for step in range(3):
        x = torch.randn(130, generator=torch.Generator().manual_seed(10 * step + comm.rank))
        torch.stack([chunk(x) for chunk in chunks]).sum().backward()
        assert optimizer.step().success
        optimizer.zero_grad()
    return [param.detach().clone() for chunk in chunks for param in chunk.parameters()]


@pytest.mark.parametrize("offload", [HALF, ALL], ids=["half", "all"])
def test_chunks_with_parameters_that_are_frozen_empty_or_unused(offload: dict[str, Any]) -> None:
    expected = run_threads(3, partial(train_chunks, {}))
    for here, there in zip(run_threads(3, partial(train_chunks, offload)), expected, strict=True):
        assert all(map(torch.equal, here, there))


def test_parameters_that_torch_sharded_have_the_step_without_offload() -> None:
    """FSDP2 on two processes: elementwise rules on local shards, Muon on gathered matrices."""
    rules = {rule: laid_out_ranks.config(rule, clip_grad=0.0) for rule in ("adam", "muon", "soap")}
    jobs = {rule: Job(laid_out_ranks.train_fsdp, (config,)) for rule, config in rules.items()}
    jobs |= {
        f"{rule}, offloaded": Job(laid_out_ranks.train_fsdp, (replace(config, **HALF),))
        for rule, config in rules.items()
    }
    made = run_jobs(2, jobs)
    for rule in rules:
        for found, expected in zip(made[f"{rule}, offloaded"], made[rule], strict=True):
            assert same_bits(found.weights, expected.weights)
            assert (found.norms, found.state_bytes) == (expected.norms, expected.state_bytes)


# --- saved and loaded -------------------------------------------------------------------------------------------------


def state_of(net: Net, optimizer: Optimizer) -> dict[str, Any]:
    weights = sharded_model(net)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


@pytest.mark.parametrize("numbers", Numbers, ids=lambda numbers: numbers.value)
@pytest.mark.parametrize(("saved_with", "loaded_with"), [(HALF, {}), ({}, ALL), (HALF, ALL)])
def test_a_sharded_checkpoint_goes_on_with_another_fraction_and_on_other_ranks(
    numbers: Numbers, saved_with: dict[str, Any], loaded_with: dict[str, Any], tmp_path: Path
) -> None:
    """Saved by one rank after two steps, loaded by one and by two, for two more."""
    case = Case(
        size=1, spread=Spread.FLAT, numbers=numbers, rule="adam", clips=False, wrapping=Wrapping.PLAIN
    )  # fmt: skip

    def begin(comm: Comm, offload: dict[str, Any]) -> tuple[Net, Optimizer]:
        net = Net(case.numbers.dtype)
        return net, get_optimizer(replace(case.config, **offload), [net], {}, pg_collection=roles_over(comm))

    def go_on(net: Net, optimizer: Optimizer, comm: Comm, steps: range) -> list[Tensor]:
        for step in steps:
            optimizer.scale_loss(net(grads_of(step, comm.rank, comm.size))).backward()
            assert optimizer.step().success
            optimizer.zero_grad()
        return [param.detach().clone() for param in net.parameters()]

    def resume(comm: Comm) -> list[Tensor]:
        net, optimizer = begin(comm, loaded_with)
        go_on(net, optimizer, comm, range(1))  # of which nothing is left
        optimizer.load_state_dict(load(state_of(net, optimizer), tmp_path / "saved").state["optimizer"])
        return go_on(net, optimizer, comm, range(2, 4))

    net, optimizer = begin(Alone(), saved_with)
    go_on(net, optimizer, Alone(), range(2))
    save(state_of(net, optimizer), tmp_path / "saved")
    expected = go_on(net, optimizer, Alone(), range(2, 4))
    for size in (1, 2):
        for found in run_threads(size, resume):
            assert all(map(torch.equal, found, expected))


# --- on a device ------------------------------------------------------------------------------------------------------


def on_both_sides(case: Case, program: Any, **fields: Any) -> None:
    """`program(model, optimizer, comm)` returns the same on a CPU without offload, and on devices with half and all of
    it: one rank's piece of a parameter may be on the device while another rank's is on the host."""

    def on_host(comm: Comm) -> Any:
        net = Net(case.numbers.dtype, SHAPES)
        config = replace(case.config, log_num_zeros_in_grad=True)
        given = fields.get("hooks", ())
        others = {name: value for name, value in fields.items() if name != "hooks"}
        optimizer = get_optimizer(replace(config, **others), [net], {}, pg_collection=roles_over(comm), hooks=given)
        return program(net, optimizer, comm)

    def on_device(one: DeferredRank, offload: dict[str, Any]) -> Any:
        return program(*built(case, one.comm, **offload, **fields), one.comm)

    expected = run_threads(SIZE, on_host)
    for seed in range(max(2, NUM_ORDERS)):
        found = run_deferred(SIZE, partial(on_device, offload=(ALL, HALF)[seed % 2]), seed=seed)
        assert all(map(equal, found, expected)), f"seed {seed}"


def flat(numbers: Numbers, rule: str = "adam") -> Case:
    return Case(
        size=SIZE, spread=Spread.FLAT, numbers=numbers, rule=rule, clips=True, wrapping=Wrapping.PLAIN
    )  # fmt: skip


PRECISIONS = [Numbers.FP32, Numbers.BF16, Numbers.REMAINDER]
every_precision = pytest.mark.parametrize("numbers", PRECISIONS, ids=lambda numbers: numbers.value)


def steps(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
    return outcome(model, optimizer, [iterate(model, optimizer, step, comm) for step in range(STEPS)])


def flat_or_whole(rule: str) -> Case:
    return replace(flat(Numbers.BF16, rule), spread=Spread.FLAT if rule == "lion" else Spread.WHOLE)


STEPPED: dict[str, tuple[Case, dict[str, Any]]] = {
    **{f"norms, {numbers.value}": (flat(numbers), {"hooks": MASK}) for numbers in PRECISIONS},
    **{f"row means, {numbers.value}": (flat(numbers), {"hooks": CENTERED}) for numbers in PRECISIONS},
    "norms of replicas": (replace(flat(Numbers.BF16), spread=Spread.REPLICATED), {"hooks": MASK}),
    **{name: (flat(Numbers.REMAINDER), NARROW[name]) for name in ("bf16", "fp8", "fp16 mains", "24-bit mains")},
    **{rule: (flat_or_whole(rule), {}) for rule in ("soap", "adaptive_muon", "lion")},
}


@pytest.mark.parametrize("name", STEPPED)
def test_steps_have_the_bits_of_those_without_offload(name: str) -> None:
    case, fields = STEPPED[name]
    on_both_sides(case, steps, **fields)


def test_a_refused_norm_changes_nothing() -> None:
    def program(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
        found = steps(model, optimizer, comm)
        assert [result[0] for result in found.results] == [False] * STEPS
        assert set(found.steps) == {0.0}
        return found

    on_both_sides(flat(Numbers.REMAINDER), program, grad_norm_skip_threshold=1e-3)


def test_the_two_halves_of_a_step_are_the_whole() -> None:
    def program(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
        results = []
        for step in (0, 2):
            optimizer.scale_loss(model(grads_of(step, comm.rank, comm.size, SHAPES))).backward()
            halves = (optimizer.prepare_grads(), optimizer.clip_grad_norm(1.0), optimizer.step_with_ready_grads())
            results.append(halves)
            optimizer.zero_grad()
        return outcome(model, optimizer, results)

    on_both_sides(flat(Numbers.BF16), program)


@every_precision
def test_a_parameter_that_the_user_writes_counts(numbers: Numbers) -> None:
    """Through `.data`, which no version counter sees; where mains are a copy, `reload_model_params` announces it."""

    def program(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
        results = []
        for step in (0, 2, 3):
            results.append(iterate(model, optimizer, step, comm))
            for param in model.parameters():
                param.data.mul_(0.5)
            if numbers is Numbers.BF16:
                optimizer.reload_model_params()
        return outcome(model, optimizer, results)

    on_both_sides(flat(numbers), program)


def with_copies(tree: Any) -> Any:
    if isinstance(tree, Tensor):
        return tree.detach().clone()
    if isinstance(tree, dict):
        return {name: with_copies(value) for name, value in tree.items()}
    return [with_copies(one) for one in tree] if isinstance(tree, list) else tree


@every_precision
def test_local_state_is_saved_and_loaded(numbers: Numbers) -> None:
    def program(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
        results = [iterate(model, optimizer, 0, comm)]
        saved = with_copies(optimizer.state_dict())
        weights = [param.detach().clone() for param in model.parameters()]
        iterate(model, optimizer, 2, comm)
        with torch.no_grad():
            for param, value in zip(model.parameters(), weights, strict=True):
                if param.dtype is torch.float32:  # others are written with their main values
                    param.copy_(value)
        optimizer.load_state_dict(saved)
        results.append(iterate(model, optimizer, 3, comm))
        for param in optimizer.state:
            optimizer.state[param] = {}
        results.append(iterate(model, optimizer, 4, comm))
        return outcome(model, optimizer, results)

    on_both_sides(flat(numbers), program)


def test_a_learning_rate_on_the_device_is_read() -> None:
    def program(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
        for group in optimizer.param_groups:
            group["lr"] = torch.tensor(group["lr"])
        return steps(model, optimizer, comm)

    on_both_sides(replace(flat(Numbers.BF16, "muon"), spread=Spread.WHOLE), program)


@every_precision
def test_weights_to_evaluate_with_come_from_the_host(numbers: Numbers) -> None:
    def program(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
        results = [iterate(model, optimizer, step, comm) for step in (0, 2)]
        optimizer.eval()
        evaluated = [param.detach().clone() for param in model.parameters()]
        optimizer.train()
        found = outcome(model, optimizer, results)
        assert not all(map(torch.equal, evaluated, found.weights))
        return found._replace(weights=[*evaluated, *found.weights])

    on_both_sides(flat(numbers, "schedule_free"), program)


def test_parameters_that_no_rank_used_keep_value_state_and_count() -> None:
    def program(model: nn.Module, optimizer: Optimizer, comm: Comm) -> Trained:
        results = []
        for step in (0, 2, 3):
            left_out = {"router"} if comm.rank == 1 else {"router", "first"}
            grads = grads_of(step, comm.rank, comm.size, SHAPES)
            used = [module(grads[name]) for name, module in model.named_children() if name not in left_out]
            optimizer.scale_loss(torch.stack(used).sum()).backward()
            results.append(optimizer.step())
            optimizer.zero_grad()
        return outcome(model, optimizer, results)

    on_both_sides(flat(Numbers.BF16), program)


@pytest.mark.parametrize(
    "fields",
    [
        {"optimizer": "muon", "muon_tp_mode": "distributed"},
        {"optimizer": "muon", "muon_tp_mode": "duplicated"},
        {"optimizer": "soap"},
    ],
    ids=["distributed", "duplicated", "soap"],
)
def test_matrices_that_ranks_hold_parts_of_meet_through_the_device(fields: dict[str, Any]) -> None:
    config = tp_training.config(**fields, clip_grad=0.0)

    def on_host(comm: ThreadComm) -> Any:
        return tp_training.train(config, Grid(tp=comm, dp=Alone(), world=comm))

    def on_device(one: DeferredRank) -> Any:
        return tp_training.train(replace(config, **ALL), Grid(tp=one.comm, dp=Alone(), world=one.comm))

    expected = run_threads(2, on_host)
    for seed in range(NUM_ORDERS):
        found = run_deferred(2, on_device, seed=seed)
        assert all(map(same_bits, [one.weights for one in found], [one.weights for one in expected]))
