"""Everything that can be done to an optimizer, its model or its gradients between two steps, by name."""

from collections.abc import Callable
from copy import deepcopy
from typing import Any

import torch
from torch import Tensor, nn

from opt_stack import Optimizer

Disturb = Callable[[Optimizer, list[nn.Parameter]], None]
NAMES = ("square", "wide", "bias")
SHAPES = ((4, 4), (3, 5), (5,))
BF16 = {"bf16": True, "params_dtype": torch.bfloat16}
FORMS: dict[str, dict[str, Any]] = {
    "float32": {},
    "bfloat16 with mains": BF16,
    "bfloat16 with remainders": {**BF16, "use_precision_aware_optimizer": True, "use_distributed_optimizer": True},
    "muon": {**BF16, "optimizer": "muon"},
}


class Net(nn.Module):
    """Two matrices and a vector; their gradients are set, not computed, except in wrapped models."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        for name, shape in zip(NAMES, SHAPES, strict=True):
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=generator).to(dtype)))

    def forward(self, step: int) -> Tensor:
        generator = torch.Generator().manual_seed(step)
        factors = [torch.randn(shape, generator=generator) for shape in SHAPES]
        return torch.stack([(p * f.to(p.dtype)).float().sum() for p, f in zip(self.parameters(), factors)]).sum()


def new_grads(params: list[nn.Parameter], step: int) -> None:
    """Gradients in place, where there are any of the same kind."""
    generator = torch.Generator().manual_seed(step)
    for param in params:
        value = torch.randn(param.shape, generator=generator).to(param.dtype)
        if param.grad is None:
            param.grad = value
        else:
            param.grad.copy_(value)


def nothing(_: Optimizer, __: list[nn.Parameter]) -> None:
    return None


def grad_elsewhere(_: Optimizer, params: list[nn.Parameter]) -> None:
    assert params[0].grad is not None
    params[0].grad = params[0].grad.clone()


def grad_transposed(_: Optimizer, params: list[nn.Parameter]) -> None:
    assert params[0].grad is not None
    params[0].grad.data = params[0].grad.detach().t()  # the same address


def grad_of_another_dtype(_: Optimizer, params: list[nn.Parameter]) -> None:
    assert params[0].grad is not None
    params[0].grad.data = params[0].grad.detach().half()


def grad_gone(_: Optimizer, params: list[nn.Parameter]) -> None:
    params[2].grad = None
    params[2].requires_grad_(False)


def grads_gone_and_back(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.zero_grad()
    new_grads(params, 77)


def weight_elsewhere(_: Optimizer, params: list[nn.Parameter]) -> None:
    params[0].data = params[0].detach().clone()


def weight_transposed(_: Optimizer, params: list[nn.Parameter]) -> None:
    params[0].data = params[0].detach().t()  # the same address


def weight_of_another_dtype(_: Optimizer, params: list[nn.Parameter]) -> None:
    params[1].grad = None
    params[1].data = params[1].detach().half()


def weight_replaced(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.param_groups[0]["params"][0] = nn.Parameter(torch.ones_like(params[0]))


def numbers_changed(optimizer: Optimizer, _: list[nn.Parameter]) -> None:
    for group in optimizer.param_groups:
        group["lr"] = 0.03
        group["weight_decay"] = 0.0


def moment_of(optimizer: Optimizer, param: nn.Parameter) -> str:
    return next(name for name in ("exp_avg", "momentum_buffer") if name in optimizer.state[param])


def state_set(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    name = moment_of(optimizer, params[0])
    optimizer.state[params[0]][name] = optimizer.state[params[0]][name].clone().neg_()


def state_elsewhere(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    moment = optimizer.state[params[0]][moment_of(optimizer, params[0])]
    moment.data = moment.clone().neg_()


def state_transposed(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    moment = optimizer.state[params[0]][moment_of(optimizer, params[0])]
    moment.data = moment.detach().t()  # the same address


def state_emptied(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.state[params[1]] = {}


def count_set(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.state[params[0]]["step"] = torch.tensor(9.0)


def memory_of_states_replaced(optimizer: Optimizer, _: list[nn.Parameter]) -> None:
    """Tensors of a state_dict share the memory of states, which a resize of their storage replaces."""
    for state in optimizer.state_dict()["state"].values():
        for tensor in state.values():
            values = tensor.clone()
            tensor.untyped_storage().resize_(1 << 16)
            tensor.copy_(values)


def mains_elsewhere(optimizer: Optimizer, _: list[nn.Parameter]) -> None:
    for main in optimizer.get_parameters():
        main.data = main.detach().clone().mul_(2)


def loaded(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    saved = deepcopy(optimizer.state_dict())
    for state in saved["state"].values():
        state["step"].fill_(11)
        for name in ("exp_avg", "momentum_buffer"):
            if name in state:
                state[name].mul_(2)
    optimizer.load_state_dict(saved)


def weights_reloaded(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    with torch.no_grad():
        params[0].fill_(0.5)
    optimizer.reload_model_params()


def weights_taken_from_a_dict(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    names = [id.name for id in optimizer._ids]
    optimizer.reload_model_params({name: torch.full_like(p, 0.3) for name, p in zip(names, params, strict=True)})


def offloaded_and_restored(optimizer: Optimizer, _: list[nn.Parameter]) -> None:
    optimizer.offload_to_cpu()
    optimizer.restore_from_cpu()


def evaluated(optimizer: Optimizer, _: list[nn.Parameter]) -> None:
    optimizer.eval()
    optimizer.train()


def group_added(optimizer: Optimizer, params: list[nn.Parameter]) -> None:
    optimizer.add_param_group({"params": [nn.Parameter(torch.ones(3))]})


DISTURBED: list[Disturb] = [
    nothing, grad_elsewhere, grad_transposed, grad_of_another_dtype, grad_gone, grads_gone_and_back, weight_elsewhere,
    weight_transposed, weight_of_another_dtype, weight_replaced, numbers_changed, state_set, state_elsewhere,
    state_transposed, state_emptied, count_set, memory_of_states_replaced, mains_elsewhere, loaded, weights_reloaded,
    weights_taken_from_a_dict, offloaded_and_restored, evaluated, group_added,
]  # fmt: skip
