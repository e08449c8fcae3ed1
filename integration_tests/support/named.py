"""Named parameters without a forward, the configuration that tests of single fields change, and what is owned."""

import torch
from torch import Tensor, nn

from opt_distributed.pieces import OwnedPiece
from opt_stack import Optimizer

LR = 0.02
WEIGHT_DECAY = 0.1
PLAIN = {"lr": LR, "weight_decay": WEIGHT_DECAY, "clip_grad": 0.0}
BF16 = torch.bfloat16
FP16 = torch.float16
FP32 = torch.float32


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
