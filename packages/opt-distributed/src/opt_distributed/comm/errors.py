"""Errors about process groups."""

from opt_config import ConfigError


class ProcessGroupError(ConfigError):
    """Process groups that are missing, unknown or contradictory."""
