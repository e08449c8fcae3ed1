"""The resolved configuration as plain values: every field, and the typed choices that follow from them."""

import dataclasses
from pathlib import Path

from opt_config.choices import LossScaling, Placement, Precision, Sharding
from opt_config.optimizer_config import OptimizerConfig


def load_config(path: str | Path, *, section: str = "") -> OptimizerConfig:
    """An `OptimizerConfig` from a JSON, TOML or YAML file; see `OptimizerConfig.load`. Raises `ConfigError`."""
    return OptimizerConfig.load(path, section=section)


def resolved(config: OptimizerConfig) -> dict[str, dict[str, object]]:
    """The fields of `config` and its four typed choices as JSON values, as written to `config_logger_dir`.

    >>> resolved(OptimizerConfig(bf16=True))["sharding"]
    {'is': 'Replicated'}
    """
    choices = ("precision", "sharding", "loss_scaling", "placement")
    return {"config": config.to_dict(), **{name: _plain_choice(getattr(config, name)) for name in choices}}


def _plain_choice(choice: Precision | Sharding | LossScaling | Placement) -> dict[str, object]:
    values = {field.name: getattr(choice, field.name) for field in dataclasses.fields(choice)}
    plain = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in values.items()}
    return {"is": type(choice).__name__, **plain}
