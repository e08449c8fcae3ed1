"""Groups of a model for one configuration, and the names in them."""

from opt_config import OptimizerConfig, ParamKey, ParamPredicate
from opt_paramgroups import get_param_groups

CONFIG = OptimizerConfig(lr=1e-2, min_lr=1e-4, weight_decay=0.1)
BIAS = ParamKey(name="*.bias")
VECTOR = ParamKey(predicate=ParamPredicate("1-D", lambda param: param.dim() == 1))


def groups_of(model, overrides, config=CONFIG, **options):
    """Groups by name."""
    return {group["name"]: group for group in get_param_groups([model], config, overrides, **options)}


def names_in(group):
    return [id.name for id in group["param_ids"]]
