"""Fields of `OptimizerConfig` for a rule: the step is that of the optimizer with the same argument."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest
import torch
from named import LR, PLAIN, WEIGHT_DECAY, Named, normal
from torch import Tensor
from torch.utils.flop_counter import FlopCounterMode

from opt_config import OptimizerConfig
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
    "muon_weight_decay_method": ("muon", "independent", {"weight_decay_method": "independent"}),
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
def test_a_number_of_a_rule_is_the_argument_of_the_optimizer_of_that_name(name: str) -> None:
    rule, value, arguments, *other = CHANGES[name]
    changed = ours(**{"optimizer": rule, name: value})
    torch.testing.assert_close(changed, theirs(*other or [rule], **arguments), **CLOSE)
    torch.testing.assert_close(ours(optimizer=rule), theirs(rule), **CLOSE)
    assert not torch.allclose(changed, theirs(rule), **CLOSE)


@pytest.mark.parametrize("lines", ["rows", "cols", "longer"])
def test_normuon_divides_the_lines_of_the_drop_in(lines: str) -> None:
    fields = {"optimizer": "adaptive_muon", "adaptive_muon_moment2_method": "normuon", "adaptive_muon_lines": lines}
    other = "rows" if lines == "cols" else "cols"
    by_lines = [theirs("adaptive_muon", moment2_method="normuon", lines=of) for of in (lines, other)]
    torch.testing.assert_close(ours(**fields), by_lines[0], **CLOSE)
    assert not torch.allclose(ours(**fields), by_lines[1], **CLOSE)


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
