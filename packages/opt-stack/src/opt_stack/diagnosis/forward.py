"""`ForwardWatch`: finds the first module of a forward pass that overflows."""

from functools import partial
from typing import Any
from weakref import finalize

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from opt_kernels.dtensor import local

_DTYPES = (torch.float16, torch.bfloat16, torch.float32, torch.float64)


class ForwardWatch:
    """Hooks of all modules of a model, which live as long as this object. In training, each call of a module reads its
    inputs and its output once more, also where activations are computed again; the host reads nothing.

    A module overflows if its output holds NaN or +inf and its inputs do not; -inf is taken for a mask.
    """

    def __init__(self, model: nn.Module | None, device: torch.device):
        self.names: list[str] = []
        self.first = torch.zeros((), dtype=torch.int64, device=device)  # of `names`, from 1; 0: none has overflowed
        for name, module in model.named_modules() if model is not None else ():
            self.names.append(name or type(module).__name__)
            note = partial(_note, self.first, len(self.names))
            finalize(self, module.register_forward_hook(note, with_kwargs=True).remove)


def _note(first: Tensor, number: int, module: nn.Module, args: Any, options: Any, output: Any) -> None:
    if module.training and not torch._C._are_functorch_transforms_active():  # those cannot write to `first`
        is_new = (first == 0) & _is_usable((args, options), first) & ~_is_usable(output, first)
        first.masked_fill_(is_new, number)


def _is_usable(values: Any, first: Tensor) -> Tensor:
    found = first >= 0
    for value in tree_leaves(values):
        is_dense = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_nested
        if is_dense and value.dtype in _DTYPES:
            found &= (local(value) < torch.inf).all().to(first.device)
    return found
