"""One step over a tuple of units, whatever their rules, layouts and numbers.

For packages that build a `Stepper`; `stepper` is the file to read first.
"""

from opt_distributed.step.group_guards import EqualGroups
from opt_distributed.step.guard import Guard, Refusal
from opt_distributed.step.guards import Guards
from opt_distributed.step.hooked import CutParams, CutRows
from opt_distributed.step.outcome import Outcome, Scaler, StepResult, scaler_of
from opt_distributed.step.spikes import Spikes
from opt_distributed.step.stepper import Stepper
from opt_distributed.step.unit import Unit
from opt_distributed.step.verdict import ABOVE_LIMIT, BAD_LOSS, OVERFLOW, SPIKE, Family, Limits, Report
from opt_distributed.step.watch import Watch, profiler_spans, timer_spans
from opt_distributed.step.written_replicas import NOTHING_WRITTEN, Written, WrittenReplicas

__all__ = [
    "ABOVE_LIMIT", "BAD_LOSS", "NOTHING_WRITTEN", "OVERFLOW", "SPIKE", "CutParams", "CutRows", "EqualGroups",
    "Family", "Guard", "Guards", "Limits", "Outcome", "Refusal", "Report", "Scaler", "Spikes", "StepResult",
    "Stepper", "Unit", "Watch", "Written", "WrittenReplicas", "profiler_spans", "scaler_of", "timer_spans",
]  # fmt: skip
