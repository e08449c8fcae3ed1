"""`UpdateCall`: the launches of an update. A step in which nothing has moved repeats them as they are."""

from collections.abc import Callable, Mapping, Sequence
from itertools import chain
from operator import is_
from typing import Any, NamedTuple, cast

import torch
from torch import Tensor

from opt_kernels import devices
from opt_kernels.backends.triton import multi_tensor
from opt_kernels.backends.triton.columns import in_order, pieces_of
from opt_kernels.backends.triton.formats import LaunchFormats
from opt_kernels.backends.triton.kernels import Kernels
from opt_kernels.backends.triton.multi_tensor import ChunkTable
from opt_kernels.backends.triton.scalars import FillArguments, Row, are_live, fill_arguments
from opt_kernels.backends.triton.sweep import cut_sweeps, launch_options, sweeps
from opt_kernels.codecs import StateCodec
from opt_kernels.works import Batch, Works


class UpdateCall:
    """One launch for the scalar block, and one of the sweep for every combination of dtypes among the works."""

    def __init__(
        self,
        kernels: Kernels,
        batches: Sequence[Batch],
        codecs: Mapping[str, StateCodec],  # of the states, in the order of their columns
        options: Callable[[LaunchFormats], dict[str, Any]],  # what the sweep takes in addition to `launch_options`
        *,
        grad_scale: float | Tensor,
        skip: Tensor | None,
    ) -> None:
        found = cut_sweeps(pieces_of(batches), codecs)
        self.is_in_place = found is not None
        if found is None:
            # A table holds addresses only: the copies must live until the launch.
            self._copies = batches = in_order(batches)
            found = sweeps(batches, codecs)
        self._kernels, self._skip = kernels, skip
        self._sweeps: list[tuple[ChunkTable, dict[str, Any]]] = [
            (table, {**options(formats), **launch_options(formats, table)}) for formats, table, _ in found
        ]
        self._rows: list[Row] = [
            (hyper.lr, hyper.weight_decay, hyper.step, grad_scale, *[read(hyper) for read in kernels.own])
            for hyper, _ in batches
        ]
        self._block: Tensor | None = None  # (rows, row_width) float32
        self._live: FillArguments | None = None  # if they follow what is written to their tensors

    def launch(self) -> None:
        """Launch without synchronizing. Raises FrozenHyperError for host numbers in a capture."""
        if not self._sweeps:
            return
        device = self._sweeps[0][0].grads.device
        with devices.launching_on(device):
            block = self.filled(device)
            for table, options in self._sweeps:
                self._kernels.sweep[(table.num_chunks,)](table.records, table.grads, block, **options)

    def filled(self, device: torch.device) -> Tensor:
        """The scalar block, (rows, row_width) float32, computed without synchronizing."""
        rows, arguments = self._rows, self._live
        if arguments is None:
            arguments = fill_arguments(rows, skip=self._skip, device=device)
            self._live = arguments if are_live(arguments, rows, skip=self._skip) else None
        if self._block is None:
            self._block = torch.empty((len(rows), self._kernels.row_width), dtype=torch.float32, device=device)
        self._kernels.fill[(len(rows),)](self._block, *arguments)
        return self._block


class _Kept(NamedTuple):
    """The last call with some works, and what it was composed of: compared by identity."""

    inputs: tuple[Any, ...]
    stream: int  # tables and the block are read in the order of one stream
    call: UpdateCall


def repeated(batches: Sequence[Batch], inputs: Sequence[Any], compose: Callable[[], UpdateCall]) -> UpdateCall:
    """The call that `compose` returns; the last one again if the batches and `inputs` have the same objects."""
    all_works = [works for _, works in batches]
    if not all_works or not all(isinstance(works, Works) and works.stays and len(works) > 0 for works in all_works):
        return compose()
    first = cast(Works, all_works[0])
    device, memory = first.anchors[0].device, first.unchanged
    if memory is None or multi_tensor.is_capturing(device):  # what a capture uses is kept for ever: `DeviceTables`
        return compose()
    inputs, stream = (*inputs, *chain.from_iterable(batches)), multi_tensor.current_stream(device)
    kept: _Kept | None = memory.cache.get(UpdateCall)
    if kept is not None and kept.stream == stream and _same(kept.inputs, inputs):
        return kept.call
    call = compose()
    if call.is_in_place:
        memory.cache[UpdateCall] = _Kept(inputs, stream, call)
    return call


def _same(some: Sequence[Any], others: Sequence[Any]) -> bool:
    return len(some) == len(others) and all(map(is_, some, others))
