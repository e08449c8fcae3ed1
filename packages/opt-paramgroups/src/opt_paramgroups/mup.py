"""muP: learning rates and eps that keep their meaning when a model is made wider (arXiv 2203.03466, table 8)."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from math import prod
from typing import NamedTuple

from torch import nn
from torch.nn import Parameter

from opt_config import ConfigError, OptimizerConfig, ParamKey, ParamPredicate, ParamWithNamePredicate
from opt_paramgroups.meta import ParamMeta, describe
from opt_paramgroups.names import ParamId
from opt_paramgroups.presets import MUON_FAMILY, Overrides

Shapes = Mapping[ParamId, tuple[int, ...]]

_WITH_EPS = ("adam", "adamw")


class _Traits(NamedTuple):
    """What muP asks of a parameter."""

    num_dims: int
    is_embedding: bool
    is_embedding_or_output: bool
    use_muon: bool

    @property
    def is_hidden(self) -> bool:
        """Matrix-like, and no embedding: both of its dims grow with the width, or its input does."""
        return self.num_dims >= 2 and not self.is_embedding

    def keeps_lr(self, config: OptimizerConfig, rule: str) -> bool:
        """Whether its learning rate is set by something else: a decoupled rate, or Muon's own scale."""
        decoupled = config.decoupled_lr is not None and self.is_embedding_or_output
        by_muon = rule in MUON_FAMILY and self.use_muon and self.num_dims == 2 and not self.is_embedding_or_output
        return decoupled or by_muon


class _Scale(NamedTuple):
    """What muP does to a parameter."""

    lr: bool
    eps: bool


def get_mup_config_overrides(config: OptimizerConfig, mup_width_mult: float, optimizer_type: str = "adam") -> Overrides:
    """muP overrides of a model that is `mup_width_mult` times as wide as the one its learning rate was found on.

    Hidden parameters are matrix-like (two dims or more) and no embeddings (`is_embedding_parameter`).

    - Adam: hidden parameters get max_lr, min_lr and eps divided by the width.
    - SGD: all others get max_lr and min_lr multiplied by the width.
    - Other rules: hidden parameters get max_lr and min_lr divided, but for the matrices that Muon moves itself.

    With `decoupled_lr`, embedding and output parameters keep it; their eps is still scaled when they are hidden.
    Width 1 gives {}. Raises `ConfigError` for a width that is not positive, and where `config.lr`, which is scaled, is
    not set.

    >>> overrides = get_mup_config_overrides(OptimizerConfig(lr=1e-2, adam_eps=1e-8), mup_width_mult=4)
    >>> {key.label: override for key, override in overrides.items()}
    {'<mup lr>': {'max_lr': 0.0025}, '<mup eps>': {'eps': 2.5e-09}}
    """
    if mup_width_mult == 1:
        return {}
    _check_width(config, mup_width_mult)
    rule = optimizer_type.lower()
    scaled = _by_traits("lr", lambda traits: _scale(traits, config, rule).lr)
    overrides: Overrides = {scaled: _rates(config, rule, mup_width_mult)}
    if rule in _WITH_EPS:
        key = _by_traits("eps", lambda traits: _scale(traits, config, rule).eps)
        overrides[key] = {"eps": config.adam_eps / mup_width_mult}
    return overrides


def get_mup_overrides_by_shape(
    config: OptimizerConfig,
    model_chunks: Sequence[nn.Module],
    base_shapes: Shapes,
    optimizer_type: str = "adam",
    *,
    metas: Mapping[ParamId, ParamMeta] | None = None,
) -> Overrides:
    """The same overrides where widths differ from parameter to parameter: each is compared with its base shape.

    The width of a hidden parameter is that of its input (all dims but the first), of another one that of all its
    elements. What is as large as its base keeps everything.

    Args:
        config: holds the learning rates and eps that were found on the base model.
        model_chunks: the wide model.
        base_shapes: the base model's shapes by id; `shapes_of(base_model_chunks)` reads them.
        optimizer_type: the rule that moves the parameters.
        metas: what is known of the parameters; None: `describe(model_chunks)`.

    Raises:
        ConfigError: a parameter has no base shape, or one with another number of dims; two chunks use one name for
            different widths; `config.lr` is not set.
    """
    rule = optimizer_type.lower()
    names: dict[tuple[str, float], set[str]] = {}
    for id, meta in (metas if metas is not None else describe(model_chunks)).items():
        traits = _Traits(len(meta.shape), meta.is_embedding, meta.is_embedding_or_output, meta.use_muon)
        width = _width(meta, base_shapes, is_hidden=traits.is_hidden)
        _check_width(config, width)
        for entry in _scaled_entries(_scale(traits, config, rule), width):
            names.setdefault((entry, width), set()).add(id.name)
    _check_one_width(names)
    return {
        _by_name(entry, width, frozenset(called)): (
            _rates(config, rule, width) if entry == "lr" else {"eps": config.adam_eps / width}
        )
        for (entry, width), called in names.items()
    }


def shapes_of(model_chunks: Sequence[nn.Module]) -> dict[ParamId, tuple[int, ...]]:
    """The shapes of all trainable parameters: the base shapes of a model, worth keeping in a file beside it."""
    return {id: meta.shape for id, meta in describe(model_chunks).items()}


def _scale(traits: _Traits, config: OptimizerConfig, rule: str) -> _Scale:
    hidden = traits.is_hidden
    if rule == "sgd":
        return _Scale(lr=not hidden and not traits.keeps_lr(config, rule), eps=False)
    return _Scale(lr=hidden and not traits.keeps_lr(config, rule), eps=hidden and rule in _WITH_EPS)


def _rates(config: OptimizerConfig, rule: str, width: float) -> dict[str, float]:
    """The scaled learning rates; one that is not set stays so."""
    rates = {"max_lr": config.lr, "min_lr": config.min_lr}
    return {name: rate * width if rule == "sgd" else rate / width for name, rate in rates.items() if rate is not None}


def _by_traits(entry: str, means: Callable[[_Traits], bool]) -> ParamKey:
    return ParamKey(predicate=ParamPredicate(name=f"mup {entry}", fn=lambda param: means(_traits_of(param))))


def _traits_of(param: Parameter) -> _Traits:
    return _Traits(
        num_dims=param.dim(),
        is_embedding=bool(getattr(param, "is_embedding_parameter", False)),
        is_embedding_or_output=bool(getattr(param, "is_embedding_or_output_parameter", False)),
        use_muon=bool(getattr(param, "use_muon", True)),
    )


def _by_name(entry: str, width: float, names: frozenset[str]) -> ParamKey:
    label = f"mup x{width:g} {entry}"
    return ParamKey(with_name_predicate=ParamWithNamePredicate(name=label, fn=lambda param, name: name in names))


def _scaled_entries(scale: _Scale, width: float) -> Iterator[str]:
    if width != 1:
        yield from (entry for entry, scaled in scale._asdict().items() if scaled)


def _width(meta: ParamMeta, base_shapes: Shapes, *, is_hidden: bool) -> float:
    """How many times as wide as its base a parameter is."""
    base = base_shapes.get(meta.id)
    if base is None or len(base) != len(meta.shape) or prod(base) == 0:
        raise ConfigError(
            f"parameter {str(meta.id)!r} of shape {meta.shape} has the base shape {base}: give base_shapes one of "
            f"{len(meta.shape)} dims, as shapes_of(base_model_chunks) does"
        )
    first = 1 if is_hidden else 0
    return prod(meta.shape[first:]) / prod(base[first:])


def _check_width(config: OptimizerConfig, width: float) -> None:
    if not width > 0:
        raise ConfigError(f"muP: the width is {width!r} times its base: it must be greater than 0")
    if config.lr is None:
        raise ConfigError("muP: lr=None: muP scales the learning rate; set it in the OptimizerConfig")


def _check_one_width(names: Mapping[tuple[str, float], set[str]]) -> None:
    """Keys go by names alone, so chunks that repeat a name must agree."""
    seen: dict[tuple[str, str], float] = {}
    for (entry, width), called in names.items():
        for name in called:
            if seen.setdefault((entry, name), width) != width:
                raise ConfigError(
                    f"muP: model chunks use the name {name!r} for parameters {seen[entry, name]:g} and {width:g} times "
                    "as wide as their base; make their overrides chunk by chunk"
                )
