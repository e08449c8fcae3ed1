"""Fields of the configurations: a step is that of the optimizer with the same arguments; what it keeps and by how much
it moves; when and in which dtype parts travel between ranks."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from named import BF16, FP16, FP32, LR, PLAIN, WEIGHT_DECAY, Named, normal, pieces
from parity import roles_over
from recording_comm import RecordingComm
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from opt_config import DistributedDataParallelConfig as Config
from opt_config import OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.buffers.main_grad import main_grad
from opt_distributed.comm import Alone, Comm
from opt_distributed.comm.collectives import Pending
from opt_kernels import optim
from opt_stack import get_optimizer

SHAPE = (6, 3)
CLOSE = {"rtol": 1e-5, "atol": 1e-6}  # a few roundings of fp32 for each of three steps of size lr


def after_three_steps(make: Callable[[Named], torch.optim.Optimizer]) -> Tensor:
    model = Named(weight=normal(*SHAPE, seed=1))
    optimizer = make(model)
    for step in range(3):
        model.weight.grad = normal(*SHAPE, seed=10 + step)
        optimizer.step()
    return model.weight.detach()


def ours(**fields: Any) -> Tensor:
    return after_three_steps(lambda model: get_optimizer(OptimizerConfig(**{**PLAIN, **fields}), [model], {}))


# Optimizers that take the same numbers as arguments, and where `OptimizerConfig` has other defaults.
MEGATRON = {"scale_mode": "spectral", "coefficient_type": "quintic", "nesterov": False, "eps": 1e-15}
PEERS: Mapping[str, tuple[Callable[..., torch.optim.Optimizer], Mapping[str, Any]]] = {
    "adam": (torch.optim.AdamW, {}),
    "adam, L2": (torch.optim.Adam, {}),
    "sgd": (torch.optim.SGD, {"momentum": 0.9}),
    "lion": (optim.Lion, {"betas": (0.95, 0.98)}),
    "muon": (optim.Muon, MEGATRON),
    "adaptive_muon": (optim.AdaptiveMuon, {}),
    "normuon": (optim.AdaptiveMuon, {"moment2_method": "normuon"}),
    "ademamix": (optim.AdEMAMix, {}),
    "soap": (optim.SOAP, {"betas": (0.9, 0.999)}),
}


def theirs(rule: str, **changes: Any) -> Tensor:
    make, defaults = PEERS[rule]
    arguments = {"lr": LR, "weight_decay": WEIGHT_DECAY, **defaults, **changes}
    return after_three_steps(lambda model: make(list(model.parameters()), **arguments))


# Fields with a value other than the default: the rule, the value, the argument of its optimizer, another rule.
CHANGES: Mapping[str, tuple[Any, ...]] = {
    "lr": ("adam", 0.005, {"lr": 0.005}),
    "weight_decay": ("adam", 0.5, {"weight_decay": 0.5}),
    "adam_beta1": ("adam", 0.5, {"betas": (0.5, 0.999)}),
    "adam_beta2": ("adam", 0.5, {"betas": (0.9, 0.5)}),
    "adam_eps": ("adam", 0.1, {"eps": 0.1}),
    "decoupled_weight_decay": ("adam", False, {}, "adam, L2"),
    "optimizer": ("adam", "sgd", {}, "sgd"),
    "sgd_momentum": ("sgd", 0.0, {"momentum": 0.0}),
    "lion_beta1": ("lion", 0.2, {"betas": (0.2, 0.98)}),
    "lion_beta2": ("lion", 0.2, {"betas": (0.95, 0.2)}),
    "muon_momentum": ("muon", 0.5, {"momentum": 0.5}),
    "muon_nesterov": ("muon", True, {"nesterov": True}),
    "muon_scale_mode": ("muon", "unit_rms_norm", {"scale_mode": "unit_rms_norm"}),
    "muon_fp32_matmul_prec": ("muon", "highest", {"fp32_matmul_prec": "highest"}),
    "muon_coefficient_type": ("muon", "polar_express", {"coefficient_type": "polar_express"}),
    "muon_num_ns_steps": ("muon", 2, {"ns_steps": 2}),
    "muon_extra_scale_factor": ("muon", 0.2, {"extra_scale_factor": 0.2}),
    "adaptive_muon_moment2_method": ("adaptive_muon", "normuon", {"moment2_method": "normuon"}),
    "muon_pre_norm": ("muon", "rows", {"pre_norm": "rows"}),
    "muon_post_norm": ("muon", "cols_rows", {"post_norm": "cols_rows"}),
    "muon_nuclear_scale": ("muon", True, {"nuclear_scale": True}),
    "muon_weight_decay_method": ("muon", "independent", {"weight_decay_method": "independent"}),
    "adaptive_muon_lines": ("normuon", "cols", {"lines": "cols"}),
    "adaptive_muon_beta2": ("adaptive_muon", 0.5, {"betas": (0.9, 0.5)}),
    "adaptive_muon_eps": ("adaptive_muon", 0.1, {"eps": 0.1}),
    "optimizer_options": ("ademamix", {"alpha": 800.0}, {"alpha": 800.0}),
    "soap_shampoo_beta": ("soap", 0.5, {"shampoo_beta": 0.5}),
    "soap_precondition_frequency": ("soap", 3, {"precondition_frequency": 3}),
    "soap_use_kl_shampoo": ("soap", False, {"use_kl_shampoo": False}),
    "soap_order": ("soap", "megatron", {"order": "megatron"}),
    "soap_max_precond_dim": ("soap", 1, {"max_precond_dim": 1}),
    "soap_one_sided": ("soap", True, {"one_sided": True}),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_rules_number_is_the_optimizers_argument_of_that_name(name: str) -> None:
    rule, value, arguments, *other = CHANGES[name]
    fields = {"optimizer": rule}
    if rule == "normuon":
        fields = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": rule}
    changed = ours(**{**fields, name: value})
    torch.testing.assert_close(changed, theirs(*other or [rule], **arguments), **CLOSE)
    torch.testing.assert_close(ours(**fields), theirs(rule), **CLOSE)
    assert not torch.allclose(changed, theirs(rule), **CLOSE)


def moved(start: Tensor, grads: Sequence[Tensor], marks: Mapping[str, Any], **fields: Any) -> Tensor:
    """The weight after these gradients; `marks` are attributes of the parameter."""
    model = Named(weight=start.clone())
    for mark, value in marks.items():
        setattr(model.weight, mark, value)
    optimizer = get_optimizer(OptimizerConfig(**PLAIN, **fields), [model], {})
    for grad in grads:
        model.weight.grad = grad.clone()
        optimizer.step()
    return model.weight.detach()


ROWS = (4, 1, 1)
EXACT_MUON = {"optimizer": "muon", "muon_fp32_matmul_prec": "highest"}
MARKED: Mapping[str, tuple[Mapping[str, Any], tuple[Any, ...], Mapping[str, Any], bool]] = {  # marks, rows, fields
    "muon, heads": ({"head_rows": 2}, (2, 2, 2), EXACT_MUON, True),
    "muon, sizes": ({"split_sizes": ROWS}, ROWS, EXACT_MUON, True),
    "muon, in turn": ({"split_rows": (1, 1)}, ([0, 2, 4], [1, 3, 5]), EXACT_MUON, True),
    "muon, two in turn": ({"split_rows": (2, 1)}, ([0, 1, 3, 4], [2, 5]), EXACT_MUON, True),
    "muon, in turn in heads": ({"head_rows": (2, 1)}, (2, 1, 2, 1), EXACT_MUON, True),
    "muon, fused": ({"qkv_split_shapes": ROWS}, ROWS, EXACT_MUON, True),
    "muon, fused, whole": ({"qkv_split_shapes": ROWS}, ROWS, {**EXACT_MUON, "muon_split_qkv": False}, False),
    "soap, sizes": ({"split_sizes": ROWS}, ROWS, {"optimizer": "soap"}, True),
    "soap, in turn": ({"split_rows": (1, 1)}, ([0, 2, 4], [1, 3, 5]), {"optimizer": "soap"}, True),
    "soap, in turn in heads": ({"head_rows": (2, 1)}, (2, 1, 2, 1), {"optimizer": "soap"}, True),
    "soap, fused": ({"qkv_split_shapes": ROWS}, ROWS, {"optimizer": "soap", "soap_split_qkv": True}, True),
    "soap, fused, whole": ({"qkv_split_shapes": ROWS}, ROWS, {"optimizer": "soap"}, False),
}


@pytest.mark.parametrize("name", MARKED)
def test_rows_that_a_parameter_marks_are_separate_matrices(name: str) -> None:
    """Fused rows are split by Muon unless disabled, and by SOAP if enabled, as Megatron-Core preconditions them whole;
    heads and sizes that a parameter names are always split."""
    marks, rows, fields, is_split = MARKED[name]
    start = normal(*SHAPE, seed=9)
    grads = [normal(*SHAPE, seed=seed) for seed in (10, 11, 12)]
    places = [of_part if isinstance(of_part, list) else None for of_part in rows]
    if None in places:
        places = [part.tolist() for part in torch.arange(len(start)).split(rows)]
    separate = torch.empty_like(start)
    for rows_of_part in places:
        separate[rows_of_part] = moved(start[rows_of_part], [grad[rows_of_part] for grad in grads], {}, **fields)
    together = moved(start, grads, {}, **fields)
    close = {"rtol": 0.0, "atol": 1e-6}  # of updates of size 0.05; stacks of other sizes round differently in fp32
    torch.testing.assert_close(moved(start, grads, marks, **fields), separate if is_split else together, **close)
    assert not torch.allclose(separate, together, rtol=0, atol=1e-3)


def test_symmetric_products_are_computed_by_half() -> None:
    """For matrices that are large enough for a saving on a CPU."""

    def flops(**fields: Any) -> int:
        model = Named(weight=normal(512, 512, seed=1))
        config = OptimizerConfig(**PLAIN, optimizer="muon", muon_fp32_matmul_prec="highest", **fields)
        optimizer = get_optimizer(config, [model], {})
        model.weight.grad = normal(512, 512, seed=2)
        with FlopCounterMode(display=False) as counter:
            optimizer.step()
        return counter.get_total_flops()

    # Each of five steps has three products of 2 * 512**3, of which two are symmetric: 10 of their 16 blocks are made.
    whole = 5 * 2 * 512**3
    assert flops() == 3 * whole
    assert flops(muon_use_syrk=True) == whole * (1 + 2 * 10 / 16)


AWARE = {"bf16": True, "use_precision_aware_optimizer": True}


FLOAT8 = torch.float8_e4m3fn
# Fields; the dtypes of the parameter, of its main value (a copy, a remainder or codes), and of both moments.
NUMBERS: Mapping[str, tuple[Mapping[str, Any], tuple[Any, ...]]] = {
    "nothing": ({}, (FP32, None, FP32, FP32)),
    "fp16": ({"fp16": True, "initial_loss_scale": 8.0}, (FP16, FP32, FP32, FP32)),
    "bf16": ({"bf16": True}, (BF16, FP32, FP32, FP32)),
    "params_dtype": ({"params_dtype": BF16}, (BF16, FP32, FP32, FP32)),
    "use_precision_aware_optimizer": (AWARE, (BF16, torch.int16, FP32, FP32)),
    "main_params_dtype": ({**AWARE, "main_params_dtype": FP16}, (BF16, FP16, FP32, FP32)),
    "24-bit mains": ({**AWARE, "main_params_dtype": torch.int8}, (BF16, torch.int8, FP32, FP32)),
    "store_param_remainders": ({**AWARE, "store_param_remainders": False}, (BF16, FP32, FP32, FP32)),
    "of fp32 parameters": (
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": BF16}, (FP32, None, BF16, FP32),
    ),
    "lion": (
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": BF16, "optimizer": "lion"}, (FP32, None, BF16, None),
    ),
}  # fmt: skip
MOMENTS = {BF16: BF16, FP16: FP16, torch.uint8: FLOAT8}
NUMBERS |= {
    f"exp_avg_dtype {dtype}": ({**AWARE, "exp_avg_dtype": dtype}, (BF16, torch.int16, kept, FP32))
    for dtype, kept in MOMENTS.items()
}
NUMBERS |= {
    f"exp_avg_sq_dtype {dtype}": ({**AWARE, "exp_avg_sq_dtype": dtype}, (BF16, torch.int16, FP32, kept))
    for dtype, kept in MOMENTS.items()
}


@pytest.mark.parametrize("name", NUMBERS)
def test_mains_and_moments_are_kept_in_the_requested_formats(name: str) -> None:
    fields, kept = NUMBERS[name]
    model = Named(weight=normal(300, seed=1).to(kept[0]))
    optimizer = get_optimizer(OptimizerConfig(**PLAIN, **fields), [model], {})
    (piece,) = pieces(optimizer)
    main = piece.main
    moments = (piece.state.get("exp_avg"), piece.state.get("exp_avg_sq"))
    stored = next(iter(main.kept.values()), None)
    found = [None if tensor is None else tensor.dtype for tensor in (main.target, stored, *moments)]
    assert found == [*kept]
    assert optimizer.plan.state_bytes() == sum(unit.state_bytes() for unit in optimizer.stepper.units)


def test_the_loss_scale_follows_the_verdicts() -> None:
    """Every sequence of overflows is in the tests of opt-distributed."""
    scaled = {"initial_loss_scale": 64.0, "loss_scale_window": 2.0, "hysteresis": 3, "min_loss_scale": 32.0}
    model = Named(weight=torch.zeros(5, dtype=FP16))
    optimizer = get_optimizer(OptimizerConfig(**PLAIN, fp16=True, **scaled), [model], {})
    scales = []
    for verdict in "..xxxxxx":
        scales.append(optimizer.scale_loss(torch.ones(())).item())
        model.weight.grad = torch.full((5,), math.inf if verdict == "x" else 1.0, dtype=FP16)
        assert optimizer.step().success is (verdict == ".")
    assert scales == [64, 64, 128, 128, 128, 64, 32, 32]


FLAT = {"use_distributed_optimizer": True}


class Layer(nn.Module):
    """A weight that a forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


@pytest.mark.parametrize("with_step", [False, True], ids=["after the step", "with the step"])
def test_the_first_chunk_is_gathered_while_others_are_stepped(with_step: bool) -> None:
    """At the time of the first gather the second chunk has, or has not yet, been updated."""

    class Watching(RecordingComm):
        def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
            seen.append(bool((chunks[1].module.weight == 1).all()))
            return super().all_gather_(full, shard, async_op=async_op)

    seen: list[bool] = []
    roles = roles_over(Watching(Alone()))
    fields = {**FLAT, "overlap_param_gather": True}
    chunks = [DistributedDataParallel(Config(**fields), Layer(), groups=roles, chunk=number) for number in range(2)]
    config = OptimizerConfig(**PLAIN, **fields, overlap_param_gather_with_optimizer_step=with_step)
    optimizer = get_optimizer(config, chunks, {}, pg_collection=roles)
    chunks[1](chunks[0](torch.ones(1, 16))).sum().backward()
    optimizer.step()
    assert seen == [with_step, False]


SHARDED = Config(use_distributed_optimizer=True)
PADDED = replace(SHARDED, pad_buckets_for_high_nccl_busbw=True)
LATE = Config(average_in_collective=True)
WIDE = replace(SHARDED, grad_reduce_in_fp32=True)
SUMMED = replace(SHARDED, reduce_scatter_with_fp32_accumulation=True)
SMALLEST = 2.0**-24  # of fp16: half of it is zero, twice it is not
# The configuration, the gradients of two ranks and their dtype: the collectives, the most bytes of one, the values.
REDUCED: dict[str, tuple[Config, tuple[float, float], torch.dtype, tuple[list[str], int, set[float]]]] = {
    "a mean before the sum": (Config(), (SMALLEST, SMALLEST), FP16, (["all_reduce"], 512, {0.0})),
    "a mean after the sum": (LATE, (SMALLEST, SMALLEST), FP16, (["all_reduce"], 512, {SMALLEST})),
    "in bf16": (SHARDED, (1.0, 2.0**-9), BF16, (["reduce_scatter"], 512, {0.5})),
    "in fp32": (WIDE, (1.0, 2.0**-9), BF16, (["reduce_scatter"], 1024, {0.5 + 2.0**-10})),
    "in bf16, summed in fp32": (SUMMED, (1.0, 2.0**-9), BF16, (["all_to_all"], 512, {0.5})),
    "padded to the size at which links are fastest": (PADDED, (1.0, 1.0), FP32, (["reduce_scatter"], 2**18, {1.0})),
}


@pytest.mark.parametrize("name", REDUCED)
def test_a_wrapper_reduces_as_it_is_configured(name: str) -> None:
    """A parameter of 256 elements, as rank 0 sees it."""
    config, grads, dtype, expected = REDUCED[name]

    def rank_main(comm: Comm) -> tuple[list[str], int, set[float]]:
        recording = RecordingComm(comm)
        ddp = DistributedDataParallel(config, Named(weight=torch.zeros(256, dtype=dtype)), groups=roles_over(recording))
        recording.calls.clear()
        main_grad(ddp.module.weight).fill_(grads[comm.rank])
        ddp.finish_grad_sync()
        (buffer,) = ddp.synced_buffers
        owned = [buffer.grad(piece.id, piece.of_param) for piece in buffer.owned()]
        values = {value for grad in owned for value in grad.flatten().tolist()}
        return [call.kind for call in recording.calls], max(call.num_bytes for call in recording.calls), values

    assert run_threads(2, rank_main)[0] == expected


@pytest.mark.parametrize("fields", [{}, FLAT], ids=["everywhere", "to shards"])
@pytest.mark.parametrize(("dtype", "total"), [(FP32, 1 + 2.0**-9), (BF16, 1.0)], ids=["fp32", "bf16"])
def test_grads_of_a_plain_module_are_summed_in_the_given_dtype(
    dtype: torch.dtype, total: float, fields: dict[str, Any]
) -> None:
    """1 on one rank and 2^-9 on the other: their sum has 10 bits, of which bf16 keeps 8, in half of the bytes."""

    def rank_main(comm: Comm) -> tuple[list[float], int]:
        recording = RecordingComm(comm)
        model = Named(weight=torch.zeros(256, dtype=BF16))
        sgd = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 1.0, "weight_decay": 0.0, "clip_grad": 0.0}
        config = OptimizerConfig(**sgd, **fields, **AWARE, main_grads_dtype=dtype)
        optimizer = get_optimizer(config, [model], {}, pg_collection=roles_over(recording))
        model.weight.grad = torch.full((256,), 2.0**-9 if comm.rank else 1.0, dtype=BF16)
        recording.calls.clear()
        optimizer.step()
        reductions = [call.num_bytes for call in recording.calls if call.kind in ("all_reduce", "reduce_scatter")]
        return (-2 * optimizer.get_parameters()[0]).unique().tolist(), max(reductions)  # twice the mean

    assert run_threads(2, rank_main) == [([total], 256 * dtype.itemsize)] * 2
