"""Parameters in fp8: fp32 main values beside them, from which a step quantises them before they are published.

    main values of every rank ─▶ largest magnitudes here ─▶ their maximum over ranks ─▶ scales, equal on all ranks
                              ─▶ codes of what this rank owns ─▶ publish: one byte an element is gathered

So the scales are those of the whole parameter, whoever owns parts of it, and the codes those of a single process.
"""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from opt_distributed.buffers.synced import SyncedBuffer
from opt_distributed.buffers.wire import CollectiveError
from opt_distributed.comm.collectives import Comm, Op
from opt_distributed.step.mains import Numbers
from opt_distributed.step.sources import ReadGrad, Source
from opt_kernels.quantized import QuantizedParam
from opt_paramgroups import ParamId

INITIAL_FAR = 1 / 8
"""Of a value, how far its fp8 code may be: the last place of three bits, doubled for a scale of delayed scaling."""


@dataclass(slots=True)
class QuantizedMain:
    """fp32 main values of one piece of a parameter in fp8, in the interface of `Main`. `QuantizedSource` quantises."""

    numbers: ClassVar[Numbers] = Numbers.FP32_COPY
    out: ClassVar[None] = None
    remainder: ClassVar[None] = None

    id: ParamId
    param: QuantizedParam
    of_param: slice
    copy: Tensor  # fp32, the piece's shape
    is_moved: bool = False  # since it was last quantised
    keeps_scale: bool = False  # quantise once by the present scale, which belongs to these values
    skip: Tensor | None = None  # 0-d on the device; where it is set, it was not moved after all

    @classmethod
    def of(cls, id: ParamId, param: QuantizedParam, of_param: slice) -> "QuantizedMain":
        """Starts from the values that the parameter was made from, where it has kept them and still stands for them."""
        present = param.values().view(-1)[of_param]
        initial = param.initial()
        start = present if initial is None else initial.reshape(-1)[of_param].to(present)
        if initial is not None and not _stands_for(present, start):
            start = present
        is_whole = of_param == slice(0, param.shape.numel())
        return cls(id, param, of_param, start.clone().view(param.shape if is_whole else (-1,)))

    @property
    def shape(self) -> torch.Size:
        """Of the piece."""
        return self.copy.shape

    @property
    def target(self) -> Tensor:
        """The main values: the parameter's own memory holds codes, which nothing can write element by element."""
        return self.copy

    @property
    def main(self) -> Tensor:
        """What a rule updates in place."""
        return self.copy

    def kept(self) -> tuple[Tensor, ...]:
        """The memory that it takes beside the parameter."""
        return (self.copy,)

    def value(self) -> Tensor:
        """The main values: the memory itself."""
        return self.copy

    def open_(self) -> Tensor:
        """Returns what a rule is to move, until `close_`."""
        return self.copy

    def close_(self, *, skip: Tensor | None = None) -> None:
        """Notes that a rule has moved it, except where `skip` is set."""
        self.is_moved, self.skip = True, skip

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Writes the main values; the parameter follows when its source publishes."""
        self.copy.copy_(value)
        self.close_()

    @torch.no_grad()
    def restore_(self, saved: Mapping[str, Tensor]) -> None:
        """Takes what else there is of the parameter, `extra`, as it was saved beside the main values that were set.

        What was not saved begins anew.
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
        """Takes the parameter's present value as the main value, after somebody else wrote the parameter."""
        self.copy.copy_(self.param.values().view(-1)[self.of_param].view(self.copy.shape))


def _stands_for(present: Tensor, initial: Tensor) -> bool:
    """Whether fp8 values may be those of `initial`: weights that were loaded since are not."""
    if not initial.numel():
        return True
    far = (present - initial).abs()
    return bool((far <= INITIAL_FAR * initial.abs() + initial.abs().amax() * 2.0**-14).all())


class QuantizedSource:
    """A `Source` of parameters in fp8: it quantises what was moved before it publishes.

    Args:
        inner: where gradients come from and codes go.
        params: those of the buffer, the same in the same order on all ranks of `comm`.
        comm: the ranks that own parts of them; a world of one where every rank owns everything.
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
        """The main values of a piece that this rank owns."""
        made = QuantizedMain.of(id, self.params[id], of_param)
        self._mains.append(made)
        return made

    @torch.no_grad()
    def quantize_(self) -> None:
        """Writes scales, and the codes of what this rank has moved. Collective: all ranks of `comm` call it.

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
        """Gives all main values to the wire, which quantises whole parameters where they arrive."""
        assert buffer.through_grads is not None
        buffer.lend_grads_()
        buffer.through_grads.stage_({main.id: (main.of_param.start, main.copy) for main in self._mains})
        for main in self._mains:
            main.is_moved, main.skip = False, None

    def _rescale_(self, moved: Sequence[QuantizedMain]) -> None:
        """Scales from the largest magnitudes over all ranks; of parameters that no rank has moved they stay."""
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
        """Gives what else there is of parameters, `extra`, from the ranks that own parts of them to the others, after
        it was loaded there. Collective.

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
        """Quantises, then publishes."""
        self.quantize_()
        self.inner.publish_()

    # --- the rest is the inner source's -----------------------------------------------------------------------------

    @property
    def grad_scale(self) -> float:
        """See `Source`."""
        return self.inner.grad_scale

    @property
    def doubtful(self) -> Sequence[ParamId]:
        """See `Source`."""
        return self.inner.doubtful

    def reduce_(self) -> None:
        """See `Source`."""
        self.inner.reduce_()

    def flags(self) -> Tensor:
        """See `Source`."""
        return self.inner.flags()

    def settle_(self, flags: Tensor) -> None:
        """See `Source`."""
        self.inner.settle_(flags)

    def unused(self) -> Collection[ParamId]:
        """See `Source`."""
        return self.inner.unused()

    def moved(self) -> ParamId | None:
        """See `Source`."""
        return self.inner.moved()

    def reader(self, id: ParamId, of_param: slice) -> ReadGrad:
        """See `Source`."""
        return self.inner.reader(id, of_param)


def extra_of(main: object) -> Mapping[str, Tensor]:
    """What else a checkpoint must hold of a parameter in fp8: the memory itself. Nothing of any other."""
    return main.param.extra() if isinstance(main, QuantizedMain) else {}


def quantized_sources(completes: Sequence[Source]) -> Iterator[QuantizedSource]:
    """Those of the sources whose parameters are in fp8."""
    return (source for source in completes if isinstance(source, QuantizedSource))
