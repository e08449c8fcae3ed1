"""ParamMeta: everything that must be known about a parameter, read once; later packages ask here, never the tensor."""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from types import MappingProxyType
from typing import Any

import torch
from torch import nn

from opt_config import ConfigError, did_you_mean
from opt_paramgroups.dtensor import TENSOR_PARALLEL_AXES, DTensorLayout, MeshPlacement, dtensor_layout
from opt_paramgroups.names import ParamId, parameters_by_id
from opt_paramgroups.vocabulary import vocabulary_roles


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamMeta:
    """What is known of one parameter. Raises `ConfigError` for roles that its shape cannot have."""

    id: ParamId
    shape: tuple[int, ...]  # of the whole parameter; of this rank's part under tensor parallelism without DTensors
    local_shape: tuple[int, ...]  # of what is stored here
    dtype: torch.dtype
    placements: tuple[MeshPlacement, ...] = ()  # of a DTensor
    is_expert: bool = False  # reduced over the expert data-parallel ranks only
    expert_tp: bool = False  # tensor-parallel over the experts' group
    shared: bool = False  # a copy of a parameter that another rank counts
    shared_embedding: bool = False  # embedding tied to the output over pipeline stages
    shared_position_embedding: bool = False  # position embedding that several pipeline stages hold
    pipeline_parallel: bool = False  # held by every pipeline stage, such as an embedder of conditions
    tensor_parallel: bool = False  # tensor-parallel ranks hold different parts
    partition_dim: int | None = None  # the dim that tensor parallelism cuts
    partition_stride: int = 1
    sequence_parallel: bool = False  # gradients are summed over the tensor-parallel ranks
    average_gradients_across_tp: bool = False  # gradients are averaged over the tensor-parallel ranks
    is_embedding_or_output: bool = False
    is_embedding: bool = False
    guess: str = ""  # why it counts as an embedding or output, where no module or attribute makes that certain
    use_muon: bool = True  # a matrix rule may move it
    grad_norm_group: str | None = None  # a norm and clip of its own
    qkv_split_shapes: tuple[int, ...] = ()  # rows of q, k and v in one query group; (): not fused
    head_rows: int = 0  # rows of one head, which a matrix rule moves as a matrix of its own; 0: not by heads
    split_sizes: tuple[int, ...] = ()  # rows of matrices of their own that make up the whole; (): one matrix
    codes: torch.dtype | None = None  # of what is stored, where these are codes with scales; None: values of `dtype`

    def __post_init__(self) -> None:
        dim, rows = self.partition_dim, sum(self.qkv_split_shapes)
        self._check_split()
        if dim is not None and not 0 <= dim < len(self.shape):
            raise ConfigError(
                f"{self.id}: partition_dim={dim} of shape {self.shape}: must be in [0, {len(self.shape)})"
            )
        if self.qkv_split_shapes and (min(self.qkv_split_shapes) <= 0 or len(self.shape) != 2):
            raise ConfigError(
                f"{self.id}: qkv_split_shapes={self.qkv_split_shapes} of shape {self.shape}: "
                "must be positive numbers of rows of a matrix"
            )
        if rows and self.shape[0] % rows:
            raise ConfigError(
                f"{self.id}: qkv_split_shapes={self.qkv_split_shapes}: {rows} rows per query group do not divide "
                f"{self.shape[0]} rows"
            )

    def _check_split(self) -> None:
        """Raises ConfigError where the rows of heads or split matrices do not fit the shape, and for two splits."""
        given = {name: getattr(self, name) for name in ("qkv_split_shapes", "head_rows", "split_sizes")}
        given = {name: value for name, value in given.items() if value}
        if len(given) > 1:
            raise ConfigError(f"{self.id}: {' and '.join(f'{n}={v}' for n, v in given.items())}: give one of them")
        rows = self.shape[-2] if len(self.shape) in (2, 3) else 0
        if self.head_rows and (self.head_rows < 0 or not rows or rows % self.head_rows):
            raise ConfigError(
                f"{self.id}: head_rows={self.head_rows} of shape {self.shape}: must divide the rows of a matrix or of "
                "a stack of matrices"
            )
        is_part = self.tensor_parallel and not self.is_dtensor  # of the whole, which has as many times these rows
        fits = rows and (sum(self.split_sizes) == rows or (is_part and sum(self.split_sizes) % rows == 0))
        if self.split_sizes and (min(self.split_sizes) <= 0 or not fits):
            raise ConfigError(
                f"{self.id}: split_sizes={self.split_sizes} of shape {self.shape}: must be positive numbers of rows "
                "that make up the whole matrix"
            )

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def stored_dtype(self) -> torch.dtype:
        """Of what is stored: `dtype`, or that of the codes."""
        return self.dtype if self.codes is None else self.codes

    @property
    def is_dtensor(self) -> bool:
        """Whether the parameter arrives already laid out."""
        return bool(self.placements)

    @property
    def moved_as_matrix(self) -> bool:
        """Whether a matrix rule, where there is one, moves it: a matrix, but not an embedding or output."""
        return self.use_muon and len(self.shape) == 2 and not self.is_embedding_or_output

    @property
    def is_on_several_stages(self) -> bool:
        """Whether its gradients are summed over pipeline stages. It is alone in its bucket: so all cut it alike."""
        return self.shared_embedding or self.shared_position_embedding or self.pipeline_parallel

    def has_attribute(self, attr: str) -> bool | None:
        """Whether the reference's attribute of that name is true of this parameter; None: only the tensor can tell.

        That is so for attributes not known here, and for those that are true of a parameter that says nothing: the
        reference tells a parameter that has the attribute from one that lacks it.
        """
        field = _FIELD_OF_ATTRIBUTE.get(attr)
        return None if field is None or field in _TRUE_UNSAID else bool(getattr(self, field))


# field: the reference's attribute
_ATTRIBUTE_OF_FIELD = MappingProxyType(
    {
        "expert_tp": "expert_tp",
        "shared": "shared",
        "shared_embedding": "shared_embedding",
        "shared_position_embedding": "shared_position_embedding",
        "pipeline_parallel": "pipeline_parallel",
        "tensor_parallel": "tensor_model_parallel",
        "partition_dim": "partition_dim",
        "partition_stride": "partition_stride",
        "sequence_parallel": "sequence_parallel",
        "average_gradients_across_tp": "average_gradients_across_tp_domain",
        "is_embedding_or_output": "is_embedding_or_output_parameter",
        "is_embedding": "is_embedding_parameter",
        "use_muon": "use_muon",
        "grad_norm_group": "grad_norm_group",
        "qkv_split_shapes": "qkv_split_shapes",
        "head_rows": "head_rows",
        "split_sizes": "split_sizes",
    }
)
_TRUE_UNSAID = frozenset({"use_muon", "partition_stride"})
_FIELD_OF_ATTRIBUTE = MappingProxyType({attr: field for field, attr in _ATTRIBUTE_OF_FIELD.items()})
REFERENCE_ATTRIBUTES = ("allreduce", *_FIELD_OF_ATTRIBUTE)
"""The attributes of a parameter that are read here."""
_ROLES = ("is_expert", *_ATTRIBUTE_OF_FIELD)  # what a caller may say in place of the attributes

Roles = Mapping[ParamId | str, Mapping[str, Any]]
"""What a caller knows: by id, or by a pattern of names, the fields of `ParamMeta` and their values."""


def describe(
    model_chunks: Sequence[nn.Module],
    *,
    overrides: Roles | None = None,
    tensor_parallel_axes: Sequence[str] = TENSOR_PARALLEL_AXES,
    model_chunk_offset: int = 0,
) -> dict[ParamId, ParamMeta]:
    """What is known of every trainable parameter: tied ones once, under their first name; frozen ones never.

    Read from Megatron-Core's attribute names, from DTensor placements, and, for embeddings and output layers without
    the attribute `is_embedding_or_output_parameter`, from the modules (`vocabulary_roles`).

    Args:
        model_chunks: the model, or its virtual pipeline stages; wrappers do not change the names.
        overrides: what the caller knows better, by id or by a pattern of names; later entries win.
        tensor_parallel_axes: the mesh axes of DTensors that mean tensor parallelism.
        model_chunk_offset: number of the first chunk.

    Raises:
        ConfigError: an override names a parameter or field that does not exist, or a role does not fit the shape.
    """
    params = parameters_by_id(model_chunks, model_chunk_offset=model_chunk_offset)
    roles = {id: _roles_read(id, param, frozenset(tensor_parallel_axes)) for id, param in params.items()}
    for id, role in _roles_recognised(model_chunks, params).items():
        if not roles[id].keys() & {"is_embedding_or_output", "is_embedding"}:
            roles[id] |= role
    for which, fields in (overrides or {}).items():
        _check_fields(which, fields)
        for id in _meant(which, params):
            roles[id] |= fields
            if "is_embedding_or_output" in fields:
                roles[id].pop("guess", None)
    return {id: _meta(id, param, roles[id]) for id, param in params.items()}


def _meta(id: ParamId, param: nn.Parameter, roles: Mapping[str, Any]) -> ParamMeta:
    layout = dtensor_layout(param) or DTensorLayout(tuple(param.shape), ())
    return ParamMeta(
        id=id,
        shape=tuple(param.shape),
        local_shape=layout.local_shape,
        dtype=param.dtype,
        placements=layout.placements,
        **{**roles, **{name: tuple(roles.get(name, ())) for name in ("qkv_split_shapes", "split_sizes")}},
    )


def _roles_recognised(
    model_chunks: Sequence[nn.Module], params: Mapping[ParamId, nn.Parameter]
) -> dict[ParamId, dict[str, Any]]:
    """The fields that the modules of embeddings and output layers tell."""
    known = vocabulary_roles(model_chunks)
    return {
        param_id: {"is_embedding_or_output": True, "is_embedding": role.is_embedding, "guess": role.guess}
        for param_id, param in params.items()
        if (role := known.get(id(param))) is not None
    }


def _roles_read(id: ParamId, param: nn.Parameter, tensor_parallel_axes: frozenset[str]) -> dict[str, Any]:
    """The fields that the tensor itself tells; those it does not mention are left to their defaults."""
    roles = {
        field: getattr(param, attr)
        for field, attr in _ATTRIBUTE_OF_FIELD.items()
        if getattr(param, attr, None) is not None
    }
    if roles.get("partition_dim", -1) < 0:  # the reference's mark of a parameter that is not cut
        roles.pop("partition_dim", None)
    if not getattr(param, "is_qkv", True):
        roles.pop("qkv_split_shapes", None)
    roles["is_expert"] = not getattr(param, "allreduce", True)
    if "expert_tp" not in roles:
        roles["expert_tp"] = roles["is_expert"] or ("experts" in id.name and "shared" not in id.name)
    return roles | _roles_placed(dtensor_layout(param), tensor_parallel_axes)


def _roles_placed(layout: DTensorLayout | None, tensor_parallel_axes: frozenset[str]) -> dict[str, Any]:
    """The fields that the placements of a DTensor tell."""
    for placement in layout.placements if layout else ():
        if placement.axis in tensor_parallel_axes and placement.shard_dim is not None:
            return {"tensor_parallel": True, "partition_dim": placement.shard_dim}
    return {}


def _check_fields(which: ParamId | str, fields: Mapping[str, Any]) -> None:
    for field in fields:
        if field not in _ROLES:
            reason = f"no such role; there are {', '.join(_ROLES)}.{did_you_mean(field, _ROLES)}"
            raise ConfigError(f"overrides[{str(which)!r}]: {field!r} is {reason}")


def _meant(which: ParamId | str, params: Mapping[ParamId, nn.Parameter]) -> Iterator[ParamId]:
    """The parameters that an entry of `overrides` is about."""
    found = [id for id in params if (fnmatchcase(id.name, which) if isinstance(which, str) else id == which)]
    if not found:
        name = which if isinstance(which, str) else which.name
        hint = did_you_mean(name, {id.name for id in params})
        raise ConfigError(f"overrides[{str(which)!r}]: no trainable parameter is called so.{hint}")
    return iter(found)
