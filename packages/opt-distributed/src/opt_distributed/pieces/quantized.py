"""fp8 parameters: each step quantises them from fp32 main values before they are published.

    main values on every rank ─▶ local largest magnitudes ─▶ their maximum over ranks ─▶ scales, equal on all ranks
                              ─▶ codes of what this rank owns ─▶ publish: one byte an element is gathered

So scales are those of the whole parameter on any layout, and codes are those of a single process.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from opt_distributed.buffers.chunk_buffers import SyncedBuffer
from opt_distributed.buffers.wires import naming
from opt_distributed.comm.collectives import Comm, Op
from opt_distributed.pieces.sources import Source
from opt_kernels.params import MAIN, Main, MainColumns
from opt_kernels.quantized import QuantizedParam
from opt_paramgroups import ParamId

INITIAL_FAR = 1 / 8
"""Largest relative error of an fp8 code: one unit in the last place of e4m3, doubled for delayed scaling."""


@dataclass(slots=True, eq=False, kw_only=True)
class QuantizedMain(Main):
    """fp32 main values of one piece of an fp8 parameter, which `QuantizedSource` quantises.

    `target` is the copy: the memory of the parameter holds codes, which cannot be written elementwise.
    """

    id: ParamId
    param: QuantizedParam
    of_param: slice
    is_updated: bool = False  # since it was last quantised
    keeps_scale: bool = False  # whether to quantise once with the present scale, which belongs to these values
    skip: Tensor | None = None  # 0-d on the device; if it is set, the update was skipped

    @classmethod
    def of(cls, id: ParamId, param: QuantizedParam, of_param: slice) -> "QuantizedMain":
        """Start from the high-precision values that the parameter was created from, if they are kept and current."""
        start = param.values().view(-1)[of_param]
        initial = param.initial()
        if initial is not None and start.numel():
            values = initial.reshape(-1)[of_param].to(start)
            # Not if other weights were loaded since: fp8 values are then not what quantising `initial` gives.
            size = values.abs()
            far = INITIAL_FAR * size + size.amax() * 2.0**-14
            if bool(((start - values).abs() <= far).all()):
                start = values
        is_whole = of_param == slice(0, param.shape.numel())
        copy = start.clone().view(param.shape if is_whole else (-1,))
        return cls(target=copy, kept={MAIN: copy}, id=id, param=param, of_param=of_param)

    @property
    def is_copy(self) -> bool:
        return False  # codes depend on their scales, too

    def columns(self) -> MainColumns:
        return MainColumns(self.target, None, None)

    def open_(self) -> Tensor:
        """Return the values, which a rule updates until `close_`."""
        return self.target

    def close_(self, *, skip: Tensor | None = None) -> None:
        """Note the update, which did nothing if `skip` is set. The parameter is written by `publish` of its source."""
        self.is_updated = True
        self.skip = skip

    @torch.no_grad()
    def set_(self, value: Tensor) -> None:
        """Write the main values. The parameter is written when its source calls `publish`."""
        self.target.copy_(value)
        self.close_()

    def extra(self) -> Mapping[str, Tensor]:
        return self.param.extra()

    @torch.no_grad()
    def restore_(self, saved: Mapping[str, Tensor]) -> None:
        extra = self.param.extra()
        self.keeps_scale = bool(extra) and extra.keys() <= saved.keys()
        for name, memory in extra.items():
            if self.keeps_scale:
                memory.copy_(saved[name].view(memory.shape))
            else:
                memory.zero_()

    @torch.no_grad()
    def reload_(self) -> None:
        values = self.param.values().view(-1)[self.of_param]
        self.target.copy_(values.view(self.target.shape))


class QuantizedSource:
    """Publishes fp8 parameters: quantises what was updated, before the source of their gradients sends codes.

    Args:
        inner: the source of gradients, which publishes codes.
        params: the parameters of the buffer, in the same order on all ranks of `comm`.
        comm: the ranks that own parts of them; a world of one if every rank owns everything.
    """

    def __init__(self, inner: Source, params: Mapping[ParamId, QuantizedParam], comm: Comm):
        self.inner = inner
        self.params = params
        self.comm = comm
        self._mains: list[QuantizedMain] = []  # of this rank's pieces

    def main(self, id: ParamId, of_param: slice) -> QuantizedMain:
        """Create the main values of a piece that this rank owns."""
        made = QuantizedMain.of(id, self.params[id], of_param)
        self._mains.append(made)
        return made

    @torch.no_grad()
    def publish_(self) -> None:
        """Write scales, and the codes of what this rank has updated; then publish. Collective over `comm`.

        Raises:
            CollectiveError: a peer is lost.
        """
        inner = self.inner
        if isinstance(inner, SyncedBuffer) and inner.through_grads is not None:
            # The wire quantises whole parameters on arrival.
            inner.lend_grad_storage_()
            values = {main.id: (main.of_param.start, main.target) for main in self._mains}
            inner.through_grads.stage_(values)
        else:
            updated = [main for main in self._mains if main.is_updated]
            if not next(iter(self.params.values())).recipe.run:
                self._rescale_(updated)
            for main in updated:
                main.param.encode_(main.target.reshape(-1), main.of_param.start, skip=main.skip)
                main.keeps_scale = False
            for param in self.params.values() if self.comm.size == 1 else ():
                param.finish_()
        for main in self._mains:
            main.is_updated = False
            main.skip = None
        inner.place.publish_()

    def _rescale_(self, updated: Sequence[QuantizedMain]) -> None:
        """Compute scales from largest magnitudes over all ranks. Parameters that no rank has updated keep theirs."""
        device = next(iter(self.params.values())).codes.device
        sizes = [param.num_scales for param in self.params.values()]
        largest = torch.full((sum(sizes),), -1.0, dtype=torch.float32, device=device)
        parts = dict(zip(self.params, torch.split(largest, sizes), strict=True))
        for main in updated:
            if main.keeps_scale:
                continue
            part = parts[main.id]
            main.param.largest_(part, main.target.reshape(-1), main.of_param.start)
            if main.skip is not None:
                part.copy_(torch.where(main.skip, -1.0, part))
        self._reduce_(largest, "largest magnitudes")
        for id, param in self.params.items():
            param.rescale_(parts[id])

    @torch.no_grad()
    def share_extra_(self) -> None:
        """Copy `extra`, which was loaded on the ranks that own parts of parameters, to the other ranks. Collective.

        Raises:
            CollectiveError: a peer is lost.
        """
        here = {main.id for main in self._mains}
        memories = []
        parts = []
        for id, param in self.params.items():
            for memory in param.extra().values():
                memories.append(memory)
                part = memory if id in here else torch.full_like(memory, -1.0)
                parts.append(part.view(-1))
        if memories:
            shared = torch.cat(parts)
            self._reduce_(shared, "histories")
            sizes = [part.numel() for part in parts]
            for memory, found in zip(memories, torch.split(shared, sizes), strict=True):
                memory.copy_(found.view(memory.shape))

    def _reduce_(self, values: Tensor, what: str) -> None:
        with naming(f"{what} of fp8 parameters"):
            self.comm.all_reduce_(values, op=Op.MAX)
