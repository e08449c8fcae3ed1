"""The groups of ranks that a model is divided over, and the marks of its tensors that say how."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from torch import Tensor, nn

from opt_checkpoint.state.dtensor import is_dtensor

_ON_STAGES = ("shared_embedding", "shared_position_embedding", "pipeline_parallel")


class Axis(Protocol):
    """A group of ranks as this rank sees it, such as `run.ranks.Ranks`, or a `Comm` of opt_distributed."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    def gather_objects(self, value: Any) -> list[Any]:
        """Return the value of every rank, in rank order."""
        ...


class Replica(NamedTuple):
    """The number of this rank among those that hold the same parameters, and their number."""

    rank: int
    size: int


@dataclass(frozen=True, slots=True, kw_only=True)
class ModelAxes:
    """The groups over which a model is divided."""

    everyone: Axis
    tp: Axis
    expert_tp: Axis
    ep: Axis
    pp: Axis
    dense: Replica
    expert: Replica


@dataclass(frozen=True, slots=True, kw_only=True)
class Marks:
    """What a rank knows about a tensor of its model without knowing the groups.

    Args:
        name: in the model.
        tensor: the parameter or buffer.
        is_expert: whether each expert-parallel rank has another one (`allreduce=False`).
        is_cut: whether each tensor-parallel rank has another part (`tensor_model_parallel=True`).
        dim: the dim that is cut; None if it is not known.
        stride: into how many pieces each rank's part is cut (`partition_stride`).
        is_on_stages: whether several pipeline stages have a copy.
        list_name: the name of the outermost list of modules that contains the tensor; None without such a list.
        list_len: the number of its modules.
    """

    name: str
    tensor: Tensor
    is_expert: bool
    is_cut: bool
    dim: int | None
    stride: int
    is_on_stages: bool
    list_name: str | None
    list_len: int

    def problem(self) -> str:
        """What must be given before this may be saved or loaded on several ranks; empty if nothing."""
        if not (self.is_expert or self.is_cut):
            return ""
        kind = "an expert (allreduce=False)" if self.is_expert else "tensor parallel (tensor_model_parallel=True)"
        return (
            f"{self.name} is {kind}, and which part of the whole model this rank has is unknown without process "
            f"groups; pass sharded_model(model, groups=opt_stack.ProcessGroups(dp=..., tp=..., ...)), or pass the "
            f"result of sharded_model to optimizer.sharded_state_dict before the save or load"
        )


def marks_of(model: nn.Module, names: Mapping[str, str], values: Mapping[str, Any]) -> dict[str, Marks]:
    """Read the marks of the tensors of a model.

    Args:
        model: contains them.
        names: from names in the model to names in the checkpoint.
        values: tensors by name in the model; other values are skipped.
    """
    model = _named_as_saved(model, names)
    experts = _modules_of_experts(model)
    return {
        plain: _marks(model, name, plain, values[name], is_expert=name.rpartition(".")[0] in experts)
        for name, plain in names.items()
        if isinstance(values[name], Tensor)
    }


def _named_as_saved(model: nn.Module, names: Iterable[str]) -> nn.Module:
    """The module whose tensors have these names: the state dicts of some wrappers leave out their prefix `module.`."""
    inner = getattr(model, "module", None)
    found = {
        name for named in (model.named_parameters, model.named_buffers) for name, _ in named(remove_duplicate=False)
    }
    return inner if isinstance(inner, nn.Module) and found.isdisjoint(names) else model


def _modules_of_experts(model: nn.Module) -> set[str]:
    """Names of modules whose direct parameters are all experts: their buffers are the experts', too."""
    direct = {name: list(module.parameters(recurse=False)) for name, module in model.named_modules()}
    return {name for name, own in direct.items() if own and not any(getattr(p, "allreduce", True) for p in own)}


def _marks(model: nn.Module, name: str, plain: str, tensor: Tensor, *, is_expert: bool) -> Marks:
    dim = getattr(tensor, "partition_dim", None)
    outer = _before_number(name)
    length = 0 if outer is None else _list_len(model.get_submodule(outer))
    default = not is_expert or isinstance(tensor, nn.Parameter)
    return Marks(
        name=plain,
        tensor=tensor,
        is_expert=not getattr(tensor, "allreduce", default),
        is_cut=bool(getattr(tensor, "tensor_model_parallel", False)) and not is_dtensor(tensor),
        dim=None if dim is None or dim < 0 else dim,
        stride=getattr(tensor, "partition_stride", None) or 1,
        is_on_stages=any(getattr(tensor, mark, False) for mark in _ON_STAGES),
        list_name=_before_number(plain) if length else None,
        list_len=length,
    )


def _before_number(name: str) -> str | None:
    """The name up to its first component that is a number, such as `decoder.layers`; None if no component is."""
    parts = name.split(".")
    at = next((index for index, part in enumerate(parts) if part.isdigit()), None)
    return None if at is None else ".".join(parts[:at])


def _list_len(module: nn.Module) -> int:
    """The length of a `ModuleList`, `Sequential` or `ParameterList`; 0 for a module that is not numbered from 0."""
    names = {**module._modules, **module._parameters}
    return len(names) if sorted(names) == sorted(map(str, range(len(names)))) else 0
