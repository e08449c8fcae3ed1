"""Find out why a run diverged: recordings, `why`, which reads them, and callbacks that write them elsewhere."""

from opt_stack.diagnosis.history import History
from opt_stack.diagnosis.lines import JsonLines, TensorBoard, WeightsAndBiases
from opt_stack.diagnosis.recorder import Recorder, SkippedStepWarning
from opt_stack.diagnosis.why import Diagnosis, find, why

__all__ = [
    "Diagnosis",
    "History",
    "JsonLines",
    "Recorder",
    "SkippedStepWarning",
    "TensorBoard",
    "WeightsAndBiases",
    "find",
    "why",
]
