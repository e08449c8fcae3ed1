"""Values next to a tie between two codes."""

import torch
from torch import Tensor


def companded_ties(exponent: int, *, num_groups: int, seed: int = 0) -> Tensor:
    """Groups of 128 with a largest value in [2^exponent, 2^(exponent + 1)), the others within two units of a tie
    between two codes of `Companded`. (128 num_groups,) float32."""
    generator = torch.Generator().manual_seed(seed)
    units = torch.randint(2**23, 2**24, (num_groups, 1), generator=generator).double()
    largest = torch.ldexp(units, torch.tensor(exponent - 23))
    code = torch.randint(127, (num_groups, 127), generator=generator)
    tie = (largest * (2 * code + 1) / (507 - 2 * code)).float()
    near = tie.view(torch.int32) + torch.randint(-2, 3, tie.shape, generator=generator, dtype=torch.int32)
    x = torch.cat([largest.float(), near.clamp(min=0).view(torch.float32).minimum(largest.float())], 1).flatten()
    x[1::3] *= -1
    return x
