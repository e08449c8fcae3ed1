"""One step over a tuple of units, whatever their rules, layouts and numbers.

For packages that build a `Stepper`; `stepper` is the file to read first.
"""

from opt_distributed.step.guards.groups import CHOICES
from opt_distributed.step.guards.guard import Refusal
from opt_distributed.step.guards.written_replicas import WrittenReplicas
from opt_distributed.step.hooked import CutParams, CutRows
from opt_distributed.step.scaler import Scaler, scaler_of
from opt_distributed.step.spans import profiler_spans, timer_spans
from opt_distributed.step.stats import Family
from opt_distributed.step.stepper import Stepper
from opt_distributed.step.tensor_stats import Recorded, StepStats, TensorStats, TensorSums
from opt_distributed.step.unit import Unit, read_hyper
from opt_distributed.step.verdict import Limits, Outcome, StepResult

__all__ = [
    "CHOICES", "CutParams", "CutRows", "Family", "Limits", "Outcome", "Recorded", "Refusal", "Scaler", "StepResult",
    "StepStats", "Stepper", "TensorStats", "TensorSums", "Unit", "WrittenReplicas", "profiler_spans", "read_hyper",
    "scaler_of", "timer_spans",
]  # fmt: skip
