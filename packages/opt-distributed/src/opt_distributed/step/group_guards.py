"""Guards of `param_groups`: other parameters, entries that no step supports, numbers that differ between ranks."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any
from zlib import crc32

from torch import Tensor, int64

from opt_distributed.buffers.main_grad import UnusableGradientError
from opt_distributed.buffers.param_sync import stored_params
from opt_distributed.comm.collectives import Comm
from opt_distributed.pieces.piece import Group, Groups
from opt_distributed.step.guard import Refusal
from opt_kernels.formulas import NumberError
from opt_kernels.hooks import check_numbers, check_unread, reads_weight_decay
from opt_kernels.params import CHOICES, FIXED, HELD, SCHEDULED, WEIGHT_DECAY, GroupEntries, check_rate
from opt_kernels.rules import Rule
from opt_kernels.works import HYPER_FIELDS, is_number, is_on_device

_FLAGS = ("amsgrad", "maximize", "nesterov", "differentiable")  # of torch's optimizers
_MAY_BE_UNREAD = frozenset({WEIGHT_DECAY, "betas"})  # numbers that have no effect in some rules
_BITS = 20  # of a checksum: the sum of squares stays exact in float64 on up to 8,192 ranks


Numbers = list[tuple[str, Any]]
"""The numbers of a group, each after its entry."""


class GroupError(ValueError):
    """An entry of a parameter group was changed in a way that no step supports."""


class HyperError(ValueError):
    """Ranks would update the same parameters with different numbers."""


class ReplacedParamsError(UnusableGradientError, ValueError):
    """`param_groups` hold other parameters than those that the optimizer was built with."""


class SameParams(Refusal):
    """Parameters were replaced, as by Accelerate's FSDP2, or moved to another group: a step would ignore either."""

    def __init__(self, built: Groups):
        self._ids = _ids_of_params(built)

    def find(self, groups: Groups) -> ReplacedParamsError | None:
        if _ids_of_params(groups) == self._ids:
            return None
        return ReplacedParamsError(
            "param_groups hold other parameters than those that this optimizer was built with, as after "
            "Accelerate's FSDP2 `prepare(model, optimizer)` or an assignment; the layout of parameters is fixed "
            "when the optimizer is built. Shard or replace the model's parameters first (`fully_shard`), then call "
            "get_optimizer"
        )


def _ids_of_params(groups: Groups) -> list[list[int]]:
    """The identities of the parameters of each group that has any; does not wait for gathers."""
    per_group = (list(map(id, stored_params(group))) for group in groups)
    return [ids for ids in per_group if ids]


class UsableGroups(Refusal):
    """An entry of a group has changed in a way that no step supports. Only numbers are read in every step: a change of
    another entry would have no effect. Compares with the groups as they were built, and as the last step saw them."""

    def __init__(self, groups: Groups, rules: Mapping[int, Rule]):
        self.rules = rules
        self._built = [{name: group[name] for name in group if name != "params"} for group in groups]
        self._entries = GroupEntries(self._is_watched)

    def _is_watched(self, index: int, name: str) -> bool:
        """Whether a change of an entry is checked. Schedulers write theirs in every step; they may be any number, if
        the rule reads them."""
        if name == WEIGHT_DECAY:
            return index in self.rules and not reads_weight_decay(self.rules[index])
        return name not in (*HELD, *SCHEDULED)

    def find(self, groups: Groups) -> ValueError | None:
        try:
            self.check(groups)
        except ValueError as error:
            return error.with_traceback(None)  # its frames keep the groups, and so the parameters
        return None

    def check(self, groups: Groups) -> None:
        """Raise ValueError for a group without a learning rate, and GroupError for an entry that was removed, for a
        fixed one that was changed or added, and for numbers of another form or out of the bounds of their rule.
        Unchanged groups cost one pass in C each, and the bounds of rate and decay."""
        for index, _, names in self._entries.changes(groups):
            group = groups[index]
            built = self._built[index]
            for problem in self._problems(index, group, built):
                raise GroupError(f"group {built.get('name', index)!r}: {problem}")
            self._check_bounds(index, group, names)
            own = getattr(self.rules.get(index), "hyper_names", ())
            numbers = [group.get(name) for name in (*HYPER_FIELDS, *own)]
            if not any(map(_may_change, numbers)):
                self._entries.accept(index, group)
        for index in self.rules:
            check_rate(groups[index])
            self._check_bounds(index, groups[index], SCHEDULED)

    def _check_bounds(self, index: int, group: Group, names: Iterable[str]) -> None:
        """Raise GroupError for a number that is out of the bounds of the rule. Numbers on an accelerator are not read,
        because the host would have to wait for them."""
        numbers = {}
        for name in names:
            if name in group and not is_on_device(group[name]):
                numbers[name] = group[name]
        try:
            check_numbers(self.rules.get(index), numbers)
        except NumberError as error:
            raise GroupError(f"group {group.get('name', index)!r}: {error}. Nothing was updated") from None

    def _problems(self, index: int, group: Group, built: Group) -> Iterator[str]:
        yield from _structure_problems(group, built)
        yield from _number_problems(group, built)
        changed = {}
        for name in _MAY_BE_UNREAD & group.keys() & built.keys():
            if not is_on_device(group[name]) and group[name] != built[name]:
                changed[name] = group[name]
        if changed and index in self.rules:
            try:
                check_unread(self.rules[index], changed)
            except NumberError as error:  # they would have no effect
                yield str(error)

    def accept_loaded(self, groups: Groups) -> None:
        """Accept what a load wrote to the groups: torch's flags, which it has checked, and numbers without effect.
        Refusing these would make the checkpoint unreadable."""
        for built, group in zip(self._built, groups, strict=True):
            for name in _FLAGS:
                if name in group:
                    built[name] = group[name]
            for name in _MAY_BE_UNREAD & group.keys() & built.keys():
                if _has_form_of(group[name], built[name]):
                    built[name] = group[name]


def _structure_problems(group: Group, built: Group) -> Iterator[str]:
    """Entries that were removed, and those that decide how parameters are laid out and updated, if they changed."""
    for name in built:
        if name not in group:
            yield f"it has no entry {name!r} any more; groups keep the entries that they were built with"
    for name in (*FIXED, CHOICES):
        value = group.get(name)
        was = built.get(name)
        if value != was:
            yield (
                f"{name}={value!r} was set after the optimizer was built with {was!r}, which has no effect; build "
                "another optimizer with it, and load this one's state_dict"
            )
    for name in _FLAGS:
        value = group.get(name, False)
        if value is not built.get(name, False):
            yield f"{name}={value!r} was set after the optimizer was built, which has no effect"
    added = group.keys() - built.keys() - set(_FLAGS)
    choices = built.get(CHOICES, ())
    for choice in choices:
        name, _, chosen = choice.partition("=")
        if name in added and repr(group[name]) != chosen:
            yield f"{name}={group[name]!r} was added, but it was chosen when the optimizer was built: {choices}"


def _number_problems(group: Group, built: Group) -> Iterator[str]:
    """Numbers that were added, and those of another form."""
    read = [name for name in HYPER_FIELDS if name in built]
    for name in HYPER_FIELDS:
        if name not in group:
            continue
        value = group[name]
        if name not in read:
            yield f"{name}={value!r} was added, but its rule does not read it; it reads {', '.join(read)}"
            continue
        was = built[name]
        if not _has_form_of(value, was):
            form = f"{len(was)} numbers" if isinstance(was, tuple | list) else "a number"
            yield f"{name}={value!r} was set where the optimizer was built with {was!r}; pass {form}"


def _has_form_of(value: Any, built: Any) -> bool:
    """Whether both are single numbers, or rows of as many. A learning rate may be None until a scheduler sets it."""
    if not isinstance(built, tuple | list):
        return value is None or is_number(value)
    if not isinstance(value, tuple | list) or len(value) != len(built):
        return False
    return all(map(is_number, value))


def _may_change(value: Any) -> bool:
    """Whether a value has tensors, whose numbers change in place, so that they are checked in every step."""
    if isinstance(value, tuple | list):
        return any(map(_may_change, value))
    return isinstance(value, Tensor)


class EqualGroups:
    """Compares the numbers of groups whose parameters several ranks update, by position and name.

    Replicas would drift apart if a scheduler follows the loss of one rank, or only some ranks edit `param_groups`. Its
    flags: 1, the checksum and its square for each compared group of this rank, else zeros: their sums show whether all
    are equal. Groups that differ from the start, such as those of different pipeline stages, are not compared.
    """

    def __init__(self, groups: Groups, local: Iterable[int], *, own: Iterable[str], everyone: Comm):
        """Collective: all ranks of `everyone` call it.

        Args:
            groups: the groups of this rank.
            local: the indices of those that have parameters on it.
            own: further entries that rules read, which are not fields of `Hyper`.
            everyone: all ranks of the optimizer.
        """
        self._entries = (*HYPER_FIELDS, *FIXED, *sorted(set(own)))
        here = {}
        for index in sorted(local):
            group = groups[index]
            here[index, str(group.get("name", ""))] = _checksum(self._numbers_of(group))
        checksums: dict[tuple[int, str], list[int]] = {}
        for rank_checksums in everyone.gather_objects(here) if everyone.size > 1 else ():
            for key, checksum in rank_checksums.items():
                checksums.setdefault(key, []).append(checksum)
        self._compared = []  # indices, names, and whether they have parameters on this rank
        for key, values in sorted(checksums.items()):
            if len(values) > 1 and len(set(values)) == 1:
                self._compared.append((*key, key in here))
        self.num_flags = 3 * len(self._compared)
        self._numbers: list[Numbers] = []  # of the last step, for `error`; groups keep parameters alive

    def flags(self, groups: Groups) -> Sequence[float]:
        self._numbers = []
        flags: list[float] = []
        for index, _, is_local in self._compared:
            numbers = self._numbers_of(groups[index])
            self._numbers.append(numbers)
            checksum = _checksum(numbers) if is_local else 0
            flags += [float(is_local), float(checksum), float(checksum**2)]
        return flags

    def is_wrong(self, sums: Tensor) -> Tensor:
        differ: Tensor = _differ(*sums.to(int64).view(-1, 3).unbind(1))
        return differ.any(0, keepdim=True)

    def error(self, sums: Sequence[float]) -> Exception | None:
        for number, (_, name, _) in enumerate(self._compared):
            if _differ(*map(int, sums[3 * number : 3 * number + 3])):
                return HyperError(
                    f"group {name!r} has different numbers on the ranks that update its parameters (here "
                    f"{dict(self._numbers[number])}); they must be equal on all ranks: make the same edits of "
                    "param_groups everywhere, and give schedulers such as ReduceLROnPlateau a metric that is averaged "
                    "over the ranks. Nothing was updated"
                )
        return None

    def _numbers_of(self, group: Group) -> Numbers:
        return [(entry, _plain(group[entry])) for entry in self._entries if entry in group]


def _checksum(numbers: Numbers) -> int:
    return crc32(repr(numbers).encode()) >> (32 - _BITS)


def _differ(count: Any, total: Any, squares: Any) -> Any:
    """Whether checksums differ, given integers or tensors of them.

    Up to 2,048 ranks every product fits into 64 bits; beyond, tensors are compared modulo 2**64.
    """
    return count * squares != total * total


def _plain(value: Any) -> Any:
    """A value with the same `repr` on every rank. Tensors on an accelerator are not read, and so not compared."""
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, str):
        return str(value)
    is_single = isinstance(value, Real)
    if isinstance(value, Tensor):
        is_single = value.device.type == "cpu" and value.numel() == 1
    return float(value) if is_single else None
