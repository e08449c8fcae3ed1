"""Command line of opt_config: check a configuration file."""

import argparse
import json
import sys
from collections.abc import Sequence

from opt_config.choices import resolved
from opt_config.errors import ConfigError
from opt_config.optimizer_config import load_config


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command. Return the exit status: 1 if the file cannot be read or holds an invalid configuration."""
    parser = argparse.ArgumentParser(prog="python -m opt_config", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    check = commands.add_parser("check", help="validate a file and print the resolved configuration as JSON")
    check.add_argument("path", help="a .json, .toml, .yaml or .yml file")
    check.add_argument("--section", default="", help="the table that holds the configuration, such as train.optimizer")
    options = parser.parse_args(arguments)
    try:
        config = load_config(options.path, section=options.section)
        print(json.dumps(resolved(config), indent=2))
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
