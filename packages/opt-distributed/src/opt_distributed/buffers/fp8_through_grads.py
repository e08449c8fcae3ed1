"""mxfp8 parameters gathered through the gradient buffer: bf16 values are sent, and every rank quantises them.

This is for tensors that keep two sets of codes, by rows and by columns, of which neither follows from the other. The
values overwrite gradients that the step has used, so that no other buffer is needed. Until `zero_grad_buffer`, a step
that would use these gradients again is refused.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import ClassVar

import torch
from torch import Tensor, nn

from opt_distributed.buffers.param_wire import gather_part
from opt_distributed.buffers.stored import StorageError
from opt_distributed.comm.collectives import Comm, Pending
from opt_distributed.layout import Layout
from opt_kernels.quantized import QuantizedParam, quantized
from opt_paramgroups import ParamId


@dataclass(slots=True, kw_only=True)
class Fp8ThroughGrads:
    """A `ParamWire`. `stage_` fills the memory; `stages` gathers one bucket of it, once after each `stage_`."""

    layout: Layout
    params: Mapping[ParamId, QuantizedParam]
    grad_data: Tensor  # (layout.numel,), two bytes an element or more
    is_staged: ClassVar[bool] = True
    _filled: set[int] = field(default_factory=set)  # buckets that have not been gathered since `stage_`

    @property
    def values(self) -> Tensor:
        """(layout.numel,) bf16: the first bytes of the gradients."""
        return self.grad_data.view(torch.bfloat16)[: self.layout.numel]

    def stage_(self, mains: Mapping[ParamId, tuple[int, Tensor]]) -> None:
        """Write this rank's main values over the gradients. `mains`: by parameter, its first element and values."""
        starts = {slot.id: slot.start for slot in self.layout.slots()}
        values = self.values
        for id, (first, main) in mains.items():
            at = starts[id] + first
            values[at : at + main.numel()].copy_(main.reshape(-1))
        self._filled = set(range(len(self.layout.buckets)))

    def stages(self, index: int, comm: Comm) -> Iterator[Pending]:
        """Write the parameters of a bucket, then zeros over their values. Does nothing if it was gathered already."""
        if index not in self._filled:
            return
        self._filled.discard(index)
        values = self.values
        yield gather_part(self.layout, values, index, comm)
        bucket = self.layout.buckets[index]
        for slot in bucket.slots:
            param = self.params[slot.id]
            param.quantize_(values[slot.start : slot.stop].view(param.shape))
            param.finish_()
        values[bucket.start : bucket.stop].zero_()


def through_grads(layout: Layout, params: Mapping[ParamId, nn.Parameter], grad_data: Tensor) -> Fp8ThroughGrads:
    """Create the wire of a buffer whose parameters keep their own memory.

    Raises:
        StorageError: a parameter has a recipe other than mxfp8.
    """
    found = {id: q for id, param in params.items() if (q := quantized(param)) is not None}
    other = next((q.recipe.name for q in found.values() if q.recipe.name != "mxfp8"), None)
    if other is not None:
        raise StorageError(
            f"reuse_grad_buf_for_mxfp8_param_ag=True, but fp8 parameters have the recipe {other!r}; set it to False"
        )
    return Fp8ThroughGrads(layout=layout, params=found, grad_data=grad_data)
