"""With torch: tensors are filled in place, and the adapter is a true LRScheduler."""

import copy
import io
from typing import Any

import pytest

from opt_scheduler import FieldScheduler, OptimizerParamScheduler, ScheduleError, linear, one_cycle

torch = pytest.importorskip("torch")
from torch.optim import lr_scheduler as torch_schedulers  # noqa: E402

from opt_scheduler import as_lr_scheduler  # noqa: E402

pytestmark = pytest.mark.needs_extra


BASE: dict[str, Any] = {
    "init_lr": 0.0, "max_lr": 1.0, "min_lr": 0.1, "lr_warmup_steps": 10, "lr_decay_steps": 110,
    "lr_decay_style": "linear", "start_wd": 0.0, "end_wd": 0.2, "wd_incr_steps": 100, "wd_incr_style": "linear",
}  # fmt: skip


FALL = linear(1.0, 0.0, steps=4)


def adamw(lr: Any = 1.0, **more: Any) -> Any:
    parameters = [torch.zeros(2, requires_grad=True), torch.zeros(3, requires_grad=True)]
    return torch.optim.AdamW([{"params": [parameters[0]]}, {"params": [parameters[1]], "max_lr": 0.5}], lr=lr, **more)


def test_tensors_are_filled_in_place() -> None:
    # A captured graph or a compiled step reads from the address it saw first.
    optimizer = adamw(torch.tensor(1.0), weight_decay=0.0)
    for group in optimizer.param_groups:
        group["lr"], group["weight_decay"] = torch.tensor(1.0), torch.tensor(0.0)
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
}


@pytest.mark.parametrize(("act", "message"), REFUSED.values(), ids=REFUSED)
def test_what_the_adapter_cannot_do_is_refused(act: Any, message: str) -> None:
    with pytest.raises(ScheduleError, match=message):
        act(TestAdapter().build()[2])


def test_groups_of_torch_s_one_cycle_are_refused_when_built_and_at_a_step() -> None:
    early, late = adamw(), adamw()
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


def test_a_cycle_is_torchs_with_the_arguments_that_its_docstring_gives() -> None:
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

        ours, theirs = adamw(), adamw()
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
