"""`Guard`: a reason for which every rank refuses a step; `Refusal`: a guard for an error that a rank finds alone.

The guards that every step has stand here: gradients that must not be used, parameters that were replaced or have moved,
entries of `param_groups` that no step supports, and numbers in them that differ between ranks.
"""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator, Mapping, Sequence
from numbers import Real
from typing import Any, Protocol
from weakref import ref
from zlib import crc32

import torch
from torch import Tensor, int64

from opt_distributed.buffers.main_grad import UnusableGradientError
from opt_distributed.buffers.param_sync import stored_params
from opt_distributed.buffers.stored import StorageError
from opt_distributed.buffers.wires import naming
from opt_distributed.comm.collectives import Comm
from opt_distributed.pieces.piece import Groups
from opt_distributed.pieces.sources import Source
from opt_kernels.formulas import NumberError
from opt_kernels.hooks import check_numbers, check_unread, reads_weight_decay
from opt_kernels.params import CHOICES, FIXED, HELD, SCHEDULED, WEIGHT_DECAY, GroupEntries, check_rate
from opt_kernels.rules import Rule
from opt_kernels.works import HYPER_FIELDS, is_number, is_on_device

_FLAGS = ("amsgrad", "maximize", "nesterov", "differentiable")  # of torch's optimizers
_BITS = 20  # of a checksum: the sum of squares stays exact in float64 on up to 8,192 ranks


class Guard(Protocol):
    """Its flags are summed over ranks in the step's one reduction, so that every rank learns of an error in the step.

    It belongs to the `Stepper.guards` of every rank, in one order, before the first step. Flags and errors are local. A
    check that needs a collective of its own runs at the start of the next step (`Stepper.at_start`). An accelerator
    asks for the error after the step, at the latest when the next one begins, so a guard must not keep a model alive:
    it holds the parts that it asks by weak references.
    """

    @property
    def num_flags(self) -> int:
        """The number of flags, equal on every rank."""
        ...

    def flags(self, groups: Groups) -> Sequence[float]:
        """This rank's flags, once a step, after gradients were reduced, given the groups of the step. If it raises,
        every rank refuses the step."""
        ...

    def is_wrong(self, sums: Tensor) -> Tensor:
        """(1,) bool on the device: nothing may be written, given the sums of the flags, (num_flags,) float64."""
        ...

    def error(self, sums: Sequence[float]) -> Exception | None:
        """The error to raise on this rank if `is_wrong`, given the same sums.

        None withdraws the refusal, on a CPU: the step is made. On an accelerator its update has been skipped by then.
        """
        ...


class GuardError(ValueError):
    """Ranks have different guards, or a guard does not have the flags that it announces."""


class GroupError(ValueError):
    """An entry of a parameter group was changed in a way that no step supports."""


class HyperError(ValueError):
    """Ranks would update the same parameters with different numbers."""


class Guards:
    """The guards of a `Stepper`, in one order on every rank: the first that refuses a step raises its error.

    The order is that of `all`: whether parameters are those of the optimizer, the caller's `first`, those that every
    step has, the caller's `last`, and what is appended before the first step.
    """

    groups: Groups = ()  # of the present step
    refused: Exception | None = None  # why this rank's gradients must not be used, or a guard that failed
    agreed: tuple[Guard, ...] = ()  # those of the first step

    def __init__(
        self,
        built: Groups,  # the groups as they were built
        sources: Iterable[Source],
        rules: Mapping[int, Rule],  # those that update this rank's parameters, by the indices of their groups
        equal: "EqualGroups",
        *,
        everyone: Comm,
        instances: Comm,
        first: Sequence[Guard] = (),
        last: Sequence[Guard] = (),
    ):
        self._everyone = everyone
        self._instances = instances
        self._built = [{**group, "lr": group.get("lr") or 0.0} for group in built]
        self._usable_grads = UsableGrads()
        self.same_params = SameParams(built)
        self.usable_groups = UsableGroups(built, rules)
        self._equal = equal
        own = (self._usable_grads, self.usable_groups, ParamsInPlace(sources), *((equal,) if equal.num_flags else ()))
        self.all: list[Guard] = [self.same_params, *first, *own, *last]

    def begin(self, groups: Groups) -> None:
        """Begin a step. In the first one, check that all ranks have as many guards, of the same types and numbers of
        flags. Collective then. Raises GuardError, on every rank."""
        if not self.agreed:
            found = self._gather([(type(guard).__name__, guard.num_flags) for guard in self.all], "guards")
            if len(different := sorted(set(map(str, found)))) > 1:
                raise GuardError(
                    f"ranks have different guards, by type and number of flags: {' and '.join(different)}; append the "
                    "same guards on every rank, in one order, before the first step. Nothing was updated"
                )
            self.agreed = tuple(self.all)
        self.groups = groups
        self.refused = None

    def refuse(self, error: Exception | None) -> None:
        """Let every rank refuse the present step, if `error` is one."""
        self.refused = self.refused or error

    def flags(self) -> list[float]:
        """Return the flags of all guards: as many in every step, and on every rank. Zeros for a guard that fails, for
        which every rank refuses the step."""
        if tuple(self.all) != self.agreed:
            self.refuse(GuardError("guards were changed after the first step; append them before, on every rank"))
        flags = []
        for guard in self.agreed:
            flags.append(self._flags_of(guard))
            if guard in (self.same_params, self.usable_groups) and flags[-1] != [0.0]:
                self.groups = self._built  # the update is skipped, but this rank joins its collectives
        # Known only now: a guard that failed is one of its errors.
        self._usable_grads.found = self.refused
        flags[self.agreed.index(self._usable_grads)] = [float(self.refused is not None)]
        return [flag for of_guard in flags for flag in of_guard]

    def _flags_of(self, guard: Guard) -> list[float]:
        try:
            flags = list(guard.flags(self.groups))
            if (num := len(flags)) != guard.num_flags:
                raise GuardError(f"{type(guard).__name__} has {num} flags, but num_flags={guard.num_flags}")
        except Exception as error:
            self.refuse(error.with_traceback(None))  # its frames may keep parameters alive
            return [0.0] * guard.num_flags
        return flags

    def found(self) -> list[str]:
        """Name the guards of this rank that refused the step, with their errors."""
        return [f"{type(guard).__name__}: {error}" for guard in self.agreed if (error := getattr(guard, "found", None))]

    def refuse_late(self, error: Exception, flags: Tensor) -> Tensor:
        """Let every rank refuse the present step by its flags, (n,) on the device; return them with that added."""
        self.refuse(error.with_traceback(None))  # its frames may keep parameters alive
        self._usable_grads.found = self.refused
        place = sum(guard.num_flags for guard in self.agreed[: self.agreed.index(self._usable_grads)])
        return flags.index_fill(0, torch.tensor([place], dtype=torch.int64, device=flags.device), 1.0)

    def check_again(self, groups: Groups, max_norm: float) -> None:
        """Raise ValueError on every rank if one cannot use `groups`, or ranks would update with different numbers: both
        may have changed since `flags`. Collective: one small exchange."""
        self.groups = groups
        error = None
        flags: Sequence[float] = ()
        try:
            self.usable_groups.check(groups)
            flags = self._equal.flags(groups)
        except Exception as refusal:  # of any kind, because the other ranks wait
            error = refusal
        per_rank = self._gather((flags, max_norm, error and str(error)), "groups")
        texts = [text for _, _, text in per_rank if text is not None]
        norms = sorted({norm for _, norm, _ in per_rank})
        if error is None and texts:
            error = GroupError(f"another rank refused its parameter groups: {texts[0]}. Nothing was updated")
        if error is None and len(norms) > 1:
            error = HyperError(f"ranks clip to different norms: {norms}; pass one to all. Nothing was updated")
        if error is None:
            error = self._equal.error([sum(of_flag) for of_flag in zip(*(here for here, _, _ in per_rank))])
        if error is not None:
            raise error

    def _gather(self, here: Any, what: str) -> list[Any]:
        """What the ranks of all optimizer instances pass. Collective. Raises CollectiveError if a peer is lost."""
        with naming(f"comparison of {what}"):
            of_instances = self._instances.gather_objects(self._everyone.gather_objects(here))
        return [of_rank for of_instance in of_instances for of_rank in of_instance]


class Refusal(ABC):
    """An error that a rank finds without the others. Its flag: whether this rank has found one."""

    num_flags = 1
    found: Exception | None = None  # in this step

    @abstractmethod
    def find(self, groups: Groups) -> Exception | None:
        """Return the error of this rank, if there is one, given the groups of the step."""

    def flags(self, groups: Groups) -> Sequence[float]:
        self.found = self.find(groups)
        return (float(self.found is not None),)

    def is_wrong(self, sums: Tensor) -> Tensor:
        return sums > 0

    def error(self, sums: Sequence[float]) -> Exception | None:
        return self.found or self.of_others(int(sums[0]))

    def of_others(self, num_ranks: int) -> Exception:
        """The error on a rank without one."""
        return UnusableGradientError(
            f"{num_ranks} other rank(s) refused their gradients or parameter groups; the message there names them. "
            "Nothing was updated"
        )


class UsableGrads(Refusal):
    """Gradients are sparse or were refused when reduced, a captured step lacks one, or another guard failed."""

    def find(self, groups: Groups) -> Exception | None:
        """Return None: `Guards.flags` sets what was found once all guards were asked."""
        return None


class ParamsInPlace(Refusal):
    """A parameter has left the memory that updates write to: compares addresses, or dtypes and devices, of all."""

    def __init__(self, sources: Iterable[Source]):
        self._sources = [ref(source) for source in sources]  # a guard must not keep the model alive

    def find(self, groups: Groups) -> StorageError | None:
        sources = (source for found in self._sources if (source := found()) is not None)
        id = next((id for source in sources if (id := source.moved()) is not None), None)
        return None if id is None else self._error(f"parameter {str(id)!r}")

    def of_others(self, num_ranks: int) -> Exception:
        return self._error(f"a parameter on {num_ranks} other rank(s)")

    def _error(self, which: str) -> StorageError:
        return StorageError(
            f"{which} has left the memory that the optimizer updates: the model was converted or moved, or param.data "
            "was assigned, after the optimizer was built; convert and move the model first, then build the optimizer. "
            "Nothing was updated"
        )


# --- parameter groups -------------------------------------------------------------------------------------------------


class ReplacedParamsError(UnusableGradientError, ValueError):
    """`param_groups` hold other parameters than those that the optimizer was built with."""


class SameParams(Refusal):
    """Parameters were replaced, as by Accelerate's FSDP2, or moved to another group. No step would follow either."""

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
    return [ids for group in groups if (ids := list(map(id, stored_params(group))))]


class UsableGroups(Refusal):
    """Knows the entries of the groups as they were built, and as the last step saw them: only numbers are read in every
    step, so that a change of another entry would have no effect."""

    def __init__(self, groups: Groups, rules: Mapping[int, Rule]):
        self.rules = rules
        self._built = [{name: group[name] for name in group if name != "params"} for group in groups]
        # Schedulers write their entries in every step; they may be any number, if the rule reads them.
        unread = {index for index, rule in self.rules.items() if not reads_weight_decay(rule)}

        def is_watched(index: int, name: str) -> bool:
            return name not in (*HELD, *SCHEDULED) or (name == WEIGHT_DECAY and index in unread)

        self._entries = GroupEntries(is_watched)

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
        for index, _, names in self._entries.changes(groups if self._built else ()):
            group = groups[index]
            for problem in self._problems(index, group):
                raise GroupError(f"group {self._built[index].get('name', index)!r}: {problem}")
            self._check_bounds(index, group, names)
            own = getattr(self.rules.get(index), "hyper_names", ())
            if not any(_may_change(group.get(name)) for name in (*HYPER_FIELDS, *own)):
                self._entries.accept(index, group)
        for index in self.rules:
            check_rate(groups[index])
            self._check_bounds(index, groups[index], SCHEDULED)

    def _check_bounds(self, index: int, group: Mapping[str, Any], names: Iterable[str]) -> None:
        """Raise GroupError for a number that is out of the bounds of the rule. Numbers on an accelerator are not read,
        because the host would have to wait for them."""
        numbers = {name: group[name] for name in names if name in group and not is_on_device(group[name])}
        try:
            check_numbers(self.rules.get(index), numbers)
        except NumberError as error:
            raise GroupError(f"group {group.get('name', index)!r}: {error}. Nothing was updated") from None

    def _problems(self, index: int, group: Mapping[str, Any]) -> Iterator[str]:
        built = self._built[index]
        changed = {}
        for name in built:
            if name not in group:
                yield f"it has no entry {name!r} any more; groups keep the entries that they were built with"
        for name in (*FIXED, CHOICES):
            if group.get(name) != built.get(name):
                yield (
                    f"{name}={group.get(name)!r} was set after the optimizer was built with {built.get(name)!r}, which "
                    "has no effect; build another optimizer with it, and load this one's state_dict"
                )
        for name in HYPER_FIELDS:
            if name in group and name not in built:
                read = ", ".join(name for name in HYPER_FIELDS if name in built)
                yield f"{name}={group[name]!r} was added, but its rule does not read it; it reads {read}"
            if name in group and name in built and not _has_form_of(group[name], built[name]):
                form = f"{len(built[name])} numbers" if isinstance(built[name], tuple | list) else "a number"
                yield f"{name}={group[name]!r} was set where the optimizer was built with {built[name]!r}; pass {form}"
        for name in _FLAGS:
            if name in group and group[name] is not built.get(name, False):
                yield f"{name}={group[name]!r} was set after the optimizer was built, which has no effect"
        for name, _, chosen in (text.partition("=") for text in built.get(CHOICES, ())):
            if name in group and name not in built and name not in _FLAGS and repr(group[name]) != chosen:
                choices = built[CHOICES]
                yield f"{name}={group[name]!r} was added, but it was chosen when the optimizer was built: {choices}"
        for name in (WEIGHT_DECAY, "betas"):
            value = group.get(name)
            on_device = isinstance(value, Tensor) and value.device.type != "cpu"
            if name in group and name in built and not on_device and value != built[name]:
                changed[name] = value
        if changed and index in self.rules:
            try:
                check_unread(self.rules[index], changed)
            except NumberError as error:  # they would have no effect
                yield str(error)

    def accept_loaded(self, groups: Groups) -> None:
        """Keep torch's flags that a load wrote to the groups, which the load has checked, and numbers without effect:
        they do not make a checkpoint unreadable."""
        for built, group in zip(self._built, groups, strict=bool(self._built)):
            built.update({name: group[name] for name in _FLAGS if name in group})
            for name in (WEIGHT_DECAY, "betas"):
                if name in group and name in built and _has_form_of(group[name], built[name]):
                    built[name] = group[name]


def _has_form_of(value: Any, built: Any) -> bool:
    """Whether both are single numbers, or rows of as many. A learning rate may be None until a scheduler sets it."""
    if isinstance(built, tuple | list):
        return isinstance(value, tuple | list) and len(value) == len(built) and all(map(is_number, value))
    return value is None or is_number(value)


def _may_change(value: Any) -> bool:
    """Whether a value has tensors, whose numbers change in place, so that they are checked in every step."""
    return isinstance(value, Tensor) or (isinstance(value, tuple | list) and any(map(_may_change, value)))


class EqualGroups:
    """Compares the numbers of groups whose parameters several ranks update, by position and name.

    Replicas would drift apart if a scheduler follows the loss of one rank, or only some ranks edit `param_groups`. Its
    flags: 1, the checksum and its square for each compared group of this rank, else zeros: their sums show whether all
    are equal. Groups that differ from the start, such as those of different pipeline stages, are not compared.
    """

    def __init__(self, groups: Groups, local: Iterable[int], *, own: Iterable[str], everyone: Comm):
        """Collective: all ranks of `everyone` call it.

        Args:
            groups: of this rank.
            local: indices of those that have parameters on it.
            own: further entries that rules read, which are not fields of `Hyper`.
        """
        self._entries = (*HYPER_FIELDS, *FIXED, *sorted(set(own)))
        here = {(i, str(groups[i].get("name", ""))): _checksum(self._numbers_of(groups[i])) for i in sorted(local)}
        values: dict[tuple[int, str], list[int]] = {}
        for of_rank in everyone.gather_objects(here) if everyone.size > 1 else ():
            for key, checksum in of_rank.items():
                values.setdefault(key, []).append(checksum)
        keys = sorted(key for key, found in values.items() if len(found) > 1 and len(set(found)) == 1)
        self._compared = [(*key, key in here) for key in keys]
        self.num_flags = 3 * len(keys)
        self._numbers: list[list[tuple[str, Any]]] = []  # of the last step, for `error`; groups keep parameters alive

    def flags(self, groups: Groups) -> Sequence[float]:
        self._numbers = [self._numbers_of(groups[index]) for index, _, _ in self._compared]
        flags: list[float] = []
        for numbers, (_, _, is_local) in zip(self._numbers, self._compared, strict=True):
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

    def _numbers_of(self, group: Mapping[str, Any]) -> list[tuple[str, Any]]:
        return [(entry, _plain(group[entry])) for entry in self._entries if entry in group]


def _checksum(numbers: list[tuple[str, Any]]) -> int:
    return crc32(repr(numbers).encode()) >> (32 - _BITS)


def _differ(count: Any, total: Any, squares: Any) -> Any:
    """Whether checksums differ, given integers or tensors of them.

    Up to 2,048 ranks every product fits into 64 bits; beyond, tensors are compared modulo 2**64.
    """
    return count * squares != total * total


def _plain(value: Any) -> Any:
    """A value with the same `repr` on every rank. Tensors on an accelerator are not read, and so not compared."""
    if isinstance(value, Tensor):
        return float(value) if value.device.type == "cpu" and value.numel() == 1 else None
    if isinstance(value, list | tuple):
        return tuple(map(_plain, value))
    if isinstance(value, str):
        return str(value)
    return float(value) if isinstance(value, Real) else None
