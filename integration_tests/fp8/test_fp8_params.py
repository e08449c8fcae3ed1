"""Parameters in fp8: the codes of one process on any layout, one byte an element on the wire, and what is refused."""

import re
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from fp8_training import SHAPES, build, everything, fp8_params, make_model, same, set_grads, stored, train
from parity import roles_over
from processes import world_of_one
from recording_comm import RecordingComm
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import GradientError, run_threads
from opt_distributed.buffers import DistributedDataParallel, ParamAndGradBuffer, StorageError, UnusableGradientError
from opt_distributed.comm import Alone, Comm
from opt_distributed.layout import ParamShape, flat_layout
from opt_kernels.quantized import FP8, RECIPES, QuantizedTensor
from opt_paramgroups import ParamId
from opt_stack import get_optimizer, get_optimizer_based_on_param_groups
from opt_stack.planning.plan import param_bytes

ZERO = {"use_distributed_optimizer": True}
REUSE: dict[str, Any] = {"reuse_grad_buf_for_mxfp8_param_ag": True}
THROUGH: dict[str, Any] = {**ZERO, **REUSE, "wraps": True, "wrapping": {**REUSE, "bucket_size": 12_000}}
OVERLAPPED = {**ZERO, "wraps": True, "overlap_param_gather": True, "wrapping": {"bucket_size": 12_000}}
LAYOUTS: dict[str, dict[str, Any]] = {  # the rule, and how state is sharded
    "flat": ZERO,
    "whole": {"optimizer": "muon", "muon_fp32_matmul_prec": "highest", "use_layer_wise_distributed_optimizer": True},
}
IN_CHUNKS = [*((recipe, "flat") for recipe in RECIPES), ("delayed", "whole"), ("blockwise", "whole")]
FP32 = torch.float32
BF16 = torch.bfloat16
NUMEL = sum(rows * cols for rows, cols in SHAPES)
every_recipe = pytest.mark.parametrize("recipe", RECIPES)
wrapped_or_not = pytest.mark.parametrize("wraps", [False, True], ids=["plain", "wrapped"])


@wrapped_or_not
@pytest.mark.parametrize(("recipe", "layout"), IN_CHUNKS)
def test_two_chunks_have_the_codes_of_one_process(recipe: str, layout: str, wraps: bool) -> None:
    """Of one chunk, on more grids and layouts: `test_fp8_experts.py`."""

    def rank_main(comm: Comm) -> list[Tensor]:
        models = [make_model(recipe, seed=seed) for seed in range(2)]
        roles = roles_over(comm)
        chunks: list[nn.Module] = [*models]
        config = OptimizerConfig(lr=1e-2, bf16=True, clip_grad=0.0, fp8_recipe=recipe, **LAYOUTS[layout])
        if wraps and comm.size > 1:
            ddp = DistributedDataParallelConfig(grad_reduce_in_fp32=True, fp8_param_gather=True, **ZERO)
            options = {"groups": roles, "optimizer_config": config}
            chunks = [DistributedDataParallel(ddp, model, chunk=n, **options) for n, model in enumerate(models)]
        optimizer = get_optimizer(config, chunks, pg_collection=roles)
        for step in range(3):
            for number, model in enumerate(models):
                set_grads(model, step + number)
            assert optimizer.step().success
            optimizer.zero_grad()
        return [*stored(models[0]), *stored(models[1])]

    (alone,) = run_threads(1, rank_main)
    assert all(same(found, alone) for found in run_threads(4, rank_main))


def test_reading_order_of_parameters_does_not_change_codes() -> None:
    """Scales of runs were gathered at the first read of a bucket, so that those of different buckets met."""

    def rank_main(comm: Comm, *, reverses: bool) -> Any:
        model, chunk, optimizer = build(comm, "mxfp8", **OVERLAPPED)
        for step in range(2):
            set_grads(model, step)
            optimizer.step()
            optimizer.zero_grad()
            for layer in list(model)[:: -1 if reverses and comm.rank else 1]:
                _ = layer.weight
        chunk.finish_param_sync()
        return stored(model)

    expected, _ = run_threads(2, partial(rank_main, reverses=False))
    assert all(same(found, expected) for found in run_threads(2, partial(rank_main, reverses=True)))


@pytest.mark.parametrize(("recipe", "options", "dtype"), [("tensorwise", {}, FP32), ("mxfp8", THROUGH, BF16)])
def test_the_codes_are_those_of_the_main_values(recipe: str, options: dict[str, Any], dtype: torch.dtype) -> None:
    """Of main values in bf16, where these travel in the memory of gradients."""
    (alone,) = train(1, recipe, **options)
    for param in fp8_params(alone.model):
        want = QuantizedTensor.of(alone.optimizer.state[param]["fp32_param"].to(dtype), recipe)
        assert torch.equal(want.codes, param.codes)
        assert torch.equal(want.scales, param.scales)


@wrapped_or_not
@every_recipe
def test_one_byte_an_element_and_scales_are_gathered(recipe: str, wraps: bool) -> None:
    padded = -(-NUMEL // 256) * 256  # a multiple of 128 on each of two ranks
    biases = 2 * 512  # in bf16; 192, 64 and 5, which begin at multiples of 128
    scales = [padded // 32] if recipe == "mxfp8" else []
    magnitudes = {"delayed": 3, "tensorwise": 3, "blockwise": 4 + 2 + 1}.get(recipe)
    for run in train(2, recipe, **ZERO, wraps=wraps):
        gathered = sorted(call.num_bytes for call in run.calls if call.kind == "all_gather")
        assert gathered == sorted([padded, biases, *scales])
        reduced = [call.numel for call in run.calls if call.kind == "all_reduce"]
        assert (magnitudes in reduced) is (magnitudes is not None)


@every_recipe
def test_codes_that_have_left_their_memory_are_refused(recipe: str) -> None:
    """Symptom: after `model.cpu(); model.cuda()` steps succeeded, and wrote codes that nothing read."""
    model = make_model(recipe)
    optimizer = get_optimizer(OptimizerConfig(lr=1e-2, bf16=True, fp8_recipe=recipe), [model])
    set_grads(model, 0)
    assert optimizer.step().success
    model._apply(lambda tensor: tensor.clone())
    set_grads(model, 1)
    with pytest.raises(StorageError, match="has left the memory that the optimizer updates"):
        optimizer.step()


@every_recipe
def test_a_parameter_without_a_gradient_keeps_codes_and_scales(recipe: str) -> None:
    def rank_main(comm: Comm) -> bool:
        model, _, optimizer = build(comm, recipe, **ZERO)
        before = everything(model[1])
        for step in range(3):
            set_grads(model, step)
            model[1].weight.grad = None
            optimizer.step()
            optimizer.zero_grad()
        return same(everything(model[1])[:-1], before[:-1])  # the last is the bias

    assert run_threads(2, rank_main) == [True, True]


@every_recipe
def test_the_plan_counts_the_bytes_of_parameters_and_state(recipe: str) -> None:
    model, _, optimizer = build(Alone(), recipe)
    stored_bytes = sum(param.codes.nbytes + param.scales.nbytes for param in fp8_params(model))
    (buffer,) = [buffer for buffer in optimizer.plan.buffers if buffer.dtype is FP8]
    assert param_bytes(optimizer.plan, buffer) == stored_bytes
    assert f"{stored_bytes:,} bytes of codes and scales" in str(optimizer.plan)
    kept = sum(unit.state_bytes() for unit in optimizer.stepper.units)
    assert optimizer.plan.state_bytes() == kept == 12 * (NUMEL + 261)  # fp32 mains and moments, also of the biases


# --- mxfp8 gathered through the gradient buffer -----------------------------------------------------------------------


@pytest.mark.parametrize("overlaps", [False, True], ids=["in the step", "overlapped"])
@pytest.mark.parametrize("fp32", [True, False], ids=["fp32 gradients", "bf16 gradients"])
def test_ranks_have_the_codes_of_one(fp32: bool, overlaps: bool) -> None:
    options = {**THROUGH, "wrapping": {**THROUGH["wrapping"], "grad_reduce_in_fp32": fp32}}
    (alone,) = train(1, "mxfp8", **options)
    found = train(4, "mxfp8", **options, overlap_param_gather=overlaps)
    assert all(same(run.stored, alone.stored) for run in found)


def test_no_buffer_of_codes_is_made() -> None:
    def allocated(comm: Comm, **reuse: Any) -> int:
        recording = RecordingComm(comm)
        build(recording, "mxfp8", wraps=True, wrapping=reuse, **ZERO, **reuse)
        return sum(recording.allocated)

    saved = run_threads(2, allocated)[0] - run_threads(2, lambda comm: allocated(comm, **REUSE))[0]
    assert saved >= NUMEL + NUMEL // 32


def ready(comm: Comm, **changes: Any) -> tuple[nn.Module, Any, Any]:
    """After a step, whose gathers have overwritten the gradients."""
    model, chunk, optimizer = build(comm, "mxfp8", **{**THROUGH, **changes})
    set_grads(model, 0)
    assert optimizer.step().success
    return model, chunk, optimizer


def used_twice(comm: Comm) -> None:
    model, _, optimizer = ready(comm)
    before = stored(model)
    with pytest.raises(UnusableGradientError, match="were overwritten by the parameters of the last step"):
        optimizer.step()
    assert same(stored(model), before)
    optimizer.zero_grad()
    set_grads(model, 1)
    assert optimizer.step().success


def zeroed(comm: Comm) -> None:
    model, _, optimizer = ready(comm, overlap_param_gather=True)
    optimizer.zero_grad()
    assert not any(param.main_grad.any() for param in model.parameters())
    for param in fp8_params(model):
        assert param.values().abs().amax() > 0.1  # they arrived before the gradients were zeroed


def gathered_without_new_values(comm: Comm) -> None:
    model, chunk, optimizer = ready(comm)
    optimizer.zero_grad()
    before = stored(model)
    set_grads(model, 1)
    chunk.start_param_sync(force_sync=True)
    assert all(param.main_grad.any() for param in model.parameters())
    assert same(stored(model), before)


def loaded_over_gradients(comm: Comm) -> None:
    """Between iterations gradients stay zero; over gradients, a load is refused."""
    model, chunk, optimizer = ready(comm)
    optimizer.zero_grad()
    saved = optimizer.state_dict()
    before = stored(model)
    optimizer.load_state_dict(saved)
    assert same(stored(model), before)
    assert not any(param.main_grad.any() for param in model.parameters())
    chunk(torch.randn(2, 160, dtype=torch.bfloat16)).sum().backward()
    with pytest.raises(GradientError, match=r"through gradients of bucket .* that no step has used"):
        optimizer.load_state_dict(saved)


@pytest.mark.parametrize("program", [used_twice, zeroed, gathered_without_new_values, loaded_over_gradients])
def test_grads_and_params_in_one_buffer_are_not_confused(
    program: Callable[[Comm], None],
) -> None:
    run_threads(2, program)


# --- main values ------------------------------------------------------------------------------------------------------


def load(model: nn.Module, values: Tensor) -> None:
    model.load_state_dict({"weight": values})


def write_codes(model: nn.Module, values: Tensor) -> None:
    """Without going through the tensor, as another library may."""
    model.weight.scaled.quantize_(values)


@pytest.mark.parametrize("keep_initial", [True, False], ids=["offered", "not offered"])
@pytest.mark.parametrize("change", [None, load, write_codes])
def test_mains_begin_with_values_quantised_or_loaded_since(keep_initial: bool, change: Any) -> None:
    values, loaded = torch.randn(2, 96, 64, generator=torch.Generator().manual_seed(1))
    model = nn.Linear(64, 96, bias=False, dtype=torch.bfloat16)
    quantized = QuantizedTensor.of(values, "blockwise", dtype=torch.bfloat16, keep_initial=keep_initial)
    model.weight = nn.Parameter(quantized)
    if change is not None:
        change(model, loaded)
    (main,) = get_optimizer(OptimizerConfig(bf16=True, fp8_recipe="blockwise"), [model]).get_parameters()
    assert torch.equal(main, values if keep_initial and change is None else model.weight.values())
    assert model.weight.initial() is None  # its memory is free again


# --- refusals ---------------------------------------------------------------------------------------------------------


def optimized(recipe: str | None, **fields: Any) -> Callable[[], object]:
    return lambda: get_optimizer(OptimizerConfig(bf16=True, **fields), [make_model(recipe)])


def wrapped(recipe: str | None, **fields: Any) -> DistributedDataParallel:
    return DistributedDataParallel(DistributedDataParallelConfig(**ZERO, **fields), make_model(recipe))


def gathered_in_fp8() -> None:
    get_optimizer(OptimizerConfig(bf16=True, **ZERO), [wrapped(None, fp8_param_gather=True)])


def cut_through_a_run() -> None:
    id = ParamId(0, "weight")
    weight = nn.Parameter(QuantizedTensor.of(torch.ones(9, 32), "mxfp8"))
    layout = flat_layout([ParamShape(id=id, shape=(9, 32))], num_shards=8, shard_multiple=1)
    dtypes = {"param_dtype": FP8, "grad_dtype": torch.float32, "device": torch.device("cpu")}
    ParamAndGradBuffer(layout, {id: weight}, sharded=True, **dtypes)


def fully_sharded() -> None:
    with world_of_one():
        model = make_model("tensorwise")
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        get_optimizer(OptimizerConfig(bf16=True, fp8_recipe="tensorwise"), [model])


def through_grads(*chunks: nn.Module, recipe: str = "mxfp8", of: Any = None) -> object:
    """An optimizer that gathers parameters through gradients; `of`: of these parameters only."""
    config = OptimizerConfig(bf16=True, fp8_recipe=recipe, **ZERO, **REUSE)
    if of is not None:
        return get_optimizer_based_on_param_groups(config, [*chunks], [{"params": of}])
    return get_optimizer(config, [*chunks])


def two_optimizers() -> None:
    chunk = wrapped("mxfp8", fp8_param_gather=True, **REUSE)
    through_grads(chunk, of=[chunk.module[0].weight])


REFUSED: dict[str, tuple[Callable[[], object], type[Exception], str]] = {
    "no recipe": (optimized("tensorwise"), ConfigError, "'0.weight' (and 2 more) is stored in fp8, but fp8_recipe=Non"),
    "another recipe": (
        optimized("tensorwise", fp8_recipe="mxfp8"), ConfigError, "'0.weight' is stored with recipe 'tensorwise'"
    ),
    "nothing in fp8": (
        optimized(None, fp8_recipe="mxfp8"), ConfigError, "fp8_recipe='mxfp8', but no parameter is stored in fp8 on any"
    ),
    "other weights": (
        optimized("delayed", fp8_recipe="delayed", optimizer="schedule_free"), ConfigError, "evaluates other weights"
    ),
    "shards": (lambda: wrapped("tensorwise"), StorageError, "is stored in fp8, but fp8_param_gather=False; set it"),
    "nothing to gather": (gathered_in_fp8, ConfigError, "fp8_param_gather=True, but no parameter is stored in fp8 on"),
    "a cut": (cut_through_a_run, StorageError, "cuts runs of 32 elements that share a scale"),
    "DTensors": (fully_sharded, ConfigError, "fully_shard and other DTensors store parameters dequantised"),
    "gradients of one configuration only": (
        lambda: through_grads(wrapped("mxfp8", fp8_param_gather=True)), ConfigError,
        "_param_ag=True, but model chunk 0 was wrapped with reuse_grad_buf_for_mxfp8_param_ag=False",
    ),
    "gradients of a plain module": (
        lambda: through_grads(make_model("mxfp8")), ConfigError,
        "model chunk 0 is a plain Sequential, which has no gradient buffer",
    ),
    "gradients with another recipe": (
        lambda: through_grads(recipe="blockwise"), ConfigError, "_param_ag=True: needs fp8_recipe='mxfp8'"
    ),
    "gradients of parameters of another recipe": (
        lambda: wrapped("blockwise", fp8_param_gather=True, **REUSE), StorageError,
        "but fp8 parameters have the recipe 'blockwise'",
    ),
    "gradients of two optimizers": (
        two_optimizers, ConfigError, "train all mxfp8 parameters with one optimizer"
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_differs_or_cannot_be_stored_is_refused(name: str) -> None:
    build, error, message = REFUSED[name]
    with pytest.raises(error, match=re.escape(message)):
        build()


@pytest.mark.parametrize("broadcasts", [False, True])
def test_replicas_with_other_codes_are_refused_or_overwritten(broadcasts: bool) -> None:
    def rank_main(comm: Comm) -> bool:
        model = make_model("delayed", seed=comm.rank)
        config = OptimizerConfig(bf16=True, fp8_recipe="delayed", use_distributed_optimizer=True)
        options: dict[str, Any] = {"pg_collection": roles_over(comm), "broadcast_params": broadcasts}
        if broadcasts:
            get_optimizer(config, [model], **options)
        else:
            with pytest.raises(ConfigError, match=r"ranks hold different values of '0.weight'"):
                get_optimizer(config, [model], **options)
        return same(stored(model), stored(make_model("delayed")))

    assert run_threads(2, rank_main) == [True, broadcasts]
