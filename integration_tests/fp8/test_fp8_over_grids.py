"""Parameters in fp8 under tensor parallelism, over several instances and in several model chunks. Ranks are threads."""

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from fp8_training import Stored, fp8_params, stored
from torch import Tensor, nn
from tp_model import Grid, cut, run_grid

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_distributed.comm.threads import ThreadComm, World
from opt_kernels.quantized import RECIPES, QuantizedTensor, quantize_linears_
from opt_stack import Optimizer, get_optimizer

STEPS = 4
CUTS: dict[str, tuple[tuple[int, int], int | None]] = {  # whole shapes, and the dim that tensor parallelism cuts
    "column": ((256, 128), 0),
    "row": ((128, 256), 1),
    "router": ((5, 64), None),
}
ZERO = {"use_distributed_optimizer": True}
WHOLE = {"use_layer_wise_distributed_optimizer": True}
PLACES: dict[str, tuple[dict[str, Any], bool]] = {  # fields, and whether the model is wrapped
    "replicated": ({}, False),
    "flat": (ZERO, False),
    "wrapped": (ZERO, True),
    "overlapped": ({**ZERO, "overlap_param_gather": True}, True),
    "layer-wise": (WHOLE, False),
}
BY_PART = ("delayed", "tensorwise")  # recipes that give each tensor-parallel part a scale of its own


class Linears(nn.Module):
    """This rank's part of three linear layers with biases, the weights in fp8."""

    def __init__(self, tp: Comm, recipe: str, *, seed: int = 0):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        for name, (shape, dim) in CUTS.items():
            whole, bias = torch.randn(shape, generator=generator) / 8, torch.randn(shape[0], generator=generator) / 8
            weight = cut(whole, tp.rank, tp.size, dim=dim)
            linear = nn.Linear(weight.shape[1], weight.shape[0], dtype=torch.bfloat16)
            linear.weight.data.copy_(weight)
            linear.bias.data.copy_(cut(bias, tp.rank, tp.size, dim=0 if dim == 0 else None))
            if tp.size > 1 and dim is not None:
                linear.weight.tensor_model_parallel, linear.weight.partition_dim = True, dim
            if tp.size > 1 and dim == 0:
                linear.bias.tensor_model_parallel, linear.bias.partition_dim = True, 0
            self.add_module(name, linear)
        quantize_linears_(self, recipe)

    def set_grads(self, step: int, tp: Comm) -> None:
        """64ths, equal on all data-parallel ranks."""
        generator = torch.Generator().manual_seed(100 + step)
        for name, (shape, dim) in CUTS.items():
            linear: Any = self.get_submodule(name)
            grad, of_bias = ((torch.randint(-32, 32, s, generator=generator) / 64) for s in (shape, shape[:1]))
            set_grad(linear.weight, cut(grad, tp.rank, tp.size, dim=dim))
            set_grad(linear.bias, cut(of_bias, tp.rank, tp.size, dim=0 if dim == 0 else None))


def set_grad(param: Any, grad: Tensor) -> None:
    if getattr(param, "main_grad", None) is not None:
        param.main_grad.copy_(grad)
    else:
        param.grad = grad.to(param.dtype)


class Run(NamedTuple):
    model: Linears
    mains: list[Tensor]  # of the weights that this rank holds whole
    stored: Stored
    norm: float


def wrap(model: nn.Module, roles: Roles, fields: dict[str, Any], chunk: int = 0) -> DistributedDataParallel:
    config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=True,
        use_distributed_optimizer=True,
        fp8_param_gather=True,
        overlap_param_gather=fields.get("overlap_param_gather", False),
        num_distributed_optimizer_instances=roles.dense.inter.size,
    )
    of_optimizer = config_of(None, {**fields, "fp8_recipe": None})
    return DistributedDataParallel(config, model, groups=roles, optimizer_config=of_optimizer, chunk=chunk)


def config_of(recipe: str | None, fields: dict[str, Any]) -> OptimizerConfig:
    base = {"lr": 1e-2, "bf16": True, "clip_grad": 0.0, "fp8_recipe": recipe, "muon_fp32_matmul_prec": "highest"}
    return OptimizerConfig(**{**base, **fields})


def optimizer_of(chunks: Sequence[nn.Module], roles: Roles, recipe: str, fields: dict[str, Any]) -> Optimizer:
    return get_optimizer(config_of(recipe, fields), chunks, pg_collection=roles)


def train(grid: Grid, recipe: str, *, wraps: bool = False, **fields: Any) -> Run:
    model = Linears(grid.tp, recipe)
    chunk: nn.Module = wrap(model, grid.roles, fields) if wraps else model
    optimizer = optimizer_of([chunk], grid.roles, recipe, fields)
    norm = 0.0
    for step in range(STEPS):
        model.set_grads(step, grid.tp)
        result = optimizer.step()
        assert result.success
        norm = result.grad_norm
        optimizer.zero_grad()
    if isinstance(chunk, DistributedDataParallel):
        chunk.finish_param_sync()
    whole = [optimizer.state[p]["fp32_param"] for p in fp8_params(model) if "fp32_param" in optimizer.state[p]]
    return Run(model, [main.clone() for main in whole], stored(model), norm)


def joined_codes(runs: Sequence[Run], number: int, dim: int | None) -> Tensor:
    """The codes of one whole weight, from the tensor-parallel ranks of the first replica."""
    parts = [fp8_params(run.model)[number] for run in runs[:2]]
    codes = [part.codes.view(part.shape) for part in parts]
    return codes[0] if dim is None else torch.cat(codes, dim)


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_tensor_parallel_ranks_have_the_codes_of_any_number_of_replicas(recipe: str, place: str) -> None:
    fields, wraps = PLACES[place]
    rule = {"optimizer": "muon"} if place == "layer-wise" else {}
    alone = run_grid(lambda grid: train(grid, recipe, **rule), tp=2, dp=1)
    found = run_grid(lambda grid: train(grid, recipe, wraps=wraps, **rule, **fields), tp=2, dp=2)
    for rank, run in enumerate(found):
        assert run.stored.equals(alone[rank % 2].stored)
        assert run.norm == alone[rank % 2].norm


@pytest.mark.parametrize("optimizer", ["adam", "muon"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_tensor_parallel_ranks_have_the_weights_of_the_whole_model(recipe: str, optimizer: str) -> None:
    fields = {"optimizer": optimizer, "muon_tp_mode": "duplicated"} if optimizer == "muon" else {}
    (alone,) = run_grid(lambda grid: train(grid, recipe, **fields), tp=1, dp=1)
    runs = run_grid(lambda grid: train(grid, recipe, **fields), tp=2, dp=1)
    for number, (_, dim) in enumerate(CUTS.values()):
        mains = [run.mains[number] for run in runs]
        main = mains[0] if dim is None else torch.cat(mains, dim)
        torch.testing.assert_close(main, alone.mains[number], rtol=0, atol=0 if optimizer == "adam" else 1e-6)
        if dim is None or recipe not in BY_PART:
            want = fp8_params(alone.model)[number]
            differ = joined_codes(runs, number, dim) != want.codes.view(want.shape)
            assert differ.float().mean() <= (0 if optimizer == "adam" else 1e-3)
    if recipe != "delayed":
        for run in runs:
            for main, param in zip(run.mains, fp8_params(run.model), strict=True):
                again = QuantizedTensor.of(main, recipe)
                assert torch.equal(param.codes, again.codes)
                assert torch.equal(param.scales, again.scales)
    assert [run.norm for run in runs] == pytest.approx([alone.norm] * 2, rel=1e-6)


@pytest.mark.parametrize("place", ["replicated", "flat", "wrapped"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_an_overflow_on_one_tensor_parallel_rank_changes_no_byte_on_any(recipe: str, place: str) -> None:
    fields, wraps = PLACES[place]

    def rank_main(grid: Grid) -> tuple[bool, bool]:
        model = Linears(grid.tp, recipe)
        chunk: nn.Module = wrap(model, grid.roles, fields) if wraps else model
        optimizer = optimizer_of([chunk], grid.roles, recipe, fields)
        model.set_grads(0, grid.tp)
        assert optimizer.step().success
        optimizer.zero_grad()
        before, histories = stored(model), [t.clone() for p in fp8_params(model) for t in p.extra().values()]
        model.set_grads(1, grid.tp)
        if (grid.tp.rank, grid.dp.rank) == (1, 0):
            weight: Any = model.get_submodule("column").weight
            (weight.main_grad if wraps else weight.grad)[0, 0] = torch.inf
        success = bool(optimizer.step().success)
        after = [t for p in fp8_params(model) for t in p.extra().values()]
        return success, stored(model).equals(before) and all(map(torch.equal, histories, after))

    assert run_grid(rank_main, tp=2, dp=2) == [(False, True)] * 4


# --- several instances ------------------------------------------------------------------------------------------------


def in_two_instances(rank_main: Callable[[Roles], Any]) -> list[Any]:
    """Runs `rank_main` on four ranks: shards over pairs, and two replicas of each shard."""
    instances, across = [World(2).comms() for _ in range(2)], [World(2).comms() for _ in range(2)]

    def start(comm: ThreadComm) -> Any:
        instance, shard = divmod(comm.rank, 2)
        axes = Axes(dp=instances[instance][shard], tp=Alone(), inter=across[shard][instance])
        return rank_main(Roles(dense=axes, expert=axes, everyone=comm, instance=instances[instance][shard]))

    return run_threads(4, start)


def train_in(roles: Roles, recipe: str, *, wraps: bool, num_chunks: int = 1, **fields: Any) -> list[Stored]:
    """The final stored values of every chunk."""
    models = [Linears(Alone(), recipe, seed=seed) for seed in range(num_chunks)]
    chunks = [wrap(model, roles, fields, index) if wraps else model for index, model in enumerate(models)]
    optimizer = optimizer_of(chunks, roles, recipe, fields)
    for step in range(STEPS):
        for number, model in enumerate(models):
            model.set_grads(step + number, Alone())
        assert optimizer.step().success
        optimizer.zero_grad()
    for chunk in chunks:
        if isinstance(chunk, DistributedDataParallel):
            chunk.finish_param_sync()
    return [stored(model) for model in models]


def roles_of_one() -> Roles:
    axes = Axes(dp=Alone(), tp=Alone())
    return Roles(dense=axes, expert=axes, everyone=Alone())


@pytest.mark.parametrize(
    ("wraps", "overlaps"), [(False, False), (True, False), (True, True)], ids=["plain", "wrapped", "overlapped"]
)
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_instances_have_the_codes_of_one_process(recipe: str, wraps: bool, overlaps: bool) -> None:
    (alone,) = train_in(roles_of_one(), recipe, wraps=False)
    fields = {**ZERO, "overlap_param_gather": overlaps}
    for (found,) in in_two_instances(lambda roles: train_in(roles, recipe, wraps=wraps, **fields)):
        assert found.equals(alone)


# --- several chunks ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("place", PLACES)
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_chunks_have_the_codes_of_one_process(recipe: str, place: str) -> None:
    fields, wraps = PLACES[place]
    rule = {"optimizer": "muon"} if place == "layer-wise" else {}
    alone = train_in(roles_of_one(), recipe, wraps=False, num_chunks=2, **rule)

    def rank_main(comm: Comm) -> list[Stored]:
        axes = Axes(dp=comm, tp=Alone())
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        return train_in(roles, recipe, wraps=wraps, num_chunks=2, **rule, **fields)

    for found in run_threads(2, rank_main):
        assert all(one.equals(other) for one, other in zip(found, alone, strict=True))
