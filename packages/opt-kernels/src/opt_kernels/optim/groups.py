"""Parameter groups: which of their options no step can work with, and groups as a state_dict has them."""

import copy
from collections.abc import Mapping, Sequence
from typing import Any

from opt_kernels.optim.state import StateDictError

ParamGroup = dict[str, Any]


def check_options(options: Mapping[str, Any]) -> None:
    """Raises ValueError for a number that no rule can work with."""
    at_least_zero = ("lr", "weight_decay", "eps", "momentum", "max_norm")
    for name in at_least_zero:
        if name in options and not float(options[name]) >= 0:
            raise ValueError(f"{name}={options[name]!r} is not allowed; give a number of at least 0")
    for beta in options.get("betas", ()):
        if not 0 <= beta < 1:
            raise ValueError(f"betas={options['betas']!r} are not allowed; give numbers of at least 0 and below 1")


def check_fixed(group: Mapping[str, Any], defaults: Mapping[str, Any], fixed: Sequence[str]) -> None:
    """Raises ValueError where an option that all groups share is another one in `group`."""
    for name in fixed:
        if name in group and group[name] != defaults[name]:
            raise ValueError(
                f"{name}={group[name]!r} in a group of an optimizer that was built with {defaults[name]!r}, which "
                f"holds for all of its groups; build it with {name}={group[name]!r}"
            )


def loaded_groups(
    groups: Sequence[ParamGroup], saved: Sequence[ParamGroup], defaults: Mapping[str, Any]
) -> list[ParamGroup]:
    """`saved` with the parameters of `groups`, and `defaults` for what it does not have.

    Raises StateDictError where there are other numbers of groups or parameters, and for options of torch.optim that
    these optimizers do not have.
    """
    sizes, saved_sizes = ([len(group["params"]) for group in of] for of in (groups, saved))
    if sizes != saved_sizes:
        raise StateDictError(
            f"the state_dict has groups of {saved_sizes} parameters where this optimizer has {sizes}; load one "
            "that was saved by an optimizer of the same groups"
        )
    for group in saved:
        for name in ("amsgrad", "maximize"):
            if group.get(name):
                raise StateDictError(
                    f"the state_dict was saved with {name}=True, which is not offered; train on without it"
                )
    names = [{"param_names": group["param_names"]} if "param_names" in group else {} for group in groups]
    return [
        {**defaults, **own_names, **copy.deepcopy(of_saved), "params": group["params"]}
        for group, of_saved, own_names in zip(groups, saved, names)
    ]
