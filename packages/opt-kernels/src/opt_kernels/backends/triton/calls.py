"""`UpdateCall`: the launches of an update. A step in which nothing has moved repeats them as they are."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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
    """One launch for the scalar block, and one of the sweep for every combination of dtypes among the works.

    A `Repeatable` where the works stay.
    """

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
        self._stream: int | None = None  # of the last launch
        self._sweeps: list[tuple[ChunkTable, tuple[int], dict[str, Any]]] = [
            (table, (table.num_chunks,), {**options(formats), **launch_options(formats, table)})
            for formats, table, _ in found
        ]
        self._rows: list[Row] = [
            (hyper.lr, hyper.weight_decay, hyper.step, grad_scale, *[read(hyper) for read in kernels.own])
            for hyper, _ in batches
        ]
        self._block: Tensor | None = None  # (rows, row_width) float32
        self._live: FillArguments | None = None  # if they follow what is written to their tensors

    def holds(self) -> bool:
        """Whether `launch` may be called again: on the same stream, in whose order tables and block are read, and not
        in a capture, which would keep for ever what it uses (`DeviceTables`)."""
        if not self._sweeps:
            return False
        device = self._sweeps[0][0].grads.device
        return self._stream == multi_tensor.current_stream(device) and not multi_tensor.is_capturing(device)

    def launch(self) -> None:
        """Launch without synchronizing. Raises FrozenHyperError for host numbers in a capture."""
        if not self._sweeps:
            return
        device = self._sweeps[0][0].grads.device
        if self._stream is None:
            self._stream = multi_tensor.current_stream(device)
        with devices.launching_on(device):
            block = self.filled(device)
            for table, grid, options in self._sweeps:
                self._kernels.sweep[grid](table.records, table.grads, block, **options)

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


def may_repeat(batches: Sequence[Batch]) -> bool:
    """Whether later launches of a call with these works may follow from the same works."""
    return all(isinstance(works, Works) and works.stays and len(works) > 0 for _, works in batches)
