"""Notice weights that were written to the model, and parameters that were replaced, after the optimizer was built.

Main values in fp32 or fp16 are copies: the next update would overwrite weights from elsewhere by the old ones. Whether
weights agree with main values is only checked after a load, or after another write that torch counted (`_version`), and
whether the model still has the parameters also in the first step, so that other steps only compare counts.

Rules such as schedule_free keep weights of their own in their state, which cannot be compared with the parameters.
After a write without a load of state, a step warns about these.
"""

import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter
from typing import Any
from weakref import ref
from zlib import crc32

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from opt_distributed.buffers import (
    DistributedDataParallel,
    Metas,
    Params,
    ReplicaError,
    UnusableGradientError,
    check_replicas,
    checksums,
    compare_copies,
)
from opt_distributed.comm import Roles, agree
from opt_distributed.pieces import HostMain, Numbers, OwnedPiece, QuantizedMain, is_dtensor
from opt_distributed.step import Scaler
from opt_kernels.backends import Writes
from opt_paramgroups import ParamId
from opt_stack.state.live import Held

_COPIES = (Numbers.FP32_COPY, Numbers.FP16_SCALED)
_VERSION = attrgetter("_version")


class LoadedWeights:
    """Finds weights that the next update would lose: other values than the main values, or replaced parameters."""

    def __init__(
        self,
        pieces: Sequence[OwnedPiece],
        trained: Mapping[nn.Parameter, str],
        *,
        averaged: Sequence[OwnedPiece] = (),  # those whose rule keeps weights of its own
        has_replicas: bool = False,  # whether writes to all parameters count, because other ranks may lack them
    ):
        # Main values that are a copy of the parameter in another format. fp8 codes depend on their scales as well.
        self._copied = [p for p in pieces if p.main.numbers in _COPIES and not isinstance(p.main, QuantizedMain)]
        self._averaged = averaged
        # The elements of a sharded DTensor are on this rank only.
        replicated = [param for param in trained if has_replicas and not is_dtensor(param)]
        params = (*(piece.param for piece in (*self._copied, *averaged)), *replicated)
        self._writes = Writes(list(dict.fromkeys(tensor for param in params for tensor in _counted(param))))
        self._has_written = False  # the result of `has_written` in a step that was not made
        self._has_state = False  # whether state was loaded since the last step
        self._trained = trained  # all parameters of the optimizer, and their names
        self._are_new = False  # whether weights were loaded since the last step
        self._num_loads = 0
        self._shown: tuple[int, ...] = ()  # `_counts` when evaluation began
        self._replaced: set[nn.Parameter] = set()
        self._unchecked: list[tuple[nn.Module, Mapping[str, nn.Parameter]]] = []  # until the first step
        self._of_all = [tensor for param in trained for tensor in _counted(param)]
        self._built_at = list(map(_VERSION, self._of_all))
        compared = set(self._writes.tensors)
        self._uncompared = Writes([tensor for tensor in self._of_all if tensor not in compared])

    def are_new_since_built(self) -> bool:
        """Whether weights or state were loaded or written since the optimizer was built, before the first step."""
        return self._has_state or self._num_loads > 0 or list(map(_VERSION, self._of_all)) != self._built_at

    def watch(self, chunks: Iterable[nn.Module]) -> None:
        """Note every load of these modules and of modules below them."""
        for module in dict.fromkeys(below for chunk in chunks for below in chunk.modules()):
            params = {name: p for name, p in module._parameters.items() if p is not None and p in self._trained}
            if params:
                module.register_load_state_dict_post_hook(_Note(self, params))  # type: ignore[no-untyped-call]
                if not any(map(is_dtensor, params.values())):  # fully_shard registers gathered parameters in between
                    self._unchecked.append((module, params))

    def note(self, module: nn.Module, params: Mapping[str, nn.Parameter]) -> None:
        """Note that `module` was loaded; `params` are those that it had when the optimizer was built."""
        self._are_new = True
        self._num_loads += 1
        self._compare(module, params)

    def _compare(self, module: nn.Module, params: Mapping[str, nn.Parameter]) -> None:
        self._replaced.difference_update(params.values())
        self._replaced |= {param for name, param in params.items() if module._parameters.get(name) is not param}

    def accept_writes(self) -> None:
        """Note that a step wrote the parameters. Writes from now on are those of others.

        Kernels write memory that autograd does not watch, so the writes are counted here: a backward pass through a
        graph of before the step then raises, as with torch's optimizers, and other optimizers notice them.
        """
        self._writes.count()
        self._uncompared.count()
        self._has_state = self._has_written = False

    def has_written(self) -> bool:
        """Whether other code wrote weights or state since the last step that was made."""
        self._has_written = self._has_written or self._has_state or self.are_new
        return self._has_written

    @property
    def are_new(self) -> bool:
        """Whether others wrote weights since the last step that was made."""
        self._are_new = self._are_new or not self._writes.are_all_own()
        return self._are_new

    @contextmanager
    def own_writes(self) -> Iterator[None]:
        """Let the optimizer write the parameters inside the context, without a step."""
        self._are_new, is_shown = self.are_new, self._shown == self._counts()
        yield
        self._writes.accept()
        if is_shown:
            self._shown = self._counts()

    def begin_evaluation(self) -> None:
        """Note that the parameters hold the weights for evaluation."""
        self._shown = self._shown or self._counts()

    def end_evaluation(self) -> None:
        """Warn if weights were loaded since `begin_evaluation`, which the trained weights will replace."""
        if self._shown and self._shown != self._counts():
            warnings.warn(
                "weights were loaded into the model in evaluation mode; train() replaces them by the trained weights: "
                "call train() before the load",
                stacklevel=3,
            )
        self._shown = ()

    def _counts(self) -> tuple[int, ...]:
        """Numbers that change with every load and every write."""
        return self._num_loads, *map(_VERSION, self._writes.tensors)

    def note_state(self) -> None:
        """Note that the optimizer's state was set together with the weights."""
        self._has_state = True

    def problem(self) -> UnusableGradientError | None:
        """The reason why an update would lose loaded weights; None if it would not."""
        for module, params in self._unchecked:
            self._compare(module, params)
        self._unchecked = []
        if self._replaced:
            name = self._trained[next(iter(self._replaced))]
            return UnusableGradientError(
                f"{name!r} was replaced in the model after the optimizer was built, as by fully_shard, an "
                "assignment, load_state_dict(assign=True) or a parametrization, so that the optimizer would update a "
                "parameter that the model no longer has; build the optimizer after that"
            )
        if not self.are_new:
            return None
        self._has_written = True
        other = next((piece for piece in self._copied if not _agrees(piece)), None)
        if other is not None:
            return UnusableGradientError(
                f"weights were loaded into the model: {str(other.id)!r} has other values than its main values, which "
                "the next update would restore; call optimizer.reload_model_params() after a load or another write to "
                "the parameters, or load the optimizer's state of the same checkpoint; do not update a parameter by "
                "two optimizers"
            )
        averaged = next((str(piece.id) for piece in self._averaged if piece.step), None)
        if averaged is not None and not self._has_state:
            warnings.warn(
                f"weights were loaded into the model, but the rule of {averaged!r} keeps weights of its own in its "
                "state, towards which it moves the parameter; if values have changed, call "
                "optimizer.reload_model_params() after the load, or load the optimizer's state of the same checkpoint",
                stacklevel=3,
            )
        self._writes.accept()
        self._are_new = self._has_state = False
        return None


class _Note:
    """A hook after the load of one module. Copies and pickles of it do nothing: a copied model is not trained."""

    def __init__(self, loaded: LoadedWeights, params: Mapping[str, nn.Parameter]):
        self._loaded, self._params = ref(loaded), params

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        if (loaded := self._loaded()) is not None:
            loaded.note(module, self._params)

    def __reduce__(self) -> Any:
        return _no_hook, ()


def _no_hook() -> Any:
    return _ignore


def _ignore(module: nn.Module, incompatible_keys: Any) -> None:
    return None


def _counted(param: Tensor) -> Iterator[Tensor]:
    """The tensors whose version counts writes to a parameter: itself, and the local part of a DTensor."""
    with torch.no_grad():  # else `to_local` returns an alias with a version of its own
        tensors = (param, param.to_local()) if isinstance(param, DTensor) else (param,)
    for tensor in tensors:
        if not tensor.is_inference():  # made in torch.inference_mode(); nothing counts its writes
            yield tensor


@torch.no_grad()
def _agrees(piece: OwnedPiece) -> bool:
    """Whether the parameter holds the rounded main values; NaNs agree with NaNs."""
    main = piece.main
    assert not isinstance(main, QuantizedMain)
    target = main.device.to_host(main.target) if isinstance(main, HostMain) else main.target
    rounded: Tensor = main.value().to(target.dtype)
    return bool(((rounded == target) | (rounded.isnan() & target.isnan())).all())


def trained_names(groups: Sequence[Mapping[str, Any]]) -> dict[nn.Parameter, str]:
    """The name of every parameter of `groups`."""
    return {param: str(id) for group in groups for id, param in zip(group["param_ids"], group["params"], strict=True)}


LOAD_ALIKE = "load the same checkpoint on all ranks after get_optimizer, or before it with broadcast_params=True"


class LoadedReplicas:
    """Compares weights, state and loss scale of replicas."""

    def __init__(
        self,
        params: Params,
        metas: Metas,
        roles: Roles,
        *,
        wrapped: Sequence[DistributedDataParallel] = (),
    ):
        self._params, self._metas, self._roles, self._wrapped = params, metas, roles, wrapped
        self._is_due = roles.everyone.size > 1

    def check(self, held: Mapping[ParamId, Held], scaler: Scaler, *, has_loaded: Callable[[], bool]) -> None:
        """Compare, at the first call, if any rank has loaded. Collective: every rank calls it before its first step.

        Raises:
            ReplicaError: on every rank, if weights, state or loss scales of replicas differ.
        """
        if not self._is_due:
            return
        self._is_due = False
        if any(self._roles.everyone.gather_objects(has_loaded())):
            self.compare(held, scaler)

    def compare(self, held: Mapping[ParamId, Held], scaler: Scaler) -> None:
        """Compare. Collective. Raises the ReplicaError of `check`."""
        everyone = self._roles.everyone
        for chunk in self._wrapped:
            chunk.finish_param_sync()
        try:
            check_replicas(self._params, self._metas, self._roles)
        except ValueError as error:  # on a rank whose replicas are equal, the error is another rank's
            raise ReplicaError(f"weights were loaded after the optimizer was built: {error}") from error
        found = compare_copies(_sums_of_states(held), self._params, self._metas, self._roles)
        try:
            agree(everyone, None if found is None else ValueError(f"optimizer state: {found}; {LOAD_ALIKE}"))
        except ValueError as error:
            raise ReplicaError(str(error)) from error
        scales = everyone.gather_objects(scaler.state_dict())
        if any(scale != scales[0] for scale in scales):
            raise ReplicaError(f"ranks have different loss scales: {scales}; {LOAD_ALIKE}")


def _sums_of_states(held: Mapping[ParamId, Held]) -> dict[ParamId, int]:
    """A checksum of the state of each parameter that data-parallel replicas hold wholly and in the same form."""
    tensors: dict[tuple[ParamId, str], Tensor] = {}
    of_param: dict[ParamId, list[object]] = {}
    for id, (unit, piece) in held.items():
        if piece.replica is None and piece.is_whole:
            of_param[id] = [piece.step]
            whole = {spec.name for spec in unit.rule.state_specs if spec.whole}  # on the rank that computes the matrix
            tensors |= {(id, name): tensor for name, tensor in piece.state.items() if name not in whole}
            tensors |= {(id, f"main {number}"): tensor for number, tensor in enumerate(piece.main.kept())}
    for (id, name), number in checksums(tensors).items():
        of_param[id].append((name, number))
    return {id: crc32(repr(found).encode()) for id, found in of_param.items()}
