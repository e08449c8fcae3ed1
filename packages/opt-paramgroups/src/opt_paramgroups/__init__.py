"""Parameter groups by key, the same on every rank."""

from opt_paramgroups.groups import (
    GroupsAndBuffers,
    ParamGroup,
    completed_group,
    get_param_groups,
    get_param_groups_and_buffers,
    matches,
)
from opt_paramgroups.meta import (
    TENSOR_PARALLEL_AXES,
    MeshPlacement,
    Metas,
    ParamId,
    ParamMeta,
    Params,
    describe,
    dtensor_layout,
    is_dtensor,
    model_chunks_of,
    parameters_by_id,
)
from opt_paramgroups.mup import get_mup_config_overrides, get_mup_overrides_by_shape, shapes_of
from opt_paramgroups.overrides import (
    get_layer_decay_overrides,
    get_matrix_rule_overrides,
    get_standard_config_overrides,
)
from opt_paramgroups.table import GroupRow, aligned, as_json, as_markdown, as_text, group_rows
from opt_paramgroups.untrained import describe_untrained
from opt_paramgroups.vocabulary import plain_name

__all__ = [
    "TENSOR_PARALLEL_AXES", "GroupRow", "GroupsAndBuffers", "MeshPlacement", "Metas", "ParamGroup", "ParamId",
    "ParamMeta", "Params", "aligned", "as_json", "as_markdown", "as_text", "completed_group", "describe",
    "describe_untrained", "dtensor_layout", "get_layer_decay_overrides", "get_matrix_rule_overrides",
    "get_mup_config_overrides", "get_mup_overrides_by_shape", "get_param_groups", "get_param_groups_and_buffers",
    "get_standard_config_overrides", "group_rows", "is_dtensor", "matches", "model_chunks_of", "parameters_by_id",
    "plain_name", "shapes_of",
]  # fmt: skip

__version__ = "0.1.0"
