"""muP: learning rates and eps scaled by width, so that tuned values transfer (arXiv 2203.03466, table 8)."""

from collections.abc import Mapping, Sequence
from math import inf, prod
from typing import NamedTuple

from torch import nn
from torch.nn import Parameter

from opt_config import MUON_FAMILY, ConfigError, OptimizerConfig, ParamKey, ParamPredicate, ParamWithNamePredicate
from opt_paramgroups.meta import Metas, ParamId, describe
from opt_paramgroups.overrides import Overrides

Shapes = Mapping[ParamId, tuple[int, ...]]

_WITH_EPS = ("adam", "adamw")


class _Traits(NamedTuple):
    """The properties of a parameter on which muP depends."""

    num_dims: int
    is_embedding: bool
    is_embedding_or_output: bool
    use_muon: bool

    @property
    def is_hidden(self) -> bool:
        """A parameter with two or more dims that is not an embedding: its input dim grows with the width."""
        return self.num_dims >= 2 and not self.is_embedding

    def scaled(self, config: OptimizerConfig, rule: str) -> list[str]:
        """Return which of "lr" and "eps" muP scales: no decoupled rate, and no rate where Muon scales the update."""
        decoupled = config.decoupled_lr is not None and self.is_embedding_or_output
        by_muon = rule in MUON_FAMILY and self.use_muon and self.num_dims == 2 and not self.is_embedding_or_output
        entries = []
        # SGD scales the rates of all parameters that are not hidden, other rules those of hidden ones.
        if self.is_hidden != (rule == "sgd") and not (decoupled or by_muon):
            entries.append("lr")
        if self.is_hidden and rule in _WITH_EPS:
            entries.append("eps")
        return entries


def get_mup_config_overrides(config: OptimizerConfig, mup_width_mult: float, optimizer_type: str = "adam") -> Overrides:
    """Return muP overrides for a model `mup_width_mult` times as wide as the one on which its learning rate was tuned.

    Hidden parameters have two or more dims and are not embeddings (`is_embedding_parameter`).

    - Adam: hidden parameters get max_lr, min_lr and eps divided by the width.
    - SGD: all other parameters get max_lr and min_lr multiplied by the width.
    - Other rules: hidden parameters get max_lr and min_lr divided by the width, except for matrices updated by Muon.

    With `decoupled_lr`, embedding and output parameters keep it; their eps is still scaled if they are hidden.
    Width 1 gives {}. Raises `ConfigError` for a width that is not positive and finite, and if `config.lr` is not set.

    >>> overrides = get_mup_config_overrides(OptimizerConfig(lr=1e-2, adam_eps=1e-8), mup_width_mult=4)
    >>> {key.label: override for key, override in overrides.items()}
    {'mup lr': {'max_lr': 0.0025}, 'mup eps': {'eps': 2.5e-09}}
    """
    if mup_width_mult == 1:
        return {}
    _check_width(config, mup_width_mult)
    rule = optimizer_type.lower()
    overrides: Overrides = {_trait_key("lr", config, rule): _rates(config, rule, mup_width_mult)}
    if rule in _WITH_EPS:
        overrides[_trait_key("eps", config, rule)] = {"eps": config.adam_eps / mup_width_mult}
    return overrides


def get_mup_overrides_by_shape(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    base_shapes: Shapes,
    optimizer_type: str = "adam",
    *,
    metas: Metas | None = None,
) -> Overrides:
    """Return the same overrides with a width for each parameter, from its shape and that of the base model.

    The width of a hidden parameter is the ratio of its input size (all dims except the first) to that of the base, the
    width of any other parameter the ratio of all elements. Parameters of width 1 are not overridden.

    Args:
        config: holds the learning rates and eps tuned on the base model.
        model_chunks: the wide model.
        base_shapes: the shapes of the base model by id, as `shapes_of(base_model_chunks)` returns them.
        optimizer_type: the rule that updates the parameters.
        metas: roles of the parameters. None: `describe(model_chunks)`.

    Raises:
        ConfigError: a parameter has no base shape, or one with another number of dims; model chunks use the same name
            for parameters of different widths; `config.lr` is not set.
    """
    rule = optimizer_type.lower()
    widths: dict[tuple[str, str], float] = {}  # by entry and name
    if metas is None:
        metas = describe(model_chunks)
    for id, meta in metas.items():
        num_dims = len(meta.shape)
        traits = _Traits(num_dims, meta.is_embedding, meta.is_embedding_or_output, meta.use_muon)
        base = base_shapes.get(id)
        if base is None or len(base) != num_dims or prod(base) == 0:
            raise ConfigError(
                f"base_shapes: parameter {str(id)!r} of shape {meta.shape} has base shape {base}; it must have "
                f"{num_dims} dims and no empty dim, as shapes_of(base_model_chunks) returns it"
            )
        first = 1 if traits.is_hidden else 0
        width = prod(meta.shape[first:]) / prod(base[first:])
        if num_dims == 3 and traits.is_hidden:
            width = _width_of_stack(str(id), meta.shape, base, default=width)
        _check_width(config, width)
        scaled = traits.scaled(config, rule)
        for entry in ("lr", "eps"):
            factor = width if entry in scaled else 1
            earlier = widths.setdefault((entry, id.name), factor)
            if earlier != factor:  # keys cannot tell these apart
                raise ConfigError(
                    f"muP: model chunks use the name {id.name!r} for parameters of widths {earlier:g} and {factor:g}; "
                    "make the overrides of each chunk separately"
                )
    names_by_width: dict[tuple[str, float], set[str]] = {}
    for (entry, name), width in widths.items():
        names_by_width.setdefault((entry, width), set()).add(name)
    overrides: Overrides = {}
    for (entry, width), names in names_by_width.items():
        if width != 1:
            key = _name_key(entry, width, names)
            overrides[key] = _rates(config, rule, width) if entry == "lr" else {"eps": config.adam_eps / width}
    return overrides


def shapes_of(model_chunks: Sequence[nn.Module]) -> dict[ParamId, tuple[int, ...]]:
    """Return the shapes of all trainable parameters, for use as base shapes."""
    return {id: meta.shape for id, meta in describe(model_chunks).items()}


def _width_of_stack(name: str, shape: Sequence[int], base: Sequence[int], *, default: float) -> float:
    """Return the width of weights (n, a, b): of n experts (a, b), if both dims are wider; else as of a convolution."""
    wider = {now / before for now, before in zip(shape[1:], base[1:], strict=True)}
    if 1.0 in wider:
        return default
    if len(wider) > 1:
        raise ConfigError(
            f"base_shapes: parameter {name!r} of shape {tuple(shape)} has base shape {tuple(base)}: which of its dims "
            "is the width is unknown; give its own shape as its base shape, and its lr and eps by an override"
        )
    return wider.pop()


def _rates(config: OptimizerConfig, rule: str, width: float) -> dict[str, float]:
    """The scaled learning rates. A rate that is not set stays unset."""
    rates = {}
    for name, rate in (("max_lr", config.lr), ("min_lr", config.min_lr)):
        if rate is not None:
            rates[name] = rate * width if rule == "sgd" else rate / width
    return rates


def _trait_key(entry: str, config: OptimizerConfig, rule: str) -> ParamKey:
    def applies(param: Parameter) -> bool:
        is_embedding = bool(getattr(param, "is_embedding_parameter", False))
        is_embedding_or_output = bool(getattr(param, "is_embedding_or_output_parameter", False))
        traits = _Traits(param.dim(), is_embedding, is_embedding_or_output, bool(getattr(param, "use_muon", True)))
        return entry in traits.scaled(config, rule)

    return ParamKey(predicate=ParamPredicate(name=f"mup {entry}", fn=applies))


def _name_key(entry: str, width: float, names: set[str]) -> ParamKey:
    label = f"mup x{width:g} {entry}"
    return ParamKey(with_name_predicate=ParamWithNamePredicate(name=label, fn=lambda param, name: name in names))


def _check_width(config: OptimizerConfig, width: float) -> None:
    if not 0 < width < inf:
        raise ConfigError(f"muP: width {width!r}: must be greater than 0 and finite")
    if config.lr is None:
        raise ConfigError("muP: lr=None: muP scales the learning rate; set lr in the OptimizerConfig")
