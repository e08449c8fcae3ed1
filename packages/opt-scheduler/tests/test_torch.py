"""With torch: tensors are filled in place, and the adapter is a true LRScheduler."""

import copy
import io
from typing import Any

import pytest

from opt_scheduler import (
    FieldScheduler,
    OptimizerParamScheduler,
    Plateau,
    ScheduleError,
    cosine,
    linear,
    one_cycle,
    warmup,
)

torch = pytest.importorskip("torch")
from torch.optim import lr_scheduler as torch_schedulers  # noqa: E402

from opt_scheduler import as_lr_scheduler  # noqa: E402

pytestmark = pytest.mark.needs_extra


BASE: dict[str, Any] = {
    "init_lr": 0.0,
    "max_lr": 1.0,
    "min_lr": 0.1,
    "lr_warmup_steps": 10,
    "lr_decay_steps": 110,
    "lr_decay_style": "linear",
    "start_wd": 0.0,
    "end_wd": 0.2,
    "wd_incr_steps": 100,
    "wd_incr_style": "linear",
}


FALL = linear(1.0, 0.0, steps=4)


def adamw(lr: Any = 1.0, **more: Any) -> Any:
    parameters = [torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)]
    return torch.optim.AdamW([{"params": [parameters[0]]}, {"params": [parameters[1]], "max_lr": 0.5}], lr=lr, **more)


def test_tensors_are_filled_in_place() -> None:
    # A captured graph or a compiled step reads from the address it saw first.
    optimizer = adamw(torch.tensor(1.0), weight_decay=0.0)
    for group in optimizer.param_groups:
        group["lr"] = torch.tensor(1.0)
        group["weight_decay"] = torch.tensor(0.0)
        group["betas"] = (torch.tensor(0.9), 0.99)
    before = [(group["lr"], group["weight_decay"], group["betas"][0]) for group in optimizer.param_groups]
    OptimizerParamScheduler(optimizer, **BASE).step(60)
    FieldScheduler(optimizer, {"betas[0]": linear(0.9, 0.8, steps=10)}).step(5)
    for group, tensors in zip(optimizer.param_groups, before, strict=True):
        assert group["lr"] is tensors[0]
        assert group["weight_decay"] is tensors[1]
        assert group["betas"][0] is tensors[2]
        # float32 holds 24 bits
        assert [float(t) for t in tensors[1:]] == pytest.approx([0.12, 0.85], rel=2**-23)
    assert [float(group["lr"]) for group in optimizer.param_groups] == pytest.approx([0.55, 0.3], rel=2**-23)


def test_groups_that_share_one_lr_tensor_get_their_own() -> None:
    # torch hands the tensor passed as lr to every group; filled in place, the last group's value was everybody's.
    optimizer = adamw(torch.tensor(1.0), foreach=False)
    assert optimizer.param_groups[0]["lr"] is optimizer.param_groups[1]["lr"]
    first = optimizer.param_groups[0]["lr"]
    scheduler = OptimizerParamScheduler(optimizer, **BASE)
    scheduler.step(10)
    second = optimizer.param_groups[1]["lr"]
    assert [float(group["lr"]) for group in optimizer.param_groups] == [1.0, 0.5]
    scheduler.step(1)
    assert optimizer.param_groups[0]["lr"] is first
    assert optimizer.param_groups[1]["lr"] is second


class TestAdapter:
    def build(self, increment: float = 1) -> tuple[Any, OptimizerParamScheduler, Any]:
        optimizer = adamw()
        scheduler = OptimizerParamScheduler(optimizer, **BASE)
        return optimizer, scheduler, as_lr_scheduler(scheduler, increment=increment)

    @pytest.mark.filterwarnings("error::UserWarning")
    def test_it_steps_the_scheduler_inside(self) -> None:
        optimizer, scheduler, adapter = self.build(increment=5)
        assert isinstance(adapter, torch_schedulers.LRScheduler)
        assert (scheduler.num_steps, adapter.last_epoch) == (0, 0)
        optimizer.step()
        adapter.step()
        assert (scheduler.num_steps, adapter.last_epoch) == (5, 1)
        assert adapter.get_last_lr() == [group["lr"] for group in optimizer.param_groups] == [0.5, 0.25]
        assert optimizer.param_groups[0]["weight_decay"] == pytest.approx(0.01)
        assert adapter.base_lrs == [1.0, 0.5]

    def test_torch_still_warns_where_the_order_is_wrong(self) -> None:
        adapter = self.build()[2]
        with pytest.warns(UserWarning, match=r"before `optimizer.step\(\)`"):
            adapter.step()

    def test_its_state_survives_a_safe_load_and_sets(self) -> None:
        optimizer, _, adapter = self.build()
        for _ in range(7):
            optimizer.step()
            adapter.step()
        file = io.BytesIO()
        torch.save(adapter.state_dict(), file)
        file.seek(0)
        state = torch.load(file, weights_only=True)
        resumed_optimizer, resumed_scheduler, resumed = self.build()
        for _ in range(2):
            resumed.load_state_dict(copy.deepcopy(state))
        assert (resumed_scheduler.num_steps, resumed.last_epoch) == (7, 7)
        assert [g["lr"] for g in resumed_optimizer.param_groups] == [g["lr"] for g in optimizer.param_groups]


REFUSED: dict[str, tuple[Any, str]] = {
    "another state": (lambda a: a.load_state_dict({"last_epoch": 3}), r"lacks \['scheduler', 'step_count'\]; it has"),
    "an epoch": (lambda a: a.step(3), r"epoch=3 is not supported; use scheduler\.seek"),
    "several": (lambda a: as_lr_scheduler(OptimizerParamScheduler([adamw()], **BASE)), "needs a torch.*, not list"),
    "several, in one call": (lambda a: as_lr_scheduler([adamw(), adamw()], FALL), "Optimizer, not list"),
    "no increment": (lambda a: as_lr_scheduler(a.scheduler, increment=0), "increment=0 must be positive"),
    "swapped": (lambda a: as_lr_scheduler(FALL, adamw()), "needs a torch.optim.Optimizer, not Ramp"),
    "no schedule": (lambda a: as_lr_scheduler(adamw()), "must be an optimizer followed by a schedule"),
    "nothing": (lambda a: as_lr_scheduler(None), "must be an optimizer followed by a schedule"),
    "only a schedule": (lambda a: as_lr_scheduler(FALL), "must be an optimizer followed by a schedule"),
    "two sets": (lambda a: as_lr_scheduler(a.scheduler, 1.0), "must be an optimizer followed by a schedule"),
    "relative, too late": (lambda a: as_lr_scheduler(a.scheduler, relative=True), "relative=True: give it to Field"),
}


@pytest.mark.parametrize(("act", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_adapter_cannot_do_is_refused(act: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        act(TestAdapter().build()[2])


def test_a_scale_that_it_does_not_read_is_refused() -> None:
    """Symptom: the layer decay that timm stores as `lr_scale` was lost without a word."""
    optimizer = adamw()
    optimizer.param_groups[0]["lr_scale"] = 1.0
    OptimizerParamScheduler(optimizer, **BASE)
    optimizer.param_groups[-1]["lr_scale"] = 0.1
    with pytest.raises(ScheduleError, match=r"has lr_scale=0\.1, which OptimizerParamScheduler does not read"):
        OptimizerParamScheduler(optimizer, **BASE)


def test_groups_with_bounds_of_one_cycle_lr_are_refused() -> None:
    early = adamw()
    late = adamw()
    scheduler = OptimizerParamScheduler(late, **BASE)
    for optimizer in (early, late):
        torch_schedulers.OneCycleLR(optimizer, max_lr=1.0, total_steps=100)
    message = "as torch's OneCycleLR leaves them: two schedulers would write one lr"
    with pytest.raises(ScheduleError, match=message):
        OptimizerParamScheduler(early, **BASE)
    with pytest.raises(ScheduleError, match=message):
        scheduler.step()
    FieldScheduler(late, {"lr": linear(0.3, 0.0, steps=10)})  # does not read those keys
    assert late.param_groups[0]["lr"] == 0.3
    for group in early.param_groups:  # what the message says
        for key in ("max_lr", "min_lr", "initial_lr"):
            del group[key]
    OptimizerParamScheduler(early, **BASE).step(10)
    assert early.param_groups[0]["lr"] == 1.0


def test_one_cycle_equals_torch_with_the_documented_arguments() -> None:
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0, momentum=0.9)
    theirs = torch_schedulers.OneCycleLR(optimizer, max_lr=1.0, total_steps=50, pct_start=0.3)
    ours = one_cycle(1.0, up_steps=0.3 * 50 - 1, down_steps=0.7 * 50, end=1.0 / 25 / 1e4)
    for step in range(49):
        assert optimizer.param_groups[0]["lr"] == pytest.approx(ours(step), rel=1e-12)
        optimizer.step()
        theirs.step()


class TestOneCall:
    def test_relative_equals_torch_s_lambda(self) -> None:
        def half_life(step: float) -> float:
            return float(0.5 ** (step / 3))

        ours = adamw()
        theirs = adamw()
        for optimizer in (ours, theirs):
            optimizer.param_groups[1]["lr"] = 0.1  # a layer decay
        pair: Any = as_lr_scheduler(ours, half_life, relative=True), torch_schedulers.LambdaLR(theirs, half_life)
        for _ in range(9):
            for optimizer, scheduler in zip((ours, theirs), pair, strict=True):
                optimizer.step()
                scheduler.step()
            assert [group["lr"] for group in ours.param_groups] == [group["lr"] for group in theirs.param_groups]
        assert pair[0].base_lrs == pair[1].base_lrs == [1.0, 0.1]

    @pytest.mark.parametrize("relative", [False, True])
    def test_a_layer_decay_in_lr_scale_is_applied_once(self, relative: bool) -> None:
        # torch's initial_lr is the adapter's base_lrs: with the factor in it, a relative schedule applied it twice.
        optimizer = adamw()
        optimizer.param_groups[1]["lr_scale"] = 0.25
        adapter = as_lr_scheduler(optimizer, FALL, relative=relative)
        for left in (0.75, 0.5):
            optimizer.step()
            adapter.step()
            assert adapter.get_last_lr() == [left, left / 4]
        state = adapter.state_dict()
        resumed = as_lr_scheduler(optimizer, FALL, relative=relative)
        resumed.load_state_dict(state)
        assert resumed.get_last_lr() == [0.5, 0.125]


# --- as parts of torch's composed schedulers, against torch's LambdaLR with the same curves -------------------------

STEPS = 12
RISE = linear(0.0, 1.0, steps=4)
WAVE = cosine(1.0, 0.1, steps=6)
DOWN = linear(0.8, 0.2, steps=8)
MEGATRON = {**BASE, "lr_warmup_steps": 3, "lr_decay_steps": 9}


def by_us(optimizer: Any, curve: Any) -> Any:
    return as_lr_scheduler(optimizer, {"lr": curve, "weight_decay": curve * 0.1})


def by_torch(optimizer: Any, curve: Any) -> Any:
    return torch_schedulers.LambdaLR(optimizer, lambda step: curve(step))


def megatron(optimizer: Any, part: Any) -> Any:
    scheduler = OptimizerParamScheduler(adamw() if part is by_torch else optimizer, **MEGATRON)
    if part is by_torch:
        curves = [scheduler.lr_schedule(group) for group in GROUPS]
        return torch_schedulers.LambdaLR(optimizer, [lambda step, curve=curve: curve(step) for curve in curves])
    return as_lr_scheduler(scheduler)


GROUPS: tuple[dict[str, Any], ...] = ({}, {"max_lr": 0.5})
sequential = torch_schedulers.SequentialLR
chained = torch_schedulers.ChainedScheduler
constant_lr = torch_schedulers.ConstantLR
exponential_lr = torch_schedulers.ExponentialLR
linear_lr = torch_schedulers.LinearLR
COMPOSED: dict[str, Any] = {
    "two of ours": lambda o, part: sequential(o, [part(o, RISE), part(o, WAVE)], [4]),
    "three of ours": lambda o, part: sequential(o, [part(o, RISE), part(o, WAVE), part(o, DOWN)], [3, 7]),
    "nested": lambda o, part: sequential(o, [sequential(o, [part(o, RISE), part(o, WAVE)], [2]), part(o, DOWN)], [6]),
    "after LinearLR": lambda o, part: sequential(o, [linear_lr(o, 0.1, total_iters=4), part(o, WAVE)], [4]),
    "before LambdaLR": lambda o, part: sequential(o, [part(o, RISE), by_torch(o, WAVE)], [4]),
    "before ConstantLR": lambda o, part: sequential(o, [part(o, RISE), constant_lr(o, 0.5, total_iters=2)], [4]),
    "before ExponentialLR": lambda o, part: sequential(o, [part(o, RISE), exponential_lr(o, 0.5)], [4]),
    "before ExponentialLR in a chain": lambda o, part: chained([part(o, WAVE), exponential_lr(o, 0.5)]),
    "after ExponentialLR in a chain": lambda o, part: chained([exponential_lr(o, 0.5), part(o, WAVE)]),
    "Megatron's, before ours": lambda o, part: sequential(o, [megatron(o, part), part(o, DOWN)], [5]),
    "ours, before Megatron's": lambda o, part: sequential(o, [part(o, RISE), megatron(o, part)], [5]),
}


def rates(optimizer: Any) -> list[float]:
    return [group["lr"] for group in optimizer.param_groups]


def run(name: str, part: Any, *, resumed_at: int | None = None) -> list[list[float]]:
    """The rates before each step, with fresh objects from step `resumed_at` on."""
    optimizer = adamw()
    scheduler = COMPOSED[name](optimizer, part)
    found = [rates(optimizer)]
    for step in range(STEPS):
        if step == resumed_at:
            states = copy.deepcopy((optimizer.state_dict(), scheduler.state_dict()))
            optimizer = adamw()
            scheduler = COMPOSED[name](optimizer, part)
            optimizer.load_state_dict(states[0])
            scheduler.load_state_dict(states[1])
            assert rates(optimizer) == found[-1]
        optimizer.step()
        scheduler.step()
        found.append(rates(optimizer))
    return found


@pytest.mark.parametrize("name", COMPOSED)
def test_a_part_of_a_composition_writes_what_lambda_writes(name: str) -> None:
    """In the first update and at milestones the rates were stale, and after our warmup torch's rates were 0."""
    expected = run(name, by_torch)
    found = run(name, by_us)
    for step, wanted in enumerate(expected):
        assert found[step] == pytest.approx(wanted, rel=1e-12), step
    for step in range(STEPS):
        assert run(name, by_us, resumed_at=step) == found, step


def test_all_fields_are_those_of_the_part_that_runs() -> None:
    optimizer = adamw()
    scheduler = COMPOSED["two of ours"](optimizer, by_us)
    for step in range(STEPS):
        running = RISE(step) if step < 4 else WAVE(step - 4)
        assert [group["weight_decay"] for group in optimizer.param_groups] == [running * 0.1] * 2
        optimizer.step()
        scheduler.step()


def test_the_base_of_later_schedulers_is_the_peak_of_ours() -> None:
    def callable_rise(step: float) -> float:
        return step / 4

    for schedule, peak in (
        (warmup(WAVE * 0.3, steps=4), 0.3),
        (one_cycle(2.0, up_steps=3, down_steps=9), 2.0),
        (callable_rise, 1.0),
    ):
        optimizer = adamw()
        for group in optimizer.param_groups:
            group["initial_lr"] = 0.0  # as older versions saved it
        as_lr_scheduler(optimizer, schedule)
        assert [group["initial_lr"] for group in optimizer.param_groups] == pytest.approx([peak] * 2)
        later = torch_schedulers.LambdaLR(optimizer, lambda step: 0.5**step)
        optimizer.step()
        later.step()
        assert rates(optimizer) == pytest.approx([peak / 2] * 2)


def test_a_plateau_cannot_be_a_part_of_a_sequence() -> None:
    optimizer = adamw()
    parts = [as_lr_scheduler(Plateau(FieldScheduler(optimizer, RISE))), by_us(optimizer, WAVE)]
    with pytest.raises(ScheduleError, match=r"a Plateau cannot be a part of torch's SequentialLR.*opt_scheduler\.join"):
        sequential(optimizer, parts, [4])


@pytest.mark.parametrize("is_resumed", [False, True])
def test_a_higher_peak_is_not_taken_for_that_of_one_cycle_lr(is_resumed: bool) -> None:
    """The adapter's own `initial_lr` of before lay between the bounds."""
    flags = {"use_checkpoint_opt_param_scheduler": False, "override_opt_param_scheduler": True}

    def built(max_lr: float) -> Any:
        optimizer = adamw()
        optimizer.param_groups[0] |= {"max_lr": max_lr, "min_lr": 0.1}
        return optimizer, as_lr_scheduler(OptimizerParamScheduler(optimizer, **BASE | flags | {"max_lr": max_lr}))

    optimizer, adapter = built(1.0)
    adapter.step()
    if is_resumed:
        before = optimizer, adapter
        optimizer, adapter = built(2.0)
        optimizer.load_state_dict(before[0].state_dict())
        adapter.load_state_dict(before[1].state_dict())
    else:
        optimizer.param_groups[0]["max_lr"] = 2.0
    for _ in range(20):
        adapter.step()
    assert optimizer.param_groups[0]["initial_lr"] == 2.0
    optimizer.add_param_group({"params": [torch.nn.Parameter(torch.ones(2))]})
    adapter.step()


def test_an_initial_lr_of_another_scheduler_is_left_alone() -> None:
    optimizer = adamw()
    own = as_lr_scheduler(FieldScheduler(optimizer, linear(0.3, 0.0, steps=10)))
    cycle = torch_schedulers.OneCycleLR(optimizer, max_lr=1.0, total_steps=100)
    initial = optimizer.param_groups[0]["initial_lr"]
    torch_schedulers.SequentialLR(optimizer, [own, cycle], milestones=[3])
    own.step()
    assert optimizer.param_groups[0]["initial_lr"] == initial
