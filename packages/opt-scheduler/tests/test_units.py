"""Units: amounts are converted without loss, and a run that changes its batch size sees the same values."""

from collections.abc import Callable

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from opt_scheduler import Batch, ScheduleError, Unit, cosine, rescale, rescale_horizon, stretch, warmup

LR = warmup(cosine(1.0, 0.1, steps=900), steps=100)


@pytest.mark.parametrize(
    ("amount", "unit", "to", "expected"),
    [
        (10, Unit.STEPS, Unit.SAMPLES, 2560),
        (10, Unit.STEPS, Unit.TOKENS, 10 * 256 * 2048),
        (2560, Unit.SAMPLES, Unit.STEPS, 10),
        (2048, Unit.TOKENS, Unit.SAMPLES, 1),
        (7, Unit.TOKENS, Unit.TOKENS, 7),
        (3, Unit.EPOCHS, Unit.SAMPLES, 3000),
        (3, Unit.EPOCHS, Unit.STEPS, 3000 / 256),
        (512, Unit.STEPS, Unit.EPOCHS, 512 * 256 / 1000),
        (3, Unit.EPOCHS, Unit.TOKENS, 3000 * 2048),
    ],
)
def test_amounts_are_converted(amount: float, unit: Unit, to: Unit, expected: float) -> None:
    assert Batch(samples=256, tokens_per_sample=2048, samples_per_epoch=1000).convert(amount, unit, to=to) == expected


@pytest.mark.needs_extra
@pytest.mark.parametrize("drop_last", [False, True])
@pytest.mark.parametrize(("samples", "batch"), [(20, 4), (21, 4), (3, 4), (4, 1)])
def test_epochs_have_the_steps_of_a_data_loader(samples: int, batch: int, drop_last: bool) -> None:
    data = pytest.importorskip("torch").utils.data
    loader = data.DataLoader(range(samples), batch_size=batch, drop_last=drop_last)
    assert Batch(samples=batch, samples_per_epoch=samples).epoch_steps(3, drop_last=drop_last) == 3 * len(loader)


def test_a_schedule_of_epochs_counts_steps() -> None:
    batch = Batch(samples=10, samples_per_epoch=50, tokens_per_sample=2)
    epochs = warmup(cosine(1.0, 0.0, steps=9), steps=1)
    in_steps = batch.in_steps(epochs, Unit.EPOCHS)
    assert in_steps.length == 50
    assert in_steps.values(range(60)) == pytest.approx([epochs(step / 5) for step in range(60)])
    assert batch.in_steps(stretch(epochs, 100), Unit.TOKENS).values(range(60)) == pytest.approx(
        in_steps.values(range(60))
    )


def test_whole_steps_never_see_less_than_requested() -> None:
    batch = Batch(samples=256)
    assert [batch.whole_steps(samples, Unit.SAMPLES) for samples in (0, 1, 256, 257)] == [0, 1, 1, 2]


@given(st.integers(0, 1000), st.integers(1, 64), st.integers(1, 64), st.integers(0, 1500))
@settings(max_examples=100, deadline=None)
def test_the_same_sample_has_the_same_value(done: int, old: int, new: int, more: int) -> None:
    samples = done * old + more * new
    # One division and one multiplication more than the direct way, where the curve is no steeper than 1 / 100 per step.
    assert rescale(LR, old_batch=old, new_batch=new, done=done)(done + more) == pytest.approx(
        stretch(LR, old)(samples), abs=1e-12
    )


def test_the_horizon_and_the_schedule_agree() -> None:
    changed = rescale(LR, old_batch=256, new_batch=512, done=200)
    assert changed.length == rescale_horizon(LR.length, old_batch=256, new_batch=512, done=200) == 600
    assert rescale_horizon(100, old_batch=1, new_batch=2, done=200) == 200


REFUSED: list[tuple[Callable[[], object], str]] = [
    (lambda: Batch(samples=0), "Batch: samples=0 must be more than 0"),
    (lambda: Batch(samples=1).convert(1, Unit.TOKENS, to=Unit.STEPS), "tokens can only be converted with tokens_per_"),
    (lambda: Batch(samples=1).convert(1, Unit.EPOCHS, to=Unit.STEPS), "epochs can only be converted with samples_per_"),
    (lambda: Batch(samples=1).epoch_steps(1), "Batch: epochs can only be converted with samples_per_epoch"),
    (lambda: rescale(LR, old_batch=1, new_batch=0), "rescale: new_batch=0 must be more than 0"),
    (lambda: rescale_horizon(1, old_batch=1, new_batch=1, done=-1), "rescale_horizon: done=-1 must be at least 0"),
]


def test_what_cannot_be_is_refused() -> None:
    for build, message in REFUSED:
        with pytest.raises(ScheduleError, match=message):
            build()
