"""Mains: the form in which an optimizer keeps a parameter between steps."""

from enum import Enum

import torch
from torch import Tensor

from opt_kernels.backends.elements import flat
from opt_kernels.codecs.remainder import join, split_

MAIN, REMAINDER = "main", "remainder"  # names in the state


class Mains(Enum):
    """The form in which a parameter is kept. float32 and float64 parameters are always their own main."""

    PARAM = "param"  # the parameter itself, in its own dtype
    FLOAT32 = "float32"  # a float32 copy in the state `main`: 4 bytes per element
    REMAINDER = "remainder"  # float32 whose upper half is the bfloat16 parameter; lower half in `remainder`: 2 bytes


def parse_mains(name: str) -> Mains:
    """The member of this value. Raises ValueError for an unknown one."""
    try:
        return Mains(name)
    except ValueError:
        allowed = ", ".join(repr(mains.value) for mains in Mains)
        raise ValueError(f"mains={name!r} is unknown; pass one of {allowed}") from None


def is_narrow(param: Tensor) -> bool:
    """Whether a main can be wider than the parameter."""
    return param.dtype not in (torch.float32, torch.float64)


def init_main(mains: Mains, param: Tensor) -> dict[str, Tensor]:
    """The states that `mains` adds to those of the rule, before the first step.

    Raises ValueError for a remainder of a parameter that is not bfloat16.
    """
    if mains is Mains.PARAM or not is_narrow(param):
        return {}
    if mains is Mains.FLOAT32:
        return {MAIN: param.to(torch.float32, copy=True)}
    if param.dtype is not torch.bfloat16:
        raise ValueError(
            f"mains='remainder' with a {param.dtype} parameter: only bfloat16 is the upper half of a float32; "
            "pass mains='float32'"
        )
    return {REMAINDER: torch.zeros_like(param, dtype=torch.int16, requires_grad=False)}


def saved_main(param: Tensor, state: dict[str, Tensor]) -> Tensor | None:
    """The float32 main of a parameter, joined from its remainder if need be. None if the parameter is its own main."""
    if REMAINDER in state:
        main = torch.empty_like(param, dtype=torch.float32, requires_grad=False)
        flat(main, main, MAIN).copy_(join(flat(param, param, "param"), flat(state[REMAINDER], param, REMAINDER)))
        return main
    return state.get(MAIN)


def load_main_(param: Tensor, state: dict[str, Tensor], saved: Tensor) -> None:
    """Write the float32 main `saved` to `state`, and rounded to the dtype of `param` to `param`."""
    if REMAINDER in state:
        main = torch.empty_like(param, dtype=torch.float32, requires_grad=False).copy_(saved)
        split_(flat(param, param, "param"), flat(state[REMAINDER], param, REMAINDER), flat(main, main, MAIN))
        return
    if MAIN in state:
        state[MAIN].copy_(saved)
    param.copy_(saved)
