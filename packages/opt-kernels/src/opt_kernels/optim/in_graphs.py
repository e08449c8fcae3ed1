"""A drop-in's step inside a graph of `torch.compile`: one operation, which runs the uncompiled step.

The operation takes as arguments what earlier code of the same graph may have changed: weights, gradients, numbers of
the groups, and the attributes that `torch.amp.GradScaler` sets. It reads everything else from the optimizer when it
runs: states, hooks, and entries of groups that are not numbers. A compiled function must not change these before its
step. A number that changes is an input of the graph from its second value on, so that a schedule compiles the function
twice, not at every step. Another set of gradients or parameters compiles it again.

Steps with a closure, and of parameters of tensor subclasses (DTensor), break the graph at `step()` instead.
"""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from itertools import count
from typing import Any, Protocol, TypeVar
from weakref import WeakValueDictionary

import torch
from torch import Tensor

Group = dict[str, Any]
T = TypeVar("T", Tensor, Tensor | None)
_FOR_SCALER = ("grad_scale", "found_inf")  # attributes that `torch.amp.GradScaler` sets for the time of a step


class Stepping(Protocol):
    """An optimizer, as the operation sees it."""

    param_groups: list[Group]

    def _update_(self) -> None: ...


_handles = count(1)
_optimizers: WeakValueDictionary[int, Any] = WeakValueDictionary()


def handle_of(optimizer: Stepping) -> int:
    """A number that identifies `optimizer` in graphs during its lifetime."""
    handle = next(_handles)
    _optimizers[handle] = optimizer
    return handle


def optimizer_of(handle: int) -> Any:
    """The optimizer that `handle_of` was given. Raises KeyError once it is deleted."""
    return _optimizers[handle]


def step_in_graph(optimizer: Any, handle: int) -> None:
    """Add the step to the graph that is being traced."""
    params = [param for group in optimizer.param_groups for param in group["params"]]
    places = [place for place, param in enumerate(params) if param.grad is not None]
    numbers = tensors_of_numbers(optimizer.param_groups)
    for_scaler = [getattr(optimizer, name, None) for name in _FOR_SCALER]
    moved, grads = detached(params[place] for place in places), detached(params[place].grad for place in places)
    torch.ops.opt_kernels.step_(handle, places, moved, grads, numbers, *for_scaler)


def detached(tensors: Iterable[T]) -> list[T]:
    """Views outside of autograd; None stays None. In a graph, `torch.no_grad` would outlast an error of the step."""
    return [tensor if tensor is None else tensor.detach() for tensor in tensors]


def tensors_of_numbers(groups: Sequence[Group]) -> list[Tensor]:
    """The numbers of all groups as tensors: those that are not tensors as 0-d float64."""
    # A product with a number may take part in a graph without making it a constant there.
    return [
        value if isinstance(value, Tensor) else torch.ones((), dtype=torch.float64, device="cpu") * value
        for group in groups
        for _, _, value in numbers_of(group)
    ]


def numbers_of(group: Mapping[str, Any]) -> list[tuple[str, int | None, Any]]:
    """Name, index within a tuple or list, and value of every number of a group, tensors included."""
    found: list[tuple[str, int | None, Any]] = []
    for name, value in group.items():
        if name == "params":
            continue
        if isinstance(value, tuple | list):
            found += [(name, index, one) for index, one in enumerate(value) if _is_number(one)]
        elif _is_number(value):
            found.append((name, None, value))
    return found


def _is_number(value: object) -> bool:
    return isinstance(value, Tensor) or (isinstance(value, int | float) and not isinstance(value, bool))


def _step_(
    handle: int,
    places: Sequence[int],  # of the parameters that have gradients, among all
    params: Sequence[Tensor],  # of these; copies, where the graph has made any
    grads: Sequence[Tensor],
    numbers: Sequence[Tensor],
    grad_scale: Tensor | None,
    found_inf: Tensor | None,
) -> None:
    optimizer = optimizer_of(handle)
    with _attributes(optimizer, dict(zip(_FOR_SCALER, (grad_scale, found_inf), strict=True))):
        update_(optimizer, places, params, grads, numbers)


def update_(
    optimizer: Stepping,
    places: Sequence[int],
    params: Sequence[Tensor],
    grads: Sequence[Tensor | None],
    numbers: Sequence[Tensor],
) -> None:
    """Run the uncompiled step with the weights, gradients and numbers of the graph.

    Parameters whose places are not given have no gradient. Numbers are in the order of `tensors_of_numbers`.
    """
    own = [param for group in optimizer.param_groups for param in group["params"]]
    given = dict(zip(places, grads, strict=True))
    with torch.no_grad(), _gradients(own, given), _numbers(optimizer.param_groups, numbers):
        copies = [
            (own[place], param)
            for place, param in zip(places, params, strict=True)
            if param is not own[place] and param.data_ptr() != own[place].data_ptr()
        ]
        for param, copy in copies:
            param.copy_(copy)
        optimizer._update_()
        for param, copy in copies:
            copy.copy_(param)


@contextmanager
def _gradients(params: Sequence[Tensor], grads: Mapping[int, Tensor | None]) -> Iterator[None]:
    """Set these gradients, by the places of their parameters, and None for all other parameters."""
    before = [param.grad for param in params]
    others = [place for place, grad in enumerate(before) if grad is not grads.get(place)]
    for place in others:
        params[place].grad = grads.get(place)
    try:
        yield
    finally:
        for place in others:
            params[place].grad = before[place]


@contextmanager
def _numbers(groups: Sequence[Group], given: Sequence[Tensor]) -> Iterator[None]:
    """Set the numbers of the groups to those in the graph."""
    before = []
    entries = [(group, *entry) for group in groups for entry in numbers_of(group)]
    if len(entries) != len(given):
        raise RuntimeError(
            f"a compiled step was given {len(given)} numbers of groups that have {len(entries)}; change which entries "
            "of param_groups are numbers before the compiled function is called, not within it"
        )
    value: Any
    for (group, name, index, present), value in zip(entries, given, strict=True):
        if isinstance(present, Tensor):
            is_same = value is present or value.data_ptr() == present.data_ptr()
        else:
            value = type(present)(value.item())
            is_same = value == present
        if not is_same:
            before.append((group, name, group[name]))
            group[name] = value if index is None else _replaced(group[name], index, value)
    try:
        yield
    finally:
        for group, name, entry in reversed(before):
            group[name] = entry


def _replaced(row: Sequence[Any], index: int, value: Any) -> Sequence[Any]:
    return type(row)([value if i == index else one for i, one in enumerate(row)])  # type: ignore[call-arg]


@contextmanager
def _attributes(optimizer: Any, given: Mapping[str, Tensor | None]) -> Iterator[None]:
    """Set these attributes of the optimizer, and restore the previous ones afterwards."""
    before = {name: getattr(optimizer, name) for name in given if hasattr(optimizer, name)}
    for name, value in given.items():
        setattr(optimizer, name, value)
    try:
        yield
    finally:
        for name in given:
            delattr(optimizer, name)
        for name, value in before.items():
            setattr(optimizer, name, value)


_LIBRARY = torch.library.Library("opt_kernels", "FRAGMENT")  # type: ignore[no-untyped-call, unused-ignore]
_LIBRARY.define(  # type: ignore[no-untyped-call, unused-ignore]
    "step_(int handle, int[] places, Tensor(a!)[] params, Tensor[] grads, Tensor[] numbers, Tensor? grad_scale, "
    "Tensor? found_inf) -> ()"
)
_LIBRARY.impl("step_", _step_, "CompositeExplicitAutograd")  # type: ignore[no-untyped-call, unused-ignore]
torch.library.register_fake("opt_kernels::step_", lambda *given: None, lib=_LIBRARY)
