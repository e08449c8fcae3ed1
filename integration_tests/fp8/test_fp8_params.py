"""Parameters in fp8: the codes of one process on any layout, one byte an element on the wire, and what is refused."""

from functools import partial
from typing import Any

import pytest
import torch
from fp8_training import SHAPES, Stored, build, fp8_params, make_model, set_grads, stored, train
from parity import roles_over
from processes import world_of_one
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel, ParamAndGradBuffer, StorageError
from opt_distributed.comm import Alone, Comm
from opt_distributed.layout import ParamShape, flat_layout
from opt_kernels.quantized import FP8, RECIPES, QuantizedTensor
from opt_paramgroups import ParamId
from opt_stack import get_optimizer
from opt_stack.planning.report import param_bytes

ZERO = {"use_distributed_optimizer": True}
MUON = {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True, "muon_fp32_matmul_prec": "highest"}
LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "replicated": (2, {}),
    "flat shards": (4, ZERO),
    "wrapped": (2, {**ZERO, "wraps": True}),
    "wrapped, replicated": (2, {"wraps": True}),
    "overlapped": (2, {**ZERO, "wraps": True, "overlap_param_gather": True, "wrapping": {"bucket_size": 12_000}}),
    "layer-wise": (2, MUON),
    "layer-wise, wrapped": (2, {**MUON, "wraps": True}),
}
NUMEL = sum(rows * cols for rows, cols in SHAPES)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize("fp8_recipe", RECIPES)
def test_one_process_and_shards_have_the_same_codes(fp8_recipe: str, layout: str) -> None:
    ranks, options = LAYOUTS[layout]
    rule = {name: value for name, value in options.items() if name in ("optimizer", "muon_fp32_matmul_prec")}
    (alone,) = train(1, fp8_recipe, **rule)
    for run in train(ranks, fp8_recipe, **options):
        assert run.stored.equals(alone.stored)


@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_two_chunks_have_the_codes_of_one_process(recipe: str, wraps: bool) -> None:
    def rank_main(comm: Comm, *, wraps: bool = False, **fields: Any) -> list[Stored]:
        models = [make_model(recipe, seed=seed) for seed in range(2)]
        ddp = DistributedDataParallelConfig(
            grad_reduce_in_fp32=True, use_distributed_optimizer=True, fp8_param_gather=True
        )
        chunks = [
            DistributedDataParallel(ddp, model, groups=roles_over(comm), chunk=number) if wraps else model
            for number, model in enumerate(models)
        ]
        config = OptimizerConfig(lr=1e-2, bf16=True, clip_grad=0.0, fp8_recipe=recipe, **fields)
        optimizer = get_optimizer(config, chunks, pg_collection=roles_over(comm))
        for step in range(3):
            for number, model in enumerate(models):
                set_grads(model, step + number)
            assert optimizer.step().success
            optimizer.zero_grad()
        return [stored(model) for model in models]

    (alone,) = run_threads(1, rank_main)
    for found in run_threads(2, partial(rank_main, wraps=wraps, **ZERO)):
        assert all(one.equals(other) for one, other in zip(found, alone, strict=True))


def test_ranks_that_read_parameters_in_another_order_have_the_same_codes() -> None:
    """Scales of runs were gathered at the first read of a bucket, so that those of different buckets met."""

    def rank_main(comm: Comm, *, reverses: bool) -> Any:
        options = {"overlap_param_gather": True, "wrapping": {"bucket_size": 12_000}}
        model, chunk, optimizer = build(comm, "mxfp8", wraps=True, **ZERO, **options)
        for step in range(2):
            set_grads(model, step)
            optimizer.step()
            optimizer.zero_grad()
            for layer in list(model)[:: -1 if reverses and comm.rank else 1]:
                _ = layer.weight
        chunk.finish_param_sync()
        return stored(model)

    expected, _ = run_threads(2, partial(rank_main, reverses=False))
    assert all(found.equals(expected) for found in run_threads(2, partial(rank_main, reverses=True)))


def test_the_codes_are_those_of_the_main_values() -> None:
    (alone,) = train(1, "tensorwise")
    mains = alone.optimizer.get_parameters()
    weights = [main for main in mains if main.dim() == 2]
    assert len(weights) == len(SHAPES)
    for main, param in zip(weights, fp8_params(alone.model), strict=True):
        scale = main.abs().amax() / 448
        assert torch.equal(param.scales, scale.view(1))
        codes = (main / scale).clamp(-448, 448).to(torch.float8_e4m3fn)
        assert torch.equal(param.codes, codes.view(torch.uint8).view(-1))


@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "wrapped"])
@pytest.mark.parametrize("recipe", RECIPES)
def test_one_byte_an_element_and_scales_are_gathered(recipe: str, wraps: bool) -> None:
    options = {**ZERO, "wraps": wraps}  # fp8_param_gather where it is wrapped
    padded = -(-NUMEL // 256) * 256  # a multiple of 128 on each of two ranks
    biases = 2 * 512  # in bf16; 192, 64 and 5, which begin at multiples of 128
    for run in train(2, recipe, **options):
        gathered = sorted(call.num_bytes for call in run.calls if call.kind == "all_gather")
        scales = [padded // 32] if recipe == "mxfp8" else []
        assert gathered == sorted([padded, biases, *scales])
        magnitudes = {"delayed": 3, "tensorwise": 3, "blockwise": 4 + 2 + 1}.get(recipe)
        reduced = [call.numel for call in run.calls if call.kind == "all_reduce"]
        assert (magnitudes in reduced) is (magnitudes is not None)


def everything(model: nn.Module) -> list[torch.Tensor]:
    """Copies of codes, scales, histories and other parameters."""
    found = stored(model)
    fp8 = [tensor for pair in found.fp8 for tensor in pair]
    return [*fp8, *(t.clone() for param in fp8_params(model) for t in param.extra().values()), *found.wide]


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_parameter_without_a_gradient_keeps_codes_and_scales(recipe: str) -> None:
    def rank_main(comm: Comm) -> bool:
        model, _, optimizer = build(comm, recipe, **ZERO)
        for step in range(3):
            set_grads(model, step)
            model[1].weight.grad = None
            if step == 0:
                before = everything(model[1])
            optimizer.step()
            optimizer.zero_grad()
        return all(map(torch.equal, everything(model[1])[:-1], before[:-1]))  # the last is the bias

    assert run_threads(2, rank_main) == [True, True]


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_plan_counts_the_bytes_of_parameters_and_state(recipe: str) -> None:
    model, _, optimizer = build(Alone(), recipe)
    stored_bytes = sum(param.codes.nbytes + param.scales.nbytes for param in fp8_params(model))
    plan = optimizer.plan
    (buffer,) = [buffer for buffer in plan.buffers if buffer.dtype is FP8]
    assert param_bytes(plan, buffer) == stored_bytes
    assert f"{stored_bytes:,} bytes of codes and scales" in str(plan)
    # fp32 mains and moments of the weights; of the biases, in bf16, likewise
    assert plan.state_bytes() == sum(unit.state_bytes() for unit in optimizer.stepper.units) == 12 * (NUMEL + 261)


# --- main values ------------------------------------------------------------------------------------------------------


def one_weight(values: torch.Tensor, *, keep_initial: bool) -> nn.Module:
    model = nn.Linear(*reversed(values.shape), bias=False, dtype=torch.bfloat16)
    quantized = QuantizedTensor.of(values, "blockwise", dtype=torch.bfloat16, keep_initial=keep_initial)
    model.weight = nn.Parameter(quantized)
    return model


@pytest.mark.parametrize("keep_initial", [True, False], ids=["offered", "not offered"])
def test_mains_begin_with_the_values_that_were_quantised(keep_initial: bool) -> None:
    values = torch.randn(96, 64, generator=torch.Generator().manual_seed(1))
    model = one_weight(values, keep_initial=keep_initial)
    (main,) = get_optimizer(OptimizerConfig(bf16=True, fp8_recipe="blockwise"), [model]).get_parameters()
    assert torch.equal(main, values if keep_initial else model.weight.values())
    assert model.weight.initial() is None  # its memory is free again


@pytest.mark.parametrize("how", ["load_state_dict", "codes"])
def test_mains_begin_with_weights_that_were_loaded_since(how: str) -> None:
    values, loaded = torch.randn(2, 96, 64, generator=torch.Generator().manual_seed(1))
    model = one_weight(values, keep_initial=True)
    if how == "load_state_dict":
        model.load_state_dict({"weight": loaded})
    else:  # without going through the tensor, as another library may
        model.weight.scaled.quantize_(loaded)
    (main,) = get_optimizer(OptimizerConfig(bf16=True, fp8_recipe="blockwise"), [model]).get_parameters()
    assert torch.equal(main, model.weight.values())
    assert not torch.equal(main, values)


# --- refusals ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("stored", "fields", "message"),
    [
        ("tensorwise", {}, "'0.weight' (and 2 more) is stored in fp8, but fp8_recipe=None; set it to the recipe"),
        ("tensorwise", {"fp8_recipe": "mxfp8"}, "parameter '0.weight' is stored with recipe 'tensorwise'"),
        (None, {"fp8_recipe": "mxfp8"}, "fp8_recipe='mxfp8', but no parameter is stored in fp8 on any rank"),
        (
            "delayed",
            {"fp8_recipe": "delayed", "optimizer": "schedule_free"},
            "optimizer='schedule_free' evaluates other weights than it trains",
        ),
    ],
)
def test_a_model_and_a_configuration_that_differ_are_refused(
    stored: str | None, fields: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        get_optimizer(OptimizerConfig(bf16=True, **fields), [make_model(stored)])
    assert message in str(caught.value)


def test_a_wrapper_that_shards_must_gather_in_fp8() -> None:
    config = DistributedDataParallelConfig(use_distributed_optimizer=True)
    with pytest.raises(StorageError, match="is stored in fp8, but fp8_param_gather=False; set it to True"):
        DistributedDataParallel(config, make_model("tensorwise"))


def test_a_wrapper_that_gathers_in_fp8_needs_fp8_parameters() -> None:
    config = DistributedDataParallelConfig(use_distributed_optimizer=True, fp8_param_gather=True)
    chunk = DistributedDataParallel(config, make_model(None))
    with pytest.raises(ConfigError, match="fp8_param_gather=True, but no parameter is stored in fp8 on any rank"):
        get_optimizer(OptimizerConfig(bf16=True, use_distributed_optimizer=True), [chunk])


def test_a_cut_through_elements_of_one_scale_is_refused() -> None:
    id = ParamId(0, "weight")
    layout = flat_layout([ParamShape(id=id, shape=(9, 32))], num_shards=8, shard_multiple=1)
    weight = nn.Parameter(QuantizedTensor.of(torch.ones(9, 32), "mxfp8"))
    with pytest.raises(StorageError, match="cuts runs of 32 elements that share a scale"):
        ParamAndGradBuffer(
            layout, {id: weight}, param_dtype=FP8, grad_dtype=torch.float32, device=torch.device("cpu"), sharded=True
        )


def test_fully_shard_dequantises_which_is_refused() -> None:
    with world_of_one():
        model = make_model("tensorwise")
        fully_shard(model, mesh=init_device_mesh("cpu", (1,)))
        with pytest.raises(ConfigError, match="fully_shard and other DTensors store parameters dequantised"):
            get_optimizer(OptimizerConfig(bf16=True, fp8_recipe="tensorwise"), [model])


def test_replicas_that_differ_in_codes_are_refused_or_take_the_first_ones() -> None:
    def rank_main(comm: Comm, broadcast: bool) -> Any:
        model = make_model("delayed", seed=comm.rank)
        config = OptimizerConfig(bf16=True, fp8_recipe="delayed", use_distributed_optimizer=True)
        try:
            get_optimizer(config, [model], pg_collection=roles_over(comm), broadcast_params=broadcast)
        except ConfigError as error:
            return str(error)
        return stored(model)

    assert all(
        "ranks hold different values of '0.weight'" in text for text in run_threads(2, lambda c: rank_main(c, False))
    )
    first, second = run_threads(2, lambda comm: rank_main(comm, True))
    assert first.equals(second)
    assert first.equals(stored(make_model("delayed")))
