"""What each field of the configurations changes in a step. The table of fields names the test that shows a field."""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import pytest
import torch
from parity import roles_over
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from opt_config import ConfigError, OptimizerConfig
from opt_config import DistributedDataParallelConfig as Config
from opt_distributed.buffers.binding import main_grad
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.comm.collectives import Alone, Comm, Pending
from opt_distributed.comm.recording import RecordingComm
from opt_distributed.comm.threads import ThreadComm, run_threads
from opt_distributed.step.pieces import OwnedPiece
from opt_distributed.step.short_main import DecodedMain
from opt_kernels import optim
from opt_stack import Optimizer, get_optimizer

LR, WEIGHT_DECAY = 0.02, 0.1
BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
PLAIN = {"lr": LR, "weight_decay": WEIGHT_DECAY, "clip_grad": 0.0}


class Named(nn.Module):
    """Parameters by name, and no forward: tests give the gradients."""

    def __init__(self, **tensors: Tensor):
        super().__init__()
        for name, tensor in tensors.items():
            self.register_parameter(name, nn.Parameter(tensor.clone()))


def normal(*shape: int, seed: int) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def pieces(optimizer: Optimizer) -> list[OwnedPiece]:
    return [piece for unit in optimizer.stepper.units for piece in unit.pieces]


# --- numbers of the rules: the factory's step is that of the optimizer with the same argument -------------------------

SHAPE = (6, 3)
MEGATRON = {"scale_mode": "spectral", "coefficient_type": "quintic", "nesterov": False, "eps": 1e-15}
Peer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


def after_three_steps(make: Callable[[Named], torch.optim.Optimizer]) -> Tensor:
    model = Named(weight=normal(*SHAPE, seed=1))
    optimizer = make(model)
    for step in range(3):
        model.weight.grad = normal(*SHAPE, seed=10 + step)
        optimizer.step()
    return model.weight.detach()


def ours(**fields: Any) -> Tensor:
    return after_three_steps(lambda model: get_optimizer(OptimizerConfig(**{**PLAIN, **fields}), [model], {}))


def adamw(**changes: Any) -> Peer:
    return lambda params: torch.optim.AdamW(params, **{"lr": LR, "weight_decay": WEIGHT_DECAY, **changes})


def sgd(**changes: Any) -> Peer:
    return lambda params: torch.optim.SGD(params, **{"lr": LR, "weight_decay": WEIGHT_DECAY, **changes})


def lion(**changes: Any) -> Peer:
    defaults = {"lr": LR, "weight_decay": WEIGHT_DECAY, "betas": (0.95, 0.98)}
    return lambda params: optim.Lion(params, **{**defaults, **changes})


def muon(**changes: Any) -> Peer:
    return lambda params: optim.Muon(params, **{**MEGATRON, "lr": LR, "weight_decay": WEIGHT_DECAY, **changes})


def adaptive(**changes: Any) -> Peer:
    return lambda params: optim.AdaptiveMuon(params, **{"lr": LR, "weight_decay": WEIGHT_DECAY, **changes})


def ademamix(**changes: Any) -> Peer:
    return lambda params: optim.AdEMAMix(params, **{"lr": LR, "weight_decay": WEIGHT_DECAY, **changes})


def soap(**changes: Any) -> Peer:
    defaults = {"lr": LR, "weight_decay": WEIGHT_DECAY, "betas": (0.9, 0.999)}
    return lambda params: optim.SOAP(params, **{**defaults, **changes})


class Change(NamedTuple):
    """A field with a value other than its default, and the optimizer that takes the same value as an argument."""

    rule: str
    value: Any
    peer: Peer


CHANGES: Mapping[str, Change] = {
    "lr": Change("adam", 0.005, adamw(lr=0.005)),
    "weight_decay": Change("adam", 0.5, adamw(weight_decay=0.5)),
    "adam_beta1": Change("adam", 0.5, adamw(betas=(0.5, 0.999))),
    "adam_beta2": Change("adam", 0.5, adamw(betas=(0.9, 0.5))),
    "adam_eps": Change("adam", 0.1, adamw(eps=0.1)),
    "decoupled_weight_decay": Change("adam", False, lambda p: torch.optim.Adam(p, lr=LR, weight_decay=WEIGHT_DECAY)),
    "optimizer": Change("adam", "sgd", sgd(momentum=0.9)),
    "sgd_momentum": Change("sgd", 0.0, sgd()),
    "lion_beta1": Change("lion", 0.2, lion(betas=(0.2, 0.98))),
    "lion_beta2": Change("lion", 0.2, lion(betas=(0.95, 0.2))),
    "muon_momentum": Change("muon", 0.5, muon(momentum=0.5)),
    "muon_nesterov": Change("muon", True, muon(nesterov=True)),
    "muon_scale_mode": Change("muon", "unit_rms_norm", muon(scale_mode="unit_rms_norm")),
    "muon_fp32_matmul_prec": Change("muon", "highest", muon(fp32_matmul_prec="highest")),
    "muon_coefficient_type": Change("muon", "polar_express", muon(coefficient_type="polar_express")),
    "muon_num_ns_steps": Change("muon", 2, muon(ns_steps=2)),
    "muon_extra_scale_factor": Change("muon", 0.2, muon(extra_scale_factor=0.2)),
    "adaptive_muon_moment2_method": Change("adaptive_muon", "normuon", adaptive(moment2_method="normuon")),
    "muon_weight_decay_method": Change("muon", "independent", muon(weight_decay_method="independent")),
    "adaptive_muon_beta2": Change("adaptive_muon", 0.5, adaptive(betas=(0.9, 0.5))),
    "adaptive_muon_eps": Change("adaptive_muon", 0.1, adaptive(eps=0.1)),
    "optimizer_options": Change("ademamix", {"alpha": 800.0}, ademamix(alpha=800.0)),
    "soap_shampoo_beta": Change("soap", 0.5, soap(shampoo_beta=0.5)),
    "soap_precondition_frequency": Change("soap", 3, soap(precondition_frequency=3)),
    "soap_use_kl_shampoo": Change("soap", False, soap(use_kl_shampoo=False)),
    "soap_order": Change("soap", "megatron", soap(order="megatron")),
    "soap_max_precond_dim": Change("soap", 1, soap(max_precond_dim=1)),
    "soap_one_sided": Change("soap", True, soap(one_sided=True)),
}
DEFAULT_PEERS: Mapping[str, Peer] = {
    "adam": adamw(),
    "sgd": sgd(momentum=0.9),
    "lion": lion(),
    "muon": muon(),
    "adaptive_muon": adaptive(),
    "ademamix": ademamix(),
    "soap": soap(),
}


def same_as(peer: Peer) -> Tensor:
    return after_three_steps(lambda model: peer(list(model.parameters())))


@pytest.mark.parametrize("name", CHANGES)
def test_a_number_of_a_rule_is_the_argument_of_the_optimizer_of_that_name(name: str) -> None:
    rule, value, peer = CHANGES[name]
    changed = ours(**{"optimizer": rule, name: value})
    close = {"rtol": 1e-5, "atol": 1e-6}  # a few roundings of fp32 for each of three steps of size lr
    torch.testing.assert_close(changed, same_as(peer), **close)
    torch.testing.assert_close(ours(optimizer=rule), same_as(DEFAULT_PEERS[rule]), **close)
    assert not torch.allclose(changed, same_as(DEFAULT_PEERS[rule]), **close)


@pytest.mark.parametrize("lines", ["rows", "cols", "longer"])
def test_normuon_keeps_the_requested_lines(lines: str) -> None:
    fields = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon", "adaptive_muon_lines": lines}
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(ours(**fields), same_as(adaptive(moment2_method="normuon", lines=lines)), **close)
    others = same_as(adaptive(moment2_method="normuon", lines="rows" if lines == "cols" else "cols"))
    assert not torch.allclose(ours(**fields), others, **close)


@pytest.mark.parametrize("scale_mode", ["match_rms_adamw", "mup"])
def test_scales_have_the_names_of_the_drop_in(scale_mode: str) -> None:
    close = {"rtol": 1e-5, "atol": 1e-6}
    changed = ours(optimizer="muon", muon_scale_mode=scale_mode)
    torch.testing.assert_close(changed, same_as(muon(scale_mode=scale_mode)), **close)
    assert not torch.allclose(changed, same_as(muon()), **close)


def test_namo_and_aol_are_those_of_the_drop_ins() -> None:
    close = {"rtol": 1e-5, "atol": 1e-6}
    namo = ours(optimizer="adaptive_muon", adaptive_muon_moment2_method="namo")
    torch.testing.assert_close(namo, same_as(lambda p: optim.NAMO(p, lr=LR, weight_decay=WEIGHT_DECAY)), **close)
    aol = ours(optimizer="muon", muon_coefficient_type="aol", muon_num_ns_steps=4)
    torch.testing.assert_close(aol, same_as(muon(coefficient_type="aol", ns_steps=4)), **close)


@pytest.mark.parametrize(
    ("roles", "sizes"),
    [({"head_rows": 2}, (2, 2, 2)), ({"split_sizes": (4, 1, 1)}, (4, 1, 1))],
    ids=["heads", "sizes"],
)
def test_rows_of_heads_and_sizes_are_orthogonalised_one_by_one(roles: dict[str, Any], sizes: tuple[int, ...]) -> None:
    grad = normal(*SHAPE, seed=10)

    def moved(grad: Tensor, **attributes: Any) -> Tensor:
        model = Named(weight=torch.zeros_like(grad))
        for name, value in attributes.items():
            setattr(model.weight, name, value)
        optimizer = get_optimizer(
            OptimizerConfig(**PLAIN, optimizer="muon", muon_fp32_matmul_prec="highest"), [model], {}
        )
        model.weight.grad = grad.clone()
        optimizer.step()
        return model.weight.detach()

    apart = torch.cat([moved(part) for part in grad.split(sizes)])
    torch.testing.assert_close(moved(grad, **roles), apart, rtol=0, atol=1e-6)
    assert not torch.allclose(moved(grad), apart, rtol=0, atol=1e-3)


def test_soap_splits_fused_rows_if_requested() -> None:
    """Off by default, as Megatron-Core preconditions them whole; heads and sizes that a parameter names are split."""
    rows, grads = (4, 1, 1), [normal(*SHAPE, seed=seed) for seed in (10, 11, 12)]

    def moved(start: Tensor, grads: list[Tensor], **marks: Any) -> Tensor:
        config = OptimizerConfig(**PLAIN, optimizer="soap", soap_split_qkv=marks.pop("split", False))
        model = Named(weight=start.clone())
        for mark, value in marks.items():
            setattr(model.weight, mark, value)
        optimizer = get_optimizer(config, [model], {})
        for grad in grads:
            model.weight.grad = grad.clone()
            optimizer.step()
        return model.weight.detach()

    start = normal(*SHAPE, seed=9)
    parts = zip(start.split(rows), *(grad.split(rows) for grad in grads), strict=True)
    apart = torch.cat([moved(part, list(of_part)) for part, *of_part in parts])
    together = moved(start, grads)
    assert torch.equal(moved(start, grads, qkv_split_shapes=rows, split=True), apart)
    assert torch.equal(moved(start, grads, qkv_split_shapes=rows), together)
    assert torch.equal(moved(start, grads, split_sizes=rows), apart)
    assert not torch.allclose(apart, together, rtol=0, atol=1e-3)


def test_fused_rows_are_orthogonalised_one_by_one_unless_disabled() -> None:
    rows, grad = (4, 1, 1), normal(*SHAPE, seed=10)

    def moved(split: bool) -> Tensor:
        model = Named(weight=torch.zeros(SHAPE))
        model.weight.qkv_split_shapes = rows
        config = OptimizerConfig(**PLAIN, optimizer="muon", muon_fp32_matmul_prec="highest", muon_split_qkv=split)
        optimizer = get_optimizer(config, [model], {})
        model.weight.grad = grad.clone()
        optimizer.step()
        return model.weight.detach()

    def alone(part: Tensor) -> Tensor:
        param = nn.Parameter(torch.zeros_like(part))
        param.grad = part.clone()
        optim.Muon([param], **MEGATRON, lr=LR, weight_decay=0.0, fp32_matmul_prec="highest").step()
        return param.detach()

    apart, together = torch.cat([alone(part) for part in grad.split(rows)]), alone(grad)
    close = {"rtol": 0.0, "atol": 1e-6}  # of updates of size 0.05; stacks of other sizes round differently in fp32
    torch.testing.assert_close(moved(True), apart, **close)
    torch.testing.assert_close(moved(False), together, **close)
    assert not torch.allclose(apart, together, **close)


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


# --- in which numbers -------------------------------------------------------------------------------------------------

AWARE = {"bf16": True, "use_precision_aware_optimizer": True}


@dataclass(frozen=True, slots=True, kw_only=True)
class Kept:
    """Where main values are stored, and the dtypes of the moments."""

    param: torch.dtype
    copy: torch.dtype | None = None
    remainder: torch.dtype | None = None
    codes: torch.dtype | None = None
    exp_avg: torch.dtype = FP32
    exp_avg_sq: torch.dtype = FP32


FLOAT8 = torch.float8_e4m3fn
NUMBERS: Mapping[str, tuple[Mapping[str, Any], Kept]] = {
    "nothing": ({}, Kept(param=FP32)),
    "fp16": ({"fp16": True, "initial_loss_scale": 8.0}, Kept(param=FP16, copy=FP32)),
    "bf16": ({"bf16": True}, Kept(param=BF16, copy=FP32)),
    "params_dtype": ({"params_dtype": BF16}, Kept(param=BF16, copy=FP32)),
    "use_precision_aware_optimizer": (AWARE, Kept(param=BF16, remainder=torch.int16)),
    "main_params_dtype": (
        {**AWARE, "main_params_dtype": FP16},
        Kept(param=BF16, codes=FP16),
    ),
    "main_params_dtype of 24 bits": ({**AWARE, "main_params_dtype": torch.int8}, Kept(param=BF16, codes=torch.int8)),
    "store_param_remainders": ({**AWARE, "store_param_remainders": False}, Kept(param=BF16, copy=FP32)),
    **{
        f"{field} {dtype}": ({**AWARE, field: dtype}, Kept(param=BF16, remainder=torch.int16, **{moment: stored}))
        for field, moment in (("exp_avg_dtype", "exp_avg"), ("exp_avg_sq_dtype", "exp_avg_sq"))
        for dtype, stored in ((BF16, BF16), (FP16, FP16), (torch.uint8, FLOAT8))
    },
    "exp_avg_dtype of fp32 parameters": (
        {"use_precision_aware_optimizer": True, "exp_avg_dtype": BF16},
        Kept(param=FP32, exp_avg=BF16),
    ),
}


@pytest.mark.parametrize("name", NUMBERS)
def test_mains_and_moments_are_kept_in_the_requested_formats(name: str) -> None:
    fields, kept = NUMBERS[name]
    start, grad = (normal(300, seed=seed).to(kept.param) for seed in (1, 2))
    model = Named(weight=start)
    optimizer = get_optimizer(OptimizerConfig(**PLAIN, **fields), [model], {})
    model.weight.grad = grad
    assert optimizer.step().success
    (piece,) = pieces(optimizer)
    main, state = piece.main, piece.state
    found = Kept(
        param=main.target.dtype,
        copy=None if main.copy is None else main.copy.dtype,
        remainder=None if main.remainder is None else main.remainder.dtype,
        codes=main.kept()[0].dtype if isinstance(main, DecodedMain) else None,
        exp_avg=state["exp_avg"].dtype,
        exp_avg_sq=state["exp_avg_sq"].dtype,
    )
    assert found == kept
    assert optimizer.plan.state_bytes() == sum(unit.state_bytes() for unit in optimizer.stepper.units)
    # Adam's first step is lr against the gradient's sign, up to the bits of the moments: fp8 has 3 mantissa bits.
    want = start.float() * (1 - LR * WEIGHT_DECAY) - LR * grad.float().sign()
    atol = LR / 16 if FLOAT8 in (kept.exp_avg, kept.exp_avg_sq) else LR / 128
    rtol = {FP16: 2.0**-11, torch.int8: 2.0**-16}.get(kept.codes, 1e-6)
    torch.testing.assert_close(main.value(), want, rtol=rtol, atol=atol)


def test_lion_keeps_its_momentum_in_the_requested_dtype() -> None:
    config = OptimizerConfig(**PLAIN, optimizer="lion", use_precision_aware_optimizer=True, exp_avg_dtype=BF16)
    (piece,) = pieces(get_optimizer(config, [Named(weight=normal(9, seed=1))], {}))
    assert piece.state["exp_avg"].dtype == BF16


@pytest.mark.parametrize(("dtype", "total"), [(FP32, 1 + 2.0**-9), (BF16, 1.0)], ids=["fp32", "bf16"])
def test_gradients_are_summed_in_the_requested_dtype(dtype: torch.dtype, total: float) -> None:
    """1 on one rank and 2^-9 on the other: their sum has 10 bits, of which bf16 keeps 8, in half of the bytes."""

    def rank_main(comm: ThreadComm) -> tuple[set[float], int]:
        recording = RecordingComm(comm)
        model = Named(weight=torch.zeros(128, dtype=BF16))
        config = OptimizerConfig(**PLAIN, **AWARE, main_grads_dtype=dtype, optimizer="sgd", sgd_momentum=0.0)
        optimizer = get_optimizer(config, [model], {}, pg_collection=roles_over(recording))
        model.weight.grad = torch.full((128,), 2.0**-9 if comm.rank else 1.0, dtype=BF16)
        recording.calls.clear()
        optimizer.step()
        mains = optimizer.get_parameters()[0] / -LR * 2  # the mean's
        return set(mains.tolist()), max(call.num_bytes for call in recording.of("all_reduce"))

    for mains, num_bytes in run_threads(2, rank_main):
        assert [*mains] == pytest.approx([total], rel=2.0**-22)  # lr is not a power of two
        assert num_bytes == 128 * dtype.itemsize


# --- the scale of the loss --------------------------------------------------------------------------------------------

DYNAMIC = {"fp16": True, "initial_loss_scale": 64.0, "loss_scale_window": 3.0, "hysteresis": 2, "min_loss_scale": 1.0}
SCALES: Mapping[str, tuple[Mapping[str, Any], str, list[float]]] = {  # fields, steps (x: an overflow), scales
    "initial_loss_scale": ({"initial_loss_scale": 16.0}, "..", [16, 16, 16]),
    "loss_scale_window": ({"loss_scale_window": 2.0}, "....", [64, 64, 128, 128, 256]),
    "hysteresis": ({"hysteresis": 3}, "xxx", [64, 64, 64, 32]),
    "min_loss_scale": ({"min_loss_scale": 32.0}, "xxxx", [64, 64, 32, 32, 32]),
    "none of them": ({}, "...xxx", [64, 64, 64, 128, 128, 64, 32]),
    "loss_scale": ({"loss_scale": 4.0}, "..xx", [4, 4, 4, 4, 4]),
}


@pytest.mark.parametrize("name", SCALES)
def test_the_loss_scale_follows_the_verdicts(name: str) -> None:
    fields, verdicts, want = SCALES[name]
    model = Named(weight=torch.zeros(5, dtype=FP16))
    optimizer = get_optimizer(OptimizerConfig(**PLAIN, **{**DYNAMIC, **fields}), [model], {})
    scales = [optimizer.scale_loss(torch.ones(())).item()]
    for verdict in verdicts:
        model.weight.grad = torch.full((5,), math.inf if verdict == "x" else 1.0, dtype=FP16)
        assert optimizer.step().success is (verdict == ".")
        scales.append(optimizer.scale_loss(torch.ones(())).item())
    assert scales == want


# --- the step ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("clip_grad", "moved"), [(0.0, 5.0), (1.0, 1.0), (10.0, 5.0)], ids=["off", "1", "10"])
def test_gradients_are_scaled_down_to_the_requested_norm(clip_grad: float, moved: float) -> None:
    model = Named(weight=torch.zeros(2))
    config = OptimizerConfig(lr=1.0, weight_decay=0.0, clip_grad=clip_grad, optimizer="sgd", sgd_momentum=0.0)
    optimizer = get_optimizer(config, [model], {})
    model.weight.grad = torch.tensor([3.0, 4.0])
    assert optimizer.step().grad_norm == 5.0
    assert model.weight.norm().item() == pytest.approx(moved, rel=1e-5)  # clipping divides by the norm plus 1e-6


# --- which part lives where, and when it travels ----------------------------------------------------------------------


class WaitedFor:
    """A collective that writes its result when it is awaited, as an asynchronous one may."""

    def __init__(self, write: Callable[[], object]):
        self.write = write

    def wait(self) -> None:
        write, self.write = self.write, lambda: None
        write()


class LateGathers(RecordingComm):
    """Forward every collective; asynchronous gathers run when they are awaited."""

    def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
        self._note("all_gather", full)
        late = WaitedFor(lambda: self.inner.all_gather_(full, shard))
        if not async_op:
            late.wait()
        return late


def state_bytes_of(size: int, **fields: Any) -> list[int]:
    """Each rank's bytes of state (without parameters and gradients), for two matrices of 256 elements."""

    def rank_main(comm: ThreadComm) -> int:
        model = Named(first=normal(16, 16, seed=1), second=normal(16, 16, seed=2))
        optimizer = get_optimizer(OptimizerConfig(**PLAIN, **fields), [model], {}, pg_collection=roles_over(comm))
        return sum(unit.state_bytes() for unit in optimizer.stepper.units)

    return run_threads(size, rank_main)


def test_flat_shards_divide_the_state() -> None:
    assert state_bytes_of(4) == [2 * 256 * 8] * 4
    assert state_bytes_of(4, use_distributed_optimizer=True) == [2 * 256 * 8 // 4] * 4


def test_whole_matrices_are_dealt_to_ranks() -> None:
    assert state_bytes_of(3, optimizer="muon") == [2 * 256 * 4] * 3
    dealt = state_bytes_of(3, optimizer="muon", use_layer_wise_distributed_optimizer=True)
    assert sorted(dealt) == [0, 256 * 4, 256 * 4]


class Layer(nn.Module):
    """A weight that a forward uses."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(16, 16))

    def forward(self, x: Tensor) -> Tensor:
        return x @ self.weight


def wrapped(comm: Comm, **fields: Any) -> DistributedDataParallel:
    config = Config(use_distributed_optimizer=True, **fields)
    return DistributedDataParallel(config, Layer(), groups=roles_over(comm))


@pytest.mark.parametrize("overlap", [False, True], ids=["in the step", "before use"])
def test_parameters_are_gathered_in_the_step_or_before_use(overlap: bool) -> None:
    def rank_main(comm: ThreadComm) -> tuple[int, int]:
        late = LateGathers(comm)
        model = wrapped(late, overlap_param_gather=overlap)
        config = OptimizerConfig(
            **{**PLAIN, "weight_decay": 0.0}, use_distributed_optimizer=True, overlap_param_gather=overlap
        )
        optimizer = get_optimizer(config, [model], {}, pg_collection=roles_over(late))
        model(torch.ones(1, 16)).sum().backward()
        optimizer.step()
        (buffer,) = model.synced_buffers  # to read the parameter itself would wait for it
        fresh = int((buffer.memory.param_data != 1).sum())
        model(torch.ones(1, 16))
        return fresh, int((model.module.weight != 1).sum())

    assert run_threads(2, rank_main) == [(128 if overlap else 256, 256)] * 2  # half of it is a rank's own


def test_both_configurations_must_say_when_parameters_are_gathered() -> None:
    config = OptimizerConfig(**PLAIN, use_distributed_optimizer=True, overlap_param_gather=True)
    for model, message in ((Layer(), "is a plain Layer"), (wrapped(Alone()), "was wrapped with overlap_param_g")):
        with pytest.raises(ConfigError, match=message):
            get_optimizer(config, [model], {})


@pytest.mark.parametrize("with_step", [False, True], ids=["after the step", "with the step"])
def test_the_first_chunk_may_be_gathered_while_the_others_are_stepped(with_step: bool) -> None:
    """At the time of the first gather the second chunk has, or has not yet, been updated."""

    class Watching(RecordingComm):
        def all_gather_(self, full: Tensor, shard: Tensor, *, async_op: bool = False) -> Pending:
            seen.append(bool((chunks[1].module.weight == 1).all()))
            return super().all_gather_(full, shard, async_op=async_op)

    seen: list[bool] = []
    watching = Watching(Alone())
    ddp = Config(use_distributed_optimizer=True, overlap_param_gather=True)
    chunks = [DistributedDataParallel(ddp, Layer(), groups=roles_over(watching), chunk=number) for number in range(2)]
    fields = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    config = OptimizerConfig(**PLAIN, **fields, overlap_param_gather_with_optimizer_step=with_step)
    optimizer = get_optimizer(config, chunks, {}, pg_collection=roles_over(watching))
    chunks[1](chunks[0](torch.ones(1, 16))).sum().backward()
    optimizer.step()
    assert seen == [with_step, False]


# --- the wrapper ------------------------------------------------------------------------------------------------------


class Reduced(NamedTuple):
    """One reduction as a rank saw it: the collectives, and what came out for the first parameter."""

    kinds: list[str]
    num_bytes: int
    values: set[float]


def reduce_once(config: Config, *grads: float, dtype: torch.dtype = FP32) -> Reduced:
    """A parameter of 128 elements whose gradient is the n-th of `grads` on rank n, as rank 0 saw it."""

    def rank_main(comm: ThreadComm) -> Reduced:
        recording = RecordingComm(comm)
        ddp = DistributedDataParallel(config, Named(weight=torch.zeros(128, dtype=dtype)), groups=roles_over(recording))
        recording.calls.clear()
        main_grad(ddp.module.weight).fill_(grads[comm.rank])
        ddp.finish_grad_sync()
        (buffer,) = ddp.synced_buffers
        owned = [buffer.grad(piece.id, piece.of_param) for piece in buffer.owned()]
        values = {value for grad in owned for value in grad.flatten().tolist()}
        kinds = [call.kind for call in recording.calls]
        return Reduced(kinds, max(call.num_bytes for call in recording.calls), values)

    first: Reduced = run_threads(len(grads), rank_main)[0]
    return first


SHARDED = Config(use_distributed_optimizer=True)


def test_a_wrapper_reduces_everywhere_or_to_shards() -> None:
    assert reduce_once(Config(), 1.0, 3.0) == Reduced(["all_reduce"], 512, {2.0})
    assert reduce_once(SHARDED, 1.0, 3.0) == Reduced(["reduce_scatter"], 512, {2.0})


def test_a_wrapper_reduces_in_the_requested_dtype() -> None:
    fp32 = replace(SHARDED, grad_reduce_in_fp32=True)
    assert reduce_once(SHARDED, 1.0, 2.0**-9, dtype=BF16) == Reduced(["reduce_scatter"], 256, {0.5})
    assert reduce_once(fp32, 1.0, 2.0**-9, dtype=BF16) == Reduced(["reduce_scatter"], 512, {0.5 + 2.0**-10})


def test_sums_in_fp32_travel_as_parts() -> None:
    config = replace(SHARDED, reduce_scatter_with_fp32_accumulation=True)
    assert reduce_once(config, 1.0, 2.0**-9, dtype=BF16) == Reduced(["all_to_all"], 256, {0.5})


def test_a_mean_may_be_taken_after_the_sum() -> None:
    smallest = 2.0**-24  # of fp16: half of it is zero, twice it is not
    assert reduce_once(Config(), smallest, smallest, dtype=FP16).values == {0.0}
    assert reduce_once(Config(average_in_collective=True), smallest, smallest, dtype=FP16).values == {smallest}


def test_buckets_are_padded_to_the_size_at_which_links_are_fastest() -> None:
    assert reduce_once(SHARDED, 1.0, 1.0).num_bytes == 4 * 128
    assert reduce_once(replace(SHARDED, pad_buckets_for_high_nccl_busbw=True), 1.0, 1.0).num_bytes == 4 * 2**16


@pytest.mark.parametrize(
    ("fields", "sizes"),
    [({"bucket_size": 1}, [512] * 4), ({"num_buckets": 2}, [1024] * 2), ({}, [2048])],
    ids=["bucket_size", "num_buckets", "neither"],
)
def test_buckets_close_at_the_requested_size_if_something_overlaps(fields: dict[str, int], sizes: list[int]) -> None:
    def rank_main(comm: ThreadComm) -> list[int]:
        recording = RecordingComm(comm)
        model = Named(**{name: torch.zeros(128) for name in "abcd"})
        config = replace(SHARDED, overlap_grad_reduce=True, **fields)
        ddp = DistributedDataParallel(config, model, groups=roles_over(recording))
        recording.calls.clear()
        ddp.finish_grad_sync()
        return [call.num_bytes for call in recording.of("reduce_scatter")]

    assert run_threads(2, rank_main) == [sizes] * 2


@pytest.mark.parametrize("overlap", [False, True], ids=["in the step", "in backward"])
def test_gradients_are_reduced_in_the_step_or_in_backward(overlap: bool) -> None:
    def rank_main(comm: ThreadComm) -> int:
        recording = RecordingComm(comm)
        ddp = DistributedDataParallel(
            replace(SHARDED, overlap_grad_reduce=overlap), Layer(), groups=roles_over(recording)
        )
        for _ in range(2):  # the first iteration learns the order
            recording.calls.clear()
            ddp.zero_grad_buffer()
            ddp(torch.ones(1, 16)).sum().backward()
            in_backward = len(recording.of("reduce_scatter"))
            ddp.finish_grad_sync()
        return in_backward

    assert run_threads(2, rank_main) == [int(overlap)] * 2


@pytest.mark.parametrize("size", [2, 3])
@pytest.mark.parametrize("wraps", [False, True], ids=["plain", "wrapped"])
def test_blocks_of_8_bit_moments_are_not_cut_between_ranks(size: int, wraps: bool) -> None:
    """A block of 128 elements shares a scale: cut, it would have two, and other bits on every number of ranks."""

    def rank_main(comm: ThreadComm) -> list[int]:
        config = OptimizerConfig(
            **PLAIN, use_precision_aware_optimizer=True, exp_avg_dtype=torch.uint8, use_distributed_optimizer=True
        )
        model: nn.Module = Named(first=normal(1001, seed=1), second=normal(77, seed=2))
        if wraps:
            ddp = Config(use_distributed_optimizer=True)
            model = DistributedDataParallel(ddp, model, groups=roles_over(comm), shard_multiple=128)
        optimizer = get_optimizer(config, [model], {}, pg_collection=roles_over(comm))
        return [piece.of_param.start for piece in pieces(optimizer)]

    starts = [start for of_rank in run_threads(size, rank_main) for start in of_rank]
    assert max(starts) > 0
    assert {start % 128 for start in starts} == {0}
