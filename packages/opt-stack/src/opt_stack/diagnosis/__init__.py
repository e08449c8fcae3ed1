"""Find out why a run diverged: recordings, `why`, which reads them, and callbacks that write them elsewhere."""

from opt_stack.diagnosis.recorder import Recorder, SkippedStepWarning
from opt_stack.diagnosis.why import Diagnosis, why
from opt_stack.diagnosis.writers import JsonLines, TensorBoard, WeightsAndBiases

__all__ = ["Diagnosis", "JsonLines", "Recorder", "SkippedStepWarning", "TensorBoard", "WeightsAndBiases", "why"]
