"""python -m opt_config: `check` a configuration file, or print the page of all `fields`."""

import argparse
import json
import sys
from collections.abc import Sequence

from opt_config.errors import ConfigError
from opt_config.fields import fields_page
from opt_config.resolved import load_config, resolved


def main(arguments: Sequence[str] | None = None) -> int:
    """Run one command; the exit status is 1 where a file holds no sound configuration."""
    parser = argparse.ArgumentParser(prog="python -m opt_config", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    commands.add_parser("fields", help="print every field, where it is read and the test that shows it, as markdown")
    check = commands.add_parser("check", help="read a file, check it and print what it means, as JSON")
    check.add_argument("path", help="a .json, .toml, .yaml or .yml file")
    check.add_argument("--section", default="", help="the table that holds the configuration, such as train.optimizer")
    options = parser.parse_args(arguments)
    if options.command == "fields":
        print(fields_page(), end="")
        return 0
    return _check(options.path, options.section)


def _check(path: str, section: str) -> int:
    try:
        config = load_config(path, section=section)
    except (ConfigError, OSError) as error:
        print(error, file=sys.stderr)
        return 1
    print(json.dumps(resolved(config), indent=2))
    return 0


if __name__ == "__main__":
    sys.exit(main())
