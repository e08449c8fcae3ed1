"""The plan as people read it: every unit counts the bytes of its own parameters only."""

import torch
from torch import nn

from opt_config import OptimizerConfig
from opt_stack import get_optimizer


def test_a_plan_of_fp32_dense_parameters_and_bf16_experts_can_be_printed() -> None:
    """A router in fp32 with experts in bf16: the dense unit has no bf16 parameter, the experts' no fp32 one."""
    model = nn.ModuleDict({"router": nn.Linear(4, 3, bias=False), "expert": nn.Linear(4, 5, bias=False).bfloat16()})
    model["expert"].weight.allreduce = False
    optimizer = get_optimizer(OptimizerConfig(lr=0.01, bf16=True), [model])
    # Adam's two fp32 moments for every element, and an fp32 copy of those in bf16.
    assert optimizer.plan.state_bytes() == 12 * 8 + 20 * (4 + 8)
    assert optimizer.plan.state_bytes() == sum(unit.state_bytes() for unit in optimizer.stepper.units)
    assert "adam/experts updates 1 parameters, 20 elements" in str(optimizer.plan)
    assert torch.float32 not in next(unit for unit in optimizer.plan.units if unit.is_expert).numbers
