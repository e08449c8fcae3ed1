"""Learning-rate and weight-decay schedules as pure functions of the step."""

__version__ = "0.1.0"
