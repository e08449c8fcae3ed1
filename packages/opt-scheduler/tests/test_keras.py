"""The Keras callback: every update of `fit` uses the value of the schedule at its step, also after a restart."""

from typing import Any

import pytest

from opt_scheduler import ScheduleError, linear

pytestmark = pytest.mark.needs_extra
keras = pytest.importorskip("keras")
np = pytest.importorskip("numpy")

from opt_scheduler import as_keras_callback  # noqa: E402


def model() -> Any:
    """One weight whose gradient is -1, so that every update adds the learning rate to it."""
    weight = keras.layers.Dense(1, use_bias=False, kernel_initializer="zeros")
    built = keras.Sequential([keras.Input((1,)), weight])
    built.compile(optimizer=keras.optimizers.SGD(1.0), loss=lambda target, output: -output)
    return built


def fit(built: Any, updates: int, schedule: Any) -> float:
    data = np.ones((updates, 1))
    built.fit(data, data, batch_size=1, epochs=1, verbose=0, callbacks=[as_keras_callback(schedule)])
    return float(np.asarray(built.get_weights()[0]).item())


def test_each_update_uses_the_value_at_its_step() -> None:
    schedule = linear(1.0, 0.0, steps=8)
    built = model()
    # In float32; the sums are exact.
    assert fit(built, 5, schedule) == sum(schedule.values(range(5)))
    assert float(built.optimizer.learning_rate) == schedule(4)
    assert fit(built, 2, schedule) == sum(schedule.values(range(7)))  # a second `fit` goes on at step 5


def test_it_takes_callables_and_refuses_others() -> None:
    assert fit(model(), 3, lambda step: 0.25 * step) == 0.75
    with pytest.raises(ScheduleError, match="must be a Schedule, a number, or a callable"):
        as_keras_callback("cosine")
