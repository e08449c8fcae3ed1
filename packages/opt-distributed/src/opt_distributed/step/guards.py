"""`Guards`: the reasons for which every rank may refuse a step, in the order in which their errors are raised."""

from collections.abc import Iterable, Mapping, Sequence
from itertools import chain
from typing import Any
from weakref import ref

import torch
from torch import Tensor

from opt_distributed.buffers.stored import StorageError
from opt_distributed.buffers.wires import naming
from opt_distributed.comm.collectives import Comm
from opt_distributed.pieces.piece import Groups
from opt_distributed.pieces.sources import Source
from opt_distributed.step.group_guards import EqualGroups, GroupError, HyperError, SameParams, UsableGroups
from opt_distributed.step.guard import Guard, Refusal
from opt_kernels.rules import Rule


class GuardError(ValueError):
    """Ranks have different guards, or a guard does not have the flags that it announces."""


class UsableGrads(Refusal):
    """Gradients are sparse or were refused when reduced, a captured step lacks one, or another guard failed."""

    def find(self, groups: Groups) -> Exception | None:
        """Return what `Guards.refuse` has set. It may set more while other guards are asked."""
        return self.found


class ParamsInPlace(Refusal):
    """A parameter has left the memory that updates write to: compares addresses, or dtypes and devices, of all."""

    def __init__(self, sources: Iterable[Source]):
        self._sources = [ref(source) for source in sources]  # a guard must not keep the model alive

    def find(self, groups: Groups) -> StorageError | None:
        sources = (source for found in self._sources if (source := found()) is not None)
        id = next((id for source in sources if (id := source.place.moved()) is not None), None)
        return None if id is None else self._error(f"parameter {str(id)!r}")

    def of_others(self, num_ranks: int) -> Exception:
        return self._error(f"a parameter on {num_ranks} other rank(s)")

    def _error(self, which: str) -> StorageError:
        return StorageError(
            f"{which} has left the memory that the optimizer updates: the model was converted, or is on another device "
            "than when the optimizer was built; move it back first; if it was converted, or is in fp8, build the "
            "optimizer again. Nothing was updated"
        )


class Guards:
    """The guards of a `Stepper`, in one order on every rank: the first that refuses a step raises its error.

    The order is that of `all`. In a stack: `SameParams`, `OptimizerStateGuard` (the caller's `first`), `UsableGrads`,
    `UsableGroups`, `ParamsInPlace`, `EqualGroups` if ranks share parameters, `WrittenReplicas` (the caller's `last`),
    and what is appended before the first step.
    """

    groups: Groups = ()  # of the present step
    agreed: tuple[Guard, ...] = ()  # those of the first step

    def __init__(
        self,
        built: Groups,  # the groups as they were built
        sources: Iterable[Source],
        rules: Mapping[int, Rule],  # those that update this rank's parameters, by the indices of their groups
        equal: EqualGroups,
        *,
        everyone: Comm,
        instances: Comm,
        first: Sequence[Guard],
        last: Sequence[Guard],
    ):
        self._everyone = everyone
        self._instances = instances
        self._built = [{**group, "lr": group.get("lr") or 0.0} for group in built]
        self._usable_grads = UsableGrads()
        self.same_params = SameParams(built)
        self.usable_groups = UsableGroups(built, rules)
        self._equal = equal
        own: list[Guard] = [self._usable_grads, self.usable_groups, ParamsInPlace(sources)]
        if equal.num_flags:
            own.append(equal)
        self.all: list[Guard] = [self.same_params, *first, *own, *last]

    def begin(self, groups: Groups) -> None:
        """Begin a step. In the first one, check that all ranks have as many guards, of the same types and numbers of
        flags. Collective then. Raises GuardError, on every rank."""
        if not self.agreed:
            own = [(type(guard).__name__, guard.num_flags) for guard in self.all]
            different = sorted(set(map(str, self._gather(own, "guards"))))
            if len(different) > 1:
                raise GuardError(
                    f"ranks have different guards, by type and number of flags: {' and '.join(different)}; append the "
                    "same guards on every rank, in one order, before the first step. Nothing was updated"
                )
            self.agreed = tuple(self.all)
        self.groups = groups
        self._usable_grads.found = None

    def refuse(self, error: Exception | None) -> None:
        """Let every rank refuse the present step, if `error` is one."""
        self._usable_grads.found = self._usable_grads.found or error

    def flags(self) -> list[float]:
        """Return the flags of all guards: as many in every step, and on every rank. Zeros for a guard that fails, for
        which every rank refuses the step.

        If this rank refuses its groups, `groups` are from then on those that were built: the update is skipped, but the
        rank joins its collectives.
        """
        if tuple(self.all) != self.agreed:
            self.refuse(GuardError("guards were changed after the first step; append them before, on every rank"))
        flags = []
        usable = self._usable_grads
        for guard in self.agreed:
            before = usable.found
            try:
                of_guard = list(guard.flags(self.groups))
                if len(of_guard) != guard.num_flags:
                    name = type(guard).__name__
                    raise GuardError(f"{name} has {len(of_guard)} flags, but num_flags={guard.num_flags}")
            except Exception as error:
                self.refuse(error.with_traceback(None))  # its frames may keep parameters alive
                of_guard = [0.0] * guard.num_flags
            flags.append(of_guard)
            has_refused = any(of_guard) or usable.found is not before
            if has_refused and guard in (self.same_params, self.usable_groups):
                self.groups = self._built
        # Known only now: a guard that failed is one of its errors.
        flags[self.agreed.index(usable)] = [float(usable.found is not None)]
        return [flag for of_guard in flags for flag in of_guard]

    def refusals(self) -> list[str]:
        """Name the guards of this rank that refused the step, with their errors."""
        return [f"{type(guard).__name__}: {error}" for guard in self.agreed if (error := getattr(guard, "found", None))]

    def refuse_late(self, error: Exception, flags: Tensor) -> Tensor:
        """Let every rank refuse the present step by its flags, (n,) on the device; return them with that added."""
        self.refuse(error.with_traceback(None))  # its frames may keep parameters alive
        earlier = self.agreed[: self.agreed.index(self._usable_grads)]
        place = sum(guard.num_flags for guard in earlier)
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
            per_flag = zip(*(here for here, _, _ in per_rank), strict=True)
            error = self._equal.error([sum(of_ranks) for of_ranks in per_flag])
        if error is not None:
            raise error

    def _gather(self, here: Any, what: str) -> list[Any]:
        """What the ranks of all optimizer instances pass. Collective. Raises CollectiveError if a peer is lost."""
        with naming(f"comparison of {what}"):
            of_instance = self._everyone.gather_objects(here)
            return list(chain.from_iterable(self._instances.gather_objects(of_instance)))
