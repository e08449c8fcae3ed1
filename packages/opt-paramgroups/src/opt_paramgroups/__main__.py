"""Command line of opt_paramgroups: print the parameter groups of a model before it is trained."""

import argparse
import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module

from opt_config import MATRIX_RULES, ConfigError, OptimizerConfig, load_config
from opt_paramgroups.groups import get_param_groups
from opt_paramgroups.meta import model_chunks_of
from opt_paramgroups.overrides import (
    Overrides,
    get_matrix_rule_overrides,
    get_standard_config_overrides,
)
from opt_paramgroups.table import GroupRow, as_json, as_markdown, as_rich, as_text, group_rows

FORMATS: Mapping[str, Callable[[Sequence[GroupRow]], str]] = {"text": as_text, "markdown": as_markdown, "json": as_json}


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit status: 1 if the model or the configuration cannot be loaded."""
    parser = argparse.ArgumentParser(prog="python -m opt_paramgroups", description=__doc__)
    table = parser.add_subparsers(dest="command", required=True).add_parser("table", help="print the group table")
    table.add_argument("model", metavar="module:factory", help="a callable that returns a module, or a list of chunks")
    table.add_argument("--config", help="an OptimizerConfig as a .json, .toml or .yaml file")
    table.add_argument("--section", default="", help="the table of that file that holds the configuration")
    table.add_argument("--format", choices=[*FORMATS, "rich"], default="text")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.config, section=options.section) if options.config else OptimizerConfig()
        rows = group_rows(get_param_groups(model_chunks_of(options.model), config, usual_overrides(config)))
        show(rows, options.format)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


def usual_overrides(config: OptimizerConfig) -> Overrides:
    """Return the standard overrides and, for a matrix rule, the overrides of parameters that it does not update."""
    matrices = get_matrix_rule_overrides(config) if config.optimizer in MATRIX_RULES else {}
    return {**get_standard_config_overrides(config), **matrices}


def show(rows: Sequence[GroupRow], form: str) -> None:
    """Print a table. Raises `ConfigError` if `rich` is requested but not installed."""
    if form != "rich":
        print(FORMATS[form](rows))
        return
    try:
        import_module("rich.console").Console().print(as_rich(rows))
    except ImportError as error:
        raise ConfigError("the rich table needs the package rich: python -m pip install rich") from error


if __name__ == "__main__":
    sys.exit(main())
