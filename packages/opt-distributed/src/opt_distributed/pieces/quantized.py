"""fp8 parameters: each step quantises them from fp32 main values before they are published.

    main values on every rank ─▶ local largest magnitudes ─▶ their maximum over ranks ─▶ scales, equal on all ranks
                              ─▶ codes of what this rank owns ─▶ publish: one byte an element is gathered

So scales are those of the whole parameter on any layout, and codes are those of a single process.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opt_distributed.buffers.chunk_buffers import SyncedBuffer
from opt_distributed.buffers.wires import CollectiveError
from opt_distributed.comm.collectives import Comm, Op
from opt_distributed.pieces.mains import Numbers
from opt_distributed.pieces.sources import Publisher, Source
from opt_kernels.quantized import QuantizedParam
from opt_paramgroups import ParamId

INITIAL_FAR = 1 / 8
"""Largest relative error of an fp8 code: one unit in the last place of e4m3, doubled for delayed scaling."""


@dataclass(slots=True)
class QuantizedMain:
    """fp32 main values of one piece of an fp8 parameter, with the interface of `Main`. `QuantizedSource` quantises."""

    numbers: ClassVar[Numbers] = Numbers.FP32_COPY
    out: ClassVar[None] = None
    remainder: ClassVar[None] = None

    id: ParamId
    param: QuantizedParam
    of_param: slice
    copy: Tensor  # fp32, the piece's shape
    is_moved: bool = False  # whether it was updated since it was last quantised
    keeps_scale: bool = False  # whether to quantise once with the present scale, which belongs to these values
    skip: Tensor | None = None  # 0-d on the device; if it is set, the update was skipped

    @classmethod
    def of(cls, id: ParamId, param: QuantizedParam, of_param: slice) -> "QuantizedMain":
        """Start from the high-precision values that the parameter was created from, if they are kept and current."""
        present = param.values().view(-1)[of_param]
        initial = param.initial()
        start = present if initial is None else initial.reshape(-1)[of_param].to(present)
        if initial is not None and not _stands_for(present, start):
            start = present
        is_whole = of_param == slice(0, param.shape.numel())
        return cls(id, param, of_param, start.clone().view(param.shape if is_whole else (-1,)))

    @property
    def shape(self) -> torch.Size:
        """Shape of the piece."""
        return self.copy.shape

    @property
    def target(self) -> Tensor:
        """The main values, because the memory of the parameter holds codes, which cannot be written elementwise."""
        return self.copy

    @property
    def main(self) -> Tensor:
        """The tensor that a rule updates in place."""
        return self.copy

    def kept(self) -> tuple[Tensor, ...]:
        """The tensors kept in addition to the parameter."""
        return (self.copy,)

    def value(self) -> Tensor:
        """The main values, sharing memory."""
        return self.copy

    def open_(self) -> Tensor:
        """Return the values that a rule updates until `close_`."""
        return self.copy

    def close_(self, *, skip: Tensor | None = None) -> None:
        """Note that a rule has updated it, unless `skip` is set."""
        self.is_moved, self.skip = True, skip

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Write the main values. The parameter is written when its source publishes."""
        self.copy.copy_(value)
        self.close_()

    @torch.no_grad()
    def restore_(self, saved: Mapping[str, Tensor]) -> None:
        """Load `extra`, the parameter's further tensors, as saved with the main values that were set before.

        If any of them was not saved, all are reset to zero.
        """
        extra = self.param.extra()
        self.keeps_scale = bool(extra) and extra.keys() <= saved.keys()
        for name, memory in extra.items():
            if self.keeps_scale:
                memory.copy_(saved[name].view(memory.shape))
            else:
                memory.zero_()

    @torch.no_grad()
    def reload_(self) -> None:
        """Set the main values from the parameter, after other code wrote the parameter."""
        self.copy.copy_(self.param.values().view(-1)[self.of_param].view(self.copy.shape))


def _stands_for(present: Tensor, initial: Tensor) -> bool:
    """Whether fp8 values may be quantised from `initial`. They are not if other weights were loaded since."""
    if not initial.numel():
        return True
    error = (present - initial).abs()
    return bool((error <= INITIAL_FAR * initial.abs() + initial.abs().amax() * 2.0**-14).all())


class QuantizedSource:
    """Publishes fp8 parameters: quantises what was updated, before the source of their gradients sends codes.

    Args:
        inner: the source of gradients, which publishes codes.
        params: the parameters of the buffer, in the same order on all ranks of `comm`.
        comm: the ranks that own parts of them; a world of one if every rank owns everything.
    """

    def __init__(self, inner: Source, params: Mapping[ParamId, QuantizedParam], comm: Comm):
        self.inner, self.params, self.comm = inner, params, comm
        self._reusing = inner if isinstance(inner, SyncedBuffer) and inner.through_grads is not None else None
        self._mains: list[QuantizedMain] = []  # of this rank's pieces
        sizes = [param.num_scales for param in params.values()]
        starts = torch.tensor([0, *sizes]).cumsum(0).tolist()
        self._at = {id: slice(a, b) for id, a, b in zip(params, starts, starts[1:], strict=False)}
        self._num_scales = starts[-1]

    def main(self, id: ParamId, of_param: slice) -> QuantizedMain:
        """Create the main values of a piece that this rank owns."""
        made = QuantizedMain.of(id, self.params[id], of_param)
        self._mains.append(made)
        return made

    @torch.no_grad()
    def quantize_(self) -> None:
        """Write scales, and the codes of what this rank has updated. Collective: all ranks of `comm` call it.

        Raises:
            CollectiveError: a peer is lost.
        """
        if self._reusing is not None:
            self._stage_(self._reusing)
            return
        moved = [main for main in self._mains if main.is_moved]
        if not next(iter(self.params.values())).recipe.run:
            self._rescale_(moved)
        for main in moved:
            main.param.encode_(main.copy.reshape(-1), main.of_param.start, skip=main.skip)
            main.is_moved, main.keeps_scale, main.skip = False, False, None
        if self.comm.size == 1:
            for param in self.params.values():
                param.finish_()

    def _stage_(self, buffer: SyncedBuffer) -> None:
        """Pass all main values to the wire, which quantises whole parameters on arrival."""
        assert buffer.through_grads is not None
        buffer.lend_grads_()
        buffer.through_grads.stage_({main.id: (main.of_param.start, main.copy) for main in self._mains})
        for main in self._mains:
            main.is_moved, main.skip = False, None

    def _rescale_(self, moved: Sequence[QuantizedMain]) -> None:
        """Compute scales from largest magnitudes over all ranks. Parameters that no rank has updated keep theirs."""
        device = next(iter(self.params.values())).codes.device
        largest = torch.full((self._num_scales,), -1.0, dtype=torch.float32, device=device)
        for main in moved:
            if main.keeps_scale:
                continue
            part = largest[self._at[main.id]]
            main.param.largest_(part, main.copy.reshape(-1), main.of_param.start)
            if main.skip is not None:
                part.copy_(torch.where(main.skip, -1.0, part))
        self._reduce_(largest, "largest magnitudes")
        for id, param in self.params.items():
            param.rescale_(largest[self._at[id]])

    @torch.no_grad()
    def share_extra_(self) -> None:
        """Copy `extra`, which was loaded on the ranks that own parts of parameters, to the other ranks. Collective.

        Raises:
            CollectiveError: a peer is lost.
        """
        held = {main.id for main in self._mains}
        extras = {id: list(param.extra().values()) for id, param in self.params.items()}
        parts = [
            part if id in held else torch.full_like(part, -1.0) for id, of_param in extras.items() for part in of_param
        ]
        if parts:
            shared = torch.cat([part.view(-1) for part in parts])
            self._reduce_(shared, "histories")
            memories = [part for of_param in extras.values() for part in of_param]
            for memory, part in zip(memories, torch.split(shared, [part.numel() for part in parts]), strict=True):
                memory.copy_(part.view(memory.shape))

    def _reduce_(self, values: Tensor, what: str) -> None:
        try:
            self.comm.all_reduce_(values, op=Op.MAX)
        except Exception as error:  # whatever a backend raises when a peer is gone
            raise CollectiveError(f"{what} of fp8 parameters: {error}") from error

    def publish_(self) -> None:
        """Quantise, then publish."""
        self.quantize_()
        self.inner.publish_()


def extra_of(main: object) -> Mapping[str, Tensor]:
    """The further tensors of an fp8 parameter that a checkpoint must hold, sharing memory; empty for others."""
    return main.param.extra() if isinstance(main, QuantizedMain) else {}


def quantized_sources(completes: Sequence[Publisher]) -> Iterator[QuantizedSource]:
    """The sources whose parameters are in fp8."""
    return (source for source in completes if isinstance(source, QuantizedSource))
