"""A configuration as it was resolved: its fields and what they were understood to mean, as plain values."""

import dataclasses
from pathlib import Path

from opt_config.choices import LossScaling, Placement, Precision, Sharding
from opt_config.optimizer_config import OptimizerConfig


def load_config(path: str | Path, *, section: str = "") -> OptimizerConfig:
    """An `OptimizerConfig` from a JSON, TOML or YAML file; see `OptimizerConfig.load`. Raises `ConfigError`."""
    return OptimizerConfig.load(path, section=section)


def resolved(config: OptimizerConfig) -> dict[str, dict[str, object]]:
    """The fields of `config` and its four choices, ready for JSON: what `config_logger_dir` receives.

    >>> resolved(OptimizerConfig(bf16=True))["sharding"]
    {'is': 'Replicated'}
    """
    return {
        "config": config.to_dict(),
        "precision": _said(config.precision),
        "sharding": _said(config.sharding),
        "loss_scaling": _said(config.loss_scaling),
        "placement": _said(config.placement),
    }


def _said(choice: Precision | Sharding | LossScaling | Placement) -> dict[str, object]:
    values = {field.name: getattr(choice, field.name) for field in dataclasses.fields(choice)}
    plain = {name: value if isinstance(value, bool | int | float) else str(value) for name, value in values.items()}
    return {"is": type(choice).__name__, **plain}
