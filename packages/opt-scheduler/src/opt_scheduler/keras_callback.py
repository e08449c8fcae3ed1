"""The adapter to Keras 3: a callback that sets the learning rate of the optimizer before every batch.

The only module that imports Keras.
"""

from typing import Any

from keras.callbacks import Callback

from .schedule import ScheduleLike, as_schedule


class _KerasCallback(Callback):  # type: ignore[misc, unused-ignore]
    def __init__(self, schedule: ScheduleLike) -> None:
        super().__init__()
        self.schedule = as_schedule(schedule)

    def on_train_batch_begin(self, batch: int, logs: Any = None) -> None:
        if hasattr(self.model, "jax_state_sync"):  # on JAX, the variables are stale while `fit` runs
            self.model.jax_state_sync()
        optimizer = self.model.optimizer
        optimizer.learning_rate = self.schedule(int(optimizer.iterations))


def as_keras_callback(schedule: ScheduleLike) -> Callback:
    """Return a callback for Keras's `fit` that gives `optimizer.learning_rate` the value of `schedule` at every update.

    The step is the number of updates that the optimizer has done (`optimizer.iterations`), which Keras saves and
    restores, so a resumed run goes on along the schedule. With `steps_per_execution=n` the value changes every n
    updates. On the JAX backend the callback copies Keras's state before every batch; there,
    a `keras.optimizers.schedules.LearningRateSchedule` whose `__call__` returns `schedule(step)` is faster.

    Raises:
        ScheduleError: `schedule` is not a schedule, a number or a callable of the step.
    """
    return _KerasCallback(schedule)
