"""Frozen parameters and persistent buffers, with the roles that say which ranks hold copies."""

from collections.abc import Iterable, Sequence
from typing import NamedTuple

from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from opt_paramgroups.meta import (
    ParamId,
    ParamMeta,
    frozen_by_id,
    make_meta,
    read_roles,
    unwrapped,
)


class Untrained(NamedTuple):
    """A frozen parameter or a persistent buffer."""

    tensor: Tensor
    meta: ParamMeta  # with the fields that say which ranks hold copies; others have their defaults


def describe_untrained(model_chunks: Sequence[nn.Module], *, model_chunk_offset: int = 0) -> dict[ParamId, Untrained]:
    """Return frozen parameters, then persistent buffers.

    A buffer belongs to an expert, or is cut by tensor parallelism, if that is so for a parameter of its module.
    """
    found: dict[ParamId, Untrained] = {}

    def add(id: ParamId, tensor: Tensor, sources: Iterable[Tensor]) -> None:
        roles = [read_roles(id, source) for source in sources]
        marks = {name: any(role.get(name, False) for role in roles) for name in ("is_expert", "tensor_parallel")}
        found[id] = Untrained(tensor, make_meta(id, tensor, marks))

    for id, param in frozen_by_id(model_chunks, model_chunk_offset=model_chunk_offset).items():
        add(id, param, [param])
    for chunk, root in enumerate(model_chunks, start=model_chunk_offset):
        for prefix, module in nn.Module.named_modules(unwrapped(root)):
            for name, buffer in module._buffers.items():
                if buffer is not None and not is_lazy(buffer) and name not in module._non_persistent_buffers_set:
                    siblings = (param for param in module._parameters.values() if param is not None)
                    add(ParamId(chunk, f"{prefix}.{name}" if prefix else name), buffer, [buffer, *siblings])
    return found
