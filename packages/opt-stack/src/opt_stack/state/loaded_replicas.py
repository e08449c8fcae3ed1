"""Compare replicas after loads: before the first step if any rank has loaded, later if only some replicas have.

`get_optimizer` compares weights when it builds the optimizer. A script that then loads a checkpoint on the first rank
only, or another checkpoint on each rank, would train replicas that differ.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from zlib import crc32

from torch import Tensor

from opt_config import ConfigError
from opt_distributed.buffers.data_parallel import DistributedDataParallel
from opt_distributed.buffers.replicas import (
    Metas,
    Params,
    ReplicaError,
    check_replicas,
    checksums,
    compare_copies,
)
from opt_distributed.comm.collectives import agree
from opt_distributed.comm.groups import Roles
from opt_distributed.step.scaler import Scaler
from opt_paramgroups import ParamId
from opt_stack.state.sharded_state import Held

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
        except ConfigError as error:
            raise ReplicaError(f"weights were loaded after the optimizer was built: {error}") from error
        found = compare_copies(_sums_of_states(held), self._params, self._metas, self._roles)
        agree(everyone, None if found is None else ReplicaError(f"optimizer state: {found}; {LOAD_ALIKE}"))
        scales = everyone.gather_objects(scaler.state_dict())
        if any(scale != scales[0] for scale in scales):
            raise ReplicaError(f"ranks have different loss scales: {scales}; {LOAD_ALIKE}")


def _sums_of_states(held: Mapping[ParamId, Held]) -> dict[ParamId, int]:
    """A checksum of the state of each parameter that data-parallel replicas hold wholly and in the same form."""
    copied = {id: one for id, one in held.items() if one.piece.replica is None and one.piece.is_whole}
    sums = checksums({(id, name): tensor for id, one in copied.items() for name, tensor in _tensors(one)})
    of_param: dict[ParamId, list[object]] = {id: [one.piece.step] for id, one in copied.items()}
    for (id, name), number in sums.items():
        of_param[id].append((name, number))
    return {id: crc32(repr(found).encode()) for id, found in of_param.items()}


def _tensors(held: Held) -> Iterator[tuple[str, Tensor]]:
    whole = {spec.name for spec in held.unit.rule.state_specs if spec.whole}  # on the rank that computes the matrix
    for name, tensor in held.piece.state.items():
        if name not in whole:
            yield name, tensor
    for number, tensor in enumerate(held.piece.main.kept()):
        yield f"main {number}", tensor
