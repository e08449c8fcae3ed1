"""Read main values from a model's state dict; all parameters are checked before any is set."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from opt_distributed.step.dtensor import local
from opt_paramgroups import ParamId
from opt_paramgroups.dtensor import dtensor_layout


def find_values(state_dict: Mapping[str, Any], params: Mapping[ParamId, nn.Parameter]) -> dict[ParamId, Tensor]:
    """Return the value of each parameter in `state_dict`; for a DTensor, this rank's part.

    Raises:
        ValueError: a parameter is missing, or has another shape or layout. All parameters of the model are checked, not
            only those whose state lives on this rank, so all ranks raise for one state dict.
    """
    return {id: _fitting(id, _find(state_dict, id), param) for id, param in params.items()}


def _find(state_dict: Mapping[str, Any], id: ParamId) -> Any:
    chunks = [f"model{id.chunk}", f"model_{id.chunk}", *(["model"] if id.chunk == 0 else [])]
    names = next((state_dict[chunk] for chunk in chunks if isinstance(state_dict.get(chunk), Mapping)), state_dict)
    for name in (id.name, f"module.{id.name}"):
        if name in names:
            return names[name]
    raise ValueError(f"state_dict lacks {id.name!r} of model chunk {id.chunk}; it must hold every trained parameter")


def _fitting(id: ParamId, value: Any, param: nn.Parameter) -> Tensor:
    where = f"state_dict's {id.name!r} of model chunk {id.chunk}"
    if not isinstance(value, Tensor):
        raise ValueError(f"{where} is a {type(value).__name__}; it must be a tensor of shape {tuple(param.shape)}")
    if value.shape != param.shape:
        raise ValueError(f"{where} has shape {tuple(value.shape)}; the parameter's is {tuple(param.shape)}")
    if dtensor_layout(value) != dtensor_layout(param):
        raise ValueError(f"{where} has a different layout than the parameter; pass the result of model.state_dict()")
    return local(value)
