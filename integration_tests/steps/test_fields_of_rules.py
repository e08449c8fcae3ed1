"""Fields of `OptimizerConfig` for a rule: the step is that of the optimizer with the same argument."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch
from named import LR, PLAIN, WEIGHT_DECAY, Named, normal
from torch import Tensor, nn
from torch.utils.flop_counter import FlopCounterMode

from opt_config import OptimizerConfig
from opt_kernels import optim
from opt_stack import get_optimizer

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
def test_normuon_divides_the_lines_of_the_drop_in(lines: str) -> None:
    fields = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon", "adaptive_muon_lines": lines}
    other = "rows" if lines == "cols" else "cols"
    close = {"rtol": 1e-5, "atol": 1e-6}
    torch.testing.assert_close(ours(**fields), same_as(adaptive(moment2_method="normuon", lines=lines)), **close)
    assert not torch.allclose(ours(**fields), same_as(adaptive(moment2_method="normuon", lines=other)), **close)


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
MARKED: Mapping[str, tuple[Mapping[str, Any], tuple[int, ...], Mapping[str, Any], bool]] = {  # marks, rows, fields
    "muon, heads": ({"head_rows": 2}, (2, 2, 2), EXACT_MUON, True),
    "muon, sizes": ({"split_sizes": ROWS}, ROWS, EXACT_MUON, True),
    "muon, fused": ({"qkv_split_shapes": ROWS}, ROWS, EXACT_MUON, True),
    "muon, fused, whole": ({"qkv_split_shapes": ROWS}, ROWS, {**EXACT_MUON, "muon_split_qkv": False}, False),
    "soap, sizes": ({"split_sizes": ROWS}, ROWS, {"optimizer": "soap"}, True),
    "soap, fused": ({"qkv_split_shapes": ROWS}, ROWS, {"optimizer": "soap", "soap_split_qkv": True}, True),
    "soap, fused, whole": ({"qkv_split_shapes": ROWS}, ROWS, {"optimizer": "soap"}, False),
}


@pytest.mark.parametrize("name", MARKED)
def test_rows_that_a_parameter_marks_are_separate_matrices(name: str) -> None:
    """Fused rows are split by Muon unless disabled, and by SOAP if enabled, as Megatron-Core preconditions them whole;
    heads and sizes that a parameter names are always split."""
    marks, rows, fields, is_split = MARKED[name]
    start, grads = normal(*SHAPE, seed=9), [normal(*SHAPE, seed=seed) for seed in (10, 11, 12)]
    parts = zip(start.split(rows), *(grad.split(rows) for grad in grads), strict=True)
    separate = torch.cat([moved(part, of_part, {}, **fields) for part, *of_part in parts])
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
