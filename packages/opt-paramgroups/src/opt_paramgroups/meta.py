"""A model as values: names of parameters, and `ParamMeta`, the roles and layout of each, read once.

Other packages never read attributes of a parameter.
"""

import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from importlib import import_module
from typing import Any, NamedTuple, TypeGuard

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from opt_config import ConfigError, did_you_mean
from opt_paramgroups.vocabulary import fused_qkv_rows, is_vector, plain_name, vocabulary_roles

# Wrappers hold the model as their only child, under one of these names, and own no parameters.
_WRAPPER_CHILDREN = frozenset({"module", "_orig_mod"})


class ParamId(NamedTuple):
    """The name of a parameter and its model chunk: chunks of a virtual pipeline repeat local names."""

    chunk: int
    name: str

    def __str__(self) -> str:
        return self.name if self.chunk == 0 else f"chunk {self.chunk}: {self.name}"


def unwrapped(module: nn.Module) -> nn.Module:
    """Return the model inside data-parallel and torch.compile wrappers, so that wrapping does not change names."""
    while True:
        children = list(module.named_children())
        if len(children) != 1 or children[0][0] not in _WRAPPER_CHILDREN:
            return module
        if list(module.parameters(recurse=False)):  # a wrapper has none of its own
            return module
        module = children[0][1]


def parameters_by_id(model_chunks: Sequence[nn.Module], *, model_chunk_offset: int = 0) -> dict[ParamId, nn.Parameter]:
    """Return the trainable parameters in order of registration. Tied parameters appear once, under their first name.

    Raises `ConfigError` for a module in place of the list of chunks (the layers of an `nn.Sequential` are not model
    chunks), and for a parameter of a lazy module, whose shape is not known yet.
    """
    if isinstance(model_chunks, nn.Module):
        raise ConfigError(f"model_chunks: {type(model_chunks).__name__} is a module: pass a list, [model]")
    params = {id: param for id, param in _distinct(model_chunks, model_chunk_offset) if param.requires_grad}
    for id, param in params.items():
        if is_lazy(param):
            raise ConfigError(
                f"parameter {str(id)!r} is uninitialized: its lazy module has not seen a batch; run one forward pass "
                "before building the optimizer"
            )
    return params


def frozen_by_id(model_chunks: Sequence[nn.Module], *, model_chunk_offset: int = 0) -> dict[ParamId, nn.Parameter]:
    """Return the parameters with `requires_grad=False`, in the same order. Tied parameters appear once."""
    return {id: param for id, param in _distinct(model_chunks, model_chunk_offset) if not param.requires_grad}


def _distinct(model_chunks: Sequence[nn.Module], offset: int) -> Iterator[tuple[ParamId, nn.Parameter]]:
    seen: set[int] = set()
    for chunk, module in enumerate(model_chunks, start=offset):
        named = dict(unwrapped(module).named_parameters())
        names = {name: plain_name(name) for name in named}
        if len({*names.values()}) < len(names):  # a module of the model is called like the part of a wrapper
            names = {name: name for name in named}
        for name, param in named.items():
            if id(param) not in seen:
                seen.add(id(param))
                yield ParamId(chunk, names[name]), param


def model_chunks_of(place: str) -> list[nn.Module]:
    """Return the model chunks that `module:factory` returns. Raises `ConfigError` if it does not return modules."""
    module_name, colon, attr = place.partition(":")
    if not colon:
        raise ConfigError(f"{place!r}: must be module:factory, such as my_project.model:build")
    try:
        factory = getattr(import_module(module_name), attr)
    except (ImportError, AttributeError) as error:
        raise ConfigError(f"{place!r}: {error}") from error
    model = factory()
    chunks = [model] if isinstance(model, nn.Module) else list(model)
    if not all(isinstance(chunk, nn.Module) for chunk in chunks):
        raise ConfigError(f"{place!r}: must return a module or a list of modules, not {model!r}")
    return chunks


TENSOR_PARALLEL_AXES = ("tp",)
"""The names of mesh axes that mean tensor parallelism."""


class MeshPlacement(NamedTuple):
    """How a tensor is placed along one axis of the device mesh."""

    axis: str  # the mesh's name for it, or its number
    size: int
    shard_dim: int | None  # the dim it shards; None: replicated
    cuts_last: bool = False  # applied after the inner axes: FSDP2 shards the tensor-parallel shard of a dim


class DTensorLayout(NamedTuple):
    """The placement of a DTensor parameter on its mesh."""

    local_shape: tuple[int, ...]
    placements: tuple[MeshPlacement, ...]  # one for each axis of the mesh, outermost first


def is_dtensor(tensor: object) -> TypeGuard[Any]:
    """Whether a value is a DTensor."""
    # DTensors exist only if their module was imported. Importing it here would cost every user half a second and fail
    # on builds of torch without distributed.
    # While another thread imports it, as a save in the background does, the module has no DTensor yet.
    return isinstance(tensor, getattr(sys.modules.get("torch.distributed.tensor"), "DTensor", ()))


def dtensor_layout(tensor: Tensor) -> DTensorLayout | None:
    """Return the layout of a DTensor; None for any other tensor.

    Raises `ConfigError` for partial placements: a pending sum cannot be updated.
    """
    if not is_dtensor(tensor):
        return None
    mesh = tensor.device_mesh
    names = mesh.mesh_dim_names or map(str, range(mesh.ndim))
    placements = []
    for axis, size, placement in zip(names, mesh.shape, tensor.placements, strict=True):
        if placement.is_partial():
            raise ConfigError(
                f"a parameter has the placement {placement}; allowed are Shard and Replicate; redistribute it first"
            )
        # is_shard() is False for strided shards since 2.13
        shard_dim = None if placement.is_replicate() else int(placement.dim)
        placements.append(MeshPlacement(axis, size, shard_dim, hasattr(placement, "split_factor")))
    return DTensorLayout(tuple(tensor.to_local().shape), tuple(placements))


@dataclass(frozen=True, slots=True, kw_only=True)
class ParamMeta:
    """The roles and layout of one parameter. Raises `ConfigError` for roles that do not fit its shape."""

    id: ParamId
    shape: tuple[int, ...]  # of the whole parameter; of this rank's part under tensor parallelism without DTensors
    local_shape: tuple[int, ...]  # of what this rank stores
    dtype: torch.dtype
    placements: tuple[MeshPlacement, ...] = ()  # of a DTensor
    is_expert: bool = False  # reduced over the expert data-parallel ranks only
    expert_tp: bool = False  # tensor-parallel over the experts' group
    shared: bool = False  # a copy of a parameter; another rank counts it in norms
    shared_embedding: bool = False  # embedding tied to the output over pipeline stages
    shared_position_embedding: bool = False  # position embedding that several pipeline stages store
    pipeline_parallel: bool = False  # every pipeline stage stores it, such as an embedder of conditions
    tensor_parallel: bool = False  # tensor-parallel ranks store different parts
    partition_dim: int | None = None  # the dim that tensor parallelism shards
    partition_stride: int = 1
    sequence_parallel: bool = False  # gradients are summed over the tensor-parallel ranks
    average_gradients_across_tp: bool = False  # gradients are averaged over the tensor-parallel ranks
    is_embedding_or_output: bool = False
    is_embedding: bool = False
    guess: str = ""  # why it is taken for an embedding or output, if no module or attribute makes that certain
    use_muon: bool = True  # a matrix rule may update it
    grad_norm_group: str | None = None  # parameters of a group share a norm and are clipped by it
    qkv_split_shapes: tuple[int, ...] = ()  # fused QKV: rows of q, k and v in one query group; (): not fused
    # Rows of one head, which a matrix rule updates as a separate matrix; several: of its matrices; 0: no heads
    head_rows: int | tuple[int, ...] = 0
    split_sizes: tuple[int, ...] = ()  # rows of the separate matrices that it concatenates; (): one matrix
    split_rows: tuple[int, ...] = ()  # rows that each of several matrices has in turn, again and again; (): one matrix
    codes: torch.dtype | None = None  # dtype of stored codes with scales; None: values of `dtype` are stored
    is_vector: bool = False  # or a stack of vectors, see `vocabulary.is_vector`

    def __post_init__(self) -> None:
        if self.partition_dim is not None and not 0 <= self.partition_dim < len(self.shape):
            raise ConfigError(
                f"{self.id}: partition_dim={self.partition_dim} of shape {self.shape}: must be in "
                f"[0, {len(self.shape)})"
            )
        given = {name: getattr(self, name) for name in sorted(_SPLITS) if getattr(self, name)}
        if len(given) > 1:
            both = " and ".join(f"{name}={value}" for name, value in given.items())
            raise ConfigError(f"{self.id}: {both}: set only one of them")
        rows = self.shape[-2] if len(self.shape) in (2, 3) else 0
        for name, value in given.items():
            if problem := self._problem_of_rows(name, rows):
                raise ConfigError(f"{self.id}: {name}={value} of shape {self.shape}: {problem}")

    def _problem_of_rows(self, name: str, rows: int) -> str:
        """Why the separate matrices do not fit the `rows` that this rank has of each matrix; empty if they do."""
        if name == "split_sizes":
            is_part = self.tensor_parallel and not self.is_dtensor  # the whole has a multiple of these rows
            num = sum(self.split_sizes)
            fits = rows and (num == rows or (is_part and num % rows == 0))
            is_wrong = min(self.split_sizes) <= 0 or not fits
            return "must be positive numbers of rows that make up the whole matrix" if is_wrong else ""
        group = self.head_group or self.split_rows or self.qkv_split_shapes
        are_numbers = all(type(count) is int and count > 0 for count in group)  # True does not count as 1
        is_stack_of_qkv = name == "qkv_split_shapes" and len(self.shape) == 3
        if are_numbers and rows > 0 and rows % sum(group) == 0 and not is_stack_of_qkv:
            return ""
        return "must be positive numbers whose sum divides the rows of a matrix or of a stack of matrices"

    @property
    def head_group(self) -> tuple[int, ...]:
        """Rows of the matrices of one head; () without heads."""
        if not self.head_rows:
            return ()
        return self.head_rows if isinstance(self.head_rows, tuple) else (self.head_rows,)

    @property
    def numel(self) -> int:
        """Elements of the whole parameter."""
        return math.prod(self.shape)

    @property
    def stored_dtype(self) -> torch.dtype:
        """Dtype of the stored elements: that of the codes, or `dtype`."""
        return self.dtype if self.codes is None else self.codes

    @property
    def is_dtensor(self) -> bool:
        """Whether the parameter is a DTensor."""
        return bool(self.placements)

    @property
    def moved_as_matrix(self) -> bool:
        """Whether a matrix rule updates it, if one is used: a matrix that is neither an embedding nor an output."""
        return self.use_muon and len(self.shape) == 2 and not self.is_embedding_or_output

    @property
    def is_on_several_stages(self) -> bool:
        """Whether its gradients are summed over pipeline stages. Its bucket holds nothing else, so that all stages cut
        it equally."""
        return self.shared_embedding or self.shared_position_embedding or self.pipeline_parallel

    def has_attribute(self, attr: str) -> bool | None:
        """Whether Megatron-Core's attribute `attr` is true for this parameter. None: look at the tensor.

        None is returned for unknown attributes, and for those that default to true: Megatron-Core distinguishes a
        parameter that has such an attribute from one that lacks it.
        """
        field = _FIELD_OF_ATTRIBUTE.get(attr)
        return None if field is None or field in _TRUE_BY_DEFAULT else bool(getattr(self, field))


Params = Mapping[ParamId, nn.Parameter]
"""Trainable parameters by id."""

Metas = Mapping[ParamId, ParamMeta]
"""Their descriptions, as `describe` returns them."""

_FIELDS_OF_ATTRIBUTES = (
    "expert_tp shared shared_embedding shared_position_embedding pipeline_parallel tensor_parallel partition_dim "
    "partition_stride sequence_parallel average_gradients_across_tp is_embedding_or_output is_embedding use_muon "
    "grad_norm_group qkv_split_shapes head_rows split_sizes split_rows"
)
# Fields whose attributes have other names in Megatron-Core.
_RENAMED = {
    "tensor_parallel": "tensor_model_parallel",
    "average_gradients_across_tp": "average_gradients_across_tp_domain",
    "is_embedding_or_output": "is_embedding_or_output_parameter",
    "is_embedding": "is_embedding_parameter",
}
_ATTRIBUTE_OF_FIELD = {name: _RENAMED.get(name, name) for name in _FIELDS_OF_ATTRIBUTES.split()}
_TRUE_BY_DEFAULT = frozenset({"use_muon", "partition_stride"})
_FIELD_OF_ATTRIBUTE = {attr: field for field, attr in _ATTRIBUTE_OF_FIELD.items()}
REFERENCE_ATTRIBUTES = ("allreduce", *_FIELD_OF_ATTRIBUTE)
"""The attributes of a parameter that `describe` reads."""
_ROLES = ("is_expert", *_ATTRIBUTE_OF_FIELD)  # what `overrides` may set
_ROWS = ("qkv_split_shapes", "split_sizes", "split_rows")
_SPLITS = frozenset({"head_rows", *_ROWS})

Roles = Mapping[ParamId | str, Mapping[str, Any]]
"""Fields of `ParamMeta` and their values, by the id of a parameter or a pattern of names."""


def describe(
    model_chunks: Sequence[nn.Module],
    *,
    overrides: Roles | None = None,
    model_chunk_offset: int = 0,
    by_name: bool = True,
) -> dict[ParamId, ParamMeta]:
    """Return the roles and layout of every trainable parameter. Tied parameters appear once, under their first name.

    They are read from Megatron-Core's attribute names and from DTensor placements. Embeddings and output layers without
    the attribute `is_embedding_or_output_parameter` are recognised by their modules (`vocabulary_roles`), and fused q,
    k and v without `qkv_split_shapes` by the configuration of their layer (`fused_qkv_rows`).

    Args:
        model_chunks: the model, or its virtual pipeline stages; wrappers do not change the names.
        overrides: fields that replace those read, by id or by a pattern of names. Later entries win.
        model_chunk_offset: number of the first chunk.
        by_name: False: embeddings and output layers have the attribute, as in Megatron-Core.

    Raises:
        ConfigError: an override names a parameter or field that does not exist, or a role does not fit the shape.
    """
    params = parameters_by_id(model_chunks, model_chunk_offset=model_chunk_offset)
    roles = {param_id: read_roles(param_id, param) for param_id, param in params.items()}
    models = [unwrapped(chunk) for chunk in model_chunks]
    known = vocabulary_roles(models) if by_name else {}
    qkv_rows = fused_qkv_rows(models)
    for param_id, param in params.items():
        role = known.get(id(param))
        read = roles[param_id]
        if role is not None and not read.keys() & {"is_embedding_or_output", "is_embedding"}:
            read |= {"is_embedding_or_output": True, "is_embedding": role.is_embedding, "guess": role.guess}
        if id(param) in qkv_rows and not read.keys() & _SPLITS:  # is_qkv is False on all matrices of Megatron-Core
            read["qkv_split_shapes"] = qkv_rows[id(param)]
    for which, fields in (overrides or {}).items():
        for param_id in _matching_ids(which, fields, params):
            roles[param_id] |= fields
            if "is_embedding_or_output" in fields:
                roles[param_id].pop("guess", None)
    return {param_id: make_meta(param_id, param, roles[param_id]) for param_id, param in params.items()}


def make_meta(id: ParamId, param: Tensor, roles: Mapping[str, Any]) -> ParamMeta:
    """Return the description of a tensor with these roles."""
    shape = tuple(param.shape)
    rows = {name: tuple(roles.get(name, ())) for name in _ROWS}
    if isinstance(roles.get("head_rows"), list):
        rows["head_rows"] = tuple(roles["head_rows"])
    local_shape, placements = dtensor_layout(param) or DTensorLayout(shape, ())
    return ParamMeta(
        id=id,
        shape=shape,
        local_shape=local_shape,
        dtype=param.dtype,
        placements=placements,
        is_vector=is_vector(param, id.name),
        **{**roles, **rows},
    )


def read_roles(id: ParamId, param: Tensor) -> dict[str, Any]:
    """Return the roles read from the attributes and placements of a parameter. Others keep their defaults."""
    roles = {
        field: getattr(param, attr)
        for field, attr in _ATTRIBUTE_OF_FIELD.items()
        if getattr(param, attr, None) is not None
    }
    if roles.get("partition_dim", -1) < 0:  # Megatron-Core sets -1 on parameters that are not sharded
        roles.pop("partition_dim", None)
    if not getattr(param, "is_qkv", True):
        roles.pop("qkv_split_shapes", None)
    roles["is_expert"] = not getattr(param, "allreduce", True)
    if "expert_tp" not in roles:
        roles["expert_tp"] = roles["is_expert"] or ("experts" in id.name and "shared" not in id.name)
    layout = dtensor_layout(param)
    for placement in reversed(layout.placements if layout else ()):  # the outermost axis counts
        if placement.axis in TENSOR_PARALLEL_AXES and placement.shard_dim is not None:
            roles |= {"tensor_parallel": True, "partition_dim": placement.shard_dim}
    return roles


def _matching_ids(which: ParamId | str, fields: Mapping[str, Any], params: Params) -> list[ParamId]:
    """The parameters to which an entry of `overrides` applies. Raises ConfigError for others, and for other fields."""
    for field in fields:
        if field not in _ROLES:
            reason = f"allowed are {', '.join(_ROLES)}.{did_you_mean(field, _ROLES)}"
            raise ConfigError(f"overrides[{str(which)!r}]: unknown role {field!r}; {reason}")
    for field in _ROWS:
        rows = fields.get(field, ())
        if not isinstance(rows, tuple | list) or not all(isinstance(count, int) for count in rows):
            reason = "must be a tuple of numbers of rows"
            raise ConfigError(f"overrides[{str(which)!r}]: {field}={rows!r}: {reason}")
    matching = [id for id in params if (fnmatchcase(id.name, which) if isinstance(which, str) else id == which)]
    if not matching:
        name = which if isinstance(which, str) else which.name
        hint = did_you_mean(name, {id.name for id in params})
        raise ConfigError(f"overrides[{str(which)!r}]: no trainable parameter has this name.{hint}")
    return matching
