"""Checks of parameters: whether a rule can update them, and the rule for their dtype."""

from dataclasses import replace

import torch
from torch import Tensor

from opt_kernels.backends.elements import is_dense
from opt_kernels.dtensor import Span, first_number, is_dtensor, local, spans
from opt_kernels.hooks import bare
from opt_kernels.optim.state import init_main
from opt_kernels.params import MainFormat
from opt_kernels.quantized.adapters import is_quantized
from opt_kernels.rules.adaptive_muon import AdaptiveMuonRule
from opt_kernels.rules.base import Rule
from opt_kernels.rules.eigenbases import EigenbasisRule
from opt_kernels.rules.elementwise import ElementwiseRule
from opt_kernels.rules.muon import MuonRule
from opt_kernels.rules.muown import MuownRule


def for_dtype(rule: Rule, param: Tensor) -> Rule:
    """`rule` for the dtype of `param`: as in torch.optim, float64 parameters have float64 instead of float32 states.

    Triton and C++ sweeps do not support float64, so the torch backend is used unless another one is set.
    """
    if param.dtype is not torch.float64:
        return rule
    if isinstance(rule, ElementwiseRule):
        return rule.in_float64()
    if isinstance(rule, MuonRule):
        kept = rule.momentum_buffer_dtype
        wide = torch.float64 if kept is torch.float32 else kept
        return replace(rule, backend=rule.backend or "torch", momentum_buffer_dtype=wide)
    return rule


def rounds_stochastically(rule: Rule, mains: MainFormat, param: Tensor) -> bool:
    """Whether `param` is rounded stochastically. The noise of an element depends on its number."""
    return (
        bool(getattr(rule, "stochastic_rounding", False))
        and mains is MainFormat.PARAM
        and param.dtype is torch.bfloat16
    )


def spans_of(rule: Rule, mains: MainFormat, param: Tensor, first: int) -> tuple[Span, ...]:
    """The local elements of `param` in spans of consecutive numbers, for stochastic rounding: among those of all
    parameters, where the elements of `param` begin at `first`.

    One span if only averages are rounded so: columns of a shard are then numbered within it.
    """
    if not rounds_stochastically(rule, mains, param):
        return (Span(0, param.numel(), first + first_number(param)),)
    return tuple(span._replace(first=first + span.first) for span in spans(param) or ())


def check_param(param: Tensor, rule: Rule, mains: MainFormat) -> None:
    """Raise ValueError for a parameter that `rule` cannot update."""
    shard = local(param).detach()
    if not param.is_floating_point():
        remedy = "pass torch.view_as_real(param)" if param.is_complex() else "exclude it from the optimizer"
        raise ValueError(f"a parameter of {param.dtype}: only real floating-point parameters are updated; {remedy}")
    if is_quantized(shard) or hasattr(type(shard), "__tensor_flatten__"):
        raise ValueError(
            f"a parameter of type {type(shard).__name__}, whose elements are not in memory of its own dtype, where the "
            "sweeps update them; pass a dense parameter, or train parameters in fp8 with opt_stack.get_optimizer and "
            "OptimizerConfig(fp8_recipe=...)"
        )
    if shard.is_neg() or not is_dense(shard):
        raise ValueError(
            f"a parameter of shape {tuple(shard.shape)} and strides {tuple(shard.stride())} has holes, overlapping "
            "elements or its negative bit set; allowed are elements that fill their memory, in any order of "
            "dimensions; make it contiguous: nn.Parameter(param.detach().clone(memory_format=torch.contiguous_format))"
        )
    if param.dtype is torch.float64 and isinstance(bare(rule), AdaptiveMuonRule | EigenbasisRule | MuownRule):
        raise ValueError(f"a parameter of torch.float64, but {rule.name} keeps float32 states; pass float32 parameters")
    init_main(mains, shard.to("meta"))
    if rounds_stochastically(rule, mains, param):
        _check_spans(param, rule)
    if getattr(rule, "stochastic_rounding", False) and mains is MainFormat.PARAM and param.dtype is torch.float16:
        raise ValueError(
            "stochastic_rounding=True with a float16 parameter: only bfloat16 is rounded stochastically; pass "
            "mains='float32', or stochastic_rounding=False"
        )


def _check_spans(param: Tensor, rule: Rule) -> None:
    """Raise ValueError for a shard whose elements cannot be numbered as in the whole parameter."""
    local_spans = spans(param)
    scaled = [name for name, codec in rule.codecs.items() if codec.block]
    if local_spans is not None and (len(local_spans) <= 1 or not scaled):
        return
    assert is_dtensor(param)  # other tensors are one span
    reason = "its elements cannot be numbered"
    if local_spans:
        reason = f"its states {', '.join(scaled)} share scales across rows"
    raise ValueError(
        f"stochastic_rounding=True with a DTensor of shape {tuple(param.shape)} placed {param.placements}: {reason}, "
        "so it would be rounded unlike the whole parameter; shard it by rows (Shard(0)), keep its states in float32 or "
        "bfloat16, or pass mains='remainder'"
    )
