"""A model's state dict as a source of main values: every parameter is looked up, and fits, before one is set."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from opt_distributed.step.dtensor import local
from opt_paramgroups import ParamId
from opt_paramgroups.dtensor import dtensor_layout


def find_values(state_dict: Mapping[str, Any], params: Mapping[ParamId, nn.Parameter]) -> dict[ParamId, Tensor]:
    """What `state_dict` holds of each parameter: of a DTensor, this rank's part.

    Raises:
        ValueError: a parameter that it does not hold, or holds in another shape, or laid out otherwise. All of the
            model's are looked at, not only those that live on this rank: ranks with one state dict have one verdict.
    """
    return {id: _fitting(id, _find(state_dict, id), param) for id, param in params.items()}


def _find(state_dict: Mapping[str, Any], id: ParamId) -> Any:
    chunks = [f"model{id.chunk}", f"model_{id.chunk}", *(["model"] if id.chunk == 0 else [])]
    names = next((state_dict[chunk] for chunk in chunks if isinstance(state_dict.get(chunk), Mapping)), state_dict)
    for name in (id.name, f"module.{id.name}"):
        if name in names:
            return names[name]
    raise ValueError(f"state_dict holds no {id.name!r} of model chunk {id.chunk}; it is needed for its main values")


def _fitting(id: ParamId, value: Any, param: nn.Parameter) -> Tensor:
    where = f"state_dict's {id.name!r} of model chunk {id.chunk}"
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} is a {type(value).__name__}; a tensor of shape {tuple(param.shape)} is needed")
    if value.shape != param.shape:
        raise ValueError(f"{where} has shape {tuple(value.shape)}; the parameter's is {tuple(param.shape)}")
    if dtensor_layout(value) != dtensor_layout(param):
        raise ValueError(f"{where} is laid out otherwise than the parameter; give what the model's state_dict() gives")
    return local(value)
