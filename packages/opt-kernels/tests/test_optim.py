"""The drop-in optimizers: torch's behaviour, torch's state_dict, and what they add."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opt_kernels import optim
from opt_kernels.optim.param_rows import scaling_of

pytestmark = pytest.mark.usefixtures("poisoned")

Build = Callable[..., torch.optim.Optimizer]
OURS: Mapping[str, Build] = {
    "Adam": lambda p, **o: optim.Adam(p, lr=1e-2, weight_decay=0.1, **o),
    "AdamW": lambda p, **o: optim.AdamW(p, lr=1e-2, weight_decay=0.1, **o),
    "SGD": lambda p, **o: optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1, **o),
    "SGD without momentum": lambda p, **o: optim.SGD(p, lr=1e-2, **o),
    "Lion": lambda p, **o: optim.Lion(p, lr=1e-3, weight_decay=0.1, **o),
}
THEIRS: Mapping[str, Build] = {
    "Adam": lambda p: torch.optim.Adam(p, lr=1e-2, weight_decay=0.1),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1),
    "SGD": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, nesterov=True, weight_decay=0.1),
    "SGD without momentum": lambda p: torch.optim.SGD(p, lr=1e-2),
}
ON_OURS = pytest.mark.parametrize("build", OURS.values(), ids=OURS.keys())


def network(dtype: torch.dtype = torch.float32) -> nn.Module:
    """A small network, always the same, one of its parameters transposed and one unused."""
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(7, 13), nn.Tanh(), nn.Linear(13, 3))
    net.register_parameter("unused", nn.Parameter(torch.ones(3)))
    first = net[0]
    assert isinstance(first, nn.Linear)
    first.weight = nn.Parameter(first.weight.detach().t().contiguous().t())
    return net.to(dtype)


def weight_of(net: nn.Module) -> nn.Parameter:
    """The first layer's weight."""
    assert isinstance(net, nn.Sequential)
    weight = net[0].weight
    assert isinstance(weight, nn.Parameter)
    return weight


def train(net: nn.Module, optimizer: torch.optim.Optimizer, steps: int, first: int = 0) -> list[Tensor]:
    """The parameters after so many steps on inputs that depend on the step's number."""
    dtype = next(net.parameters()).dtype
    for step in range(first, first + steps):
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(step)).to(dtype)
        optimizer.zero_grad()
        net(x).float().square().mean().backward()
        optimizer.step()
    return [param.detach().clone() for param in net.parameters()]


def assert_same(one: list[Tensor], other: list[Tensor]) -> None:
    assert all(torch.equal(a, b) for a, b in zip(one, other, strict=True))


@pytest.mark.parametrize("name", THEIRS)
def test_it_takes_torchs_steps(name: str) -> None:
    ours, theirs = network(), network()
    one = train(ours, OURS[name](ours.parameters()), 5)
    other = train(theirs, THEIRS[name](theirs.parameters()), 5)
    for a, b in zip(one, other, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


NARROW = {
    "bf16": (torch.bfloat16, torch.bfloat16),
    "fp16": (torch.float16, torch.float16),
    "fp8": (torch.float8_e4m3fn, torch.float8_e4m3fn),
    "e5m2": (torch.float8_e5m2, torch.float8_e5m2),
    "8 bit": (torch.int8, torch.uint8),
}


@pytest.mark.parametrize(("first", "second"), NARROW.values(), ids=NARROW.keys())
def test_narrow_states_are_saved_in_plain_numbers(first: torch.dtype, second: torch.dtype) -> None:
    options = {"mains": "remainder", "exp_avg_dtype": first, "exp_avg_sq_dtype": second}
    net = network(torch.bfloat16)
    optimizer = optim.AdamW(net.parameters(), **options)  # type: ignore[arg-type]
    train(net, optimizer, 3)
    saved = optimizer.state_dict()["state"][1]
    assert set(saved) == {"step", "exp_avg", "exp_avg_sq", "main"}
    assert saved["exp_avg"].dtype in (torch.float32, torch.bfloat16)
    # Another optimizer, with other numbers, loads them: the parameters become the mains, rounded.
    wide_net = network(torch.bfloat16)
    wide = optim.AdamW(wide_net.parameters(), mains="float32")
    wide.load_state_dict(optimizer.state_dict())
    used = weight_of(net), weight_of(wide_net)
    assert torch.equal(used[0], used[1])
    assert torch.equal(wide.state[used[1]]["main"], saved["main"])
    assert torch.equal(wide.state[used[1]]["exp_avg"], saved["exp_avg"].float())


def test_states_keep_their_dtype_when_loaded_with_narrow_parameters() -> None:
    net = network(torch.bfloat16)
    optimizer = optim.AdamW(net.parameters())
    train(net, optimizer, 1)
    optimizer.load_state_dict(optimizer.state_dict())
    state = optimizer.state[weight_of(net)]
    assert {name: tensor.dtype for name, tensor in state.items()} == dict.fromkeys(state, torch.float32)


@pytest.mark.parametrize("mains", ["float32", "remainder"])
def test_a_main_keeps_what_a_bfloat16_parameter_rounds_away(mains: str) -> None:
    def param() -> nn.Parameter:
        return nn.Parameter(torch.ones(4, dtype=torch.bfloat16))

    kept, lost = param(), param()
    optimizers = optim.AdamW([kept], lr=1e-4, weight_decay=0, mains=mains), optim.AdamW([lost], lr=1e-4, weight_decay=0)
    for _ in range(100):
        kept.grad = lost.grad = torch.ones(4, dtype=torch.bfloat16)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(lost, torch.ones(4))
    assert torch.equal(kept, torch.tensor(0.99).bfloat16().expand(4))


@ON_OURS
def test_clipping_within_the_update_is_clip_grad_norm(build: Build) -> None:
    clipped, plain = network(), network()
    one, other = build(clipped.parameters(), max_norm=0.05), build(plain.parameters())
    assert isinstance(one, optim.RuleOptimizer)
    for step in range(3):
        x = torch.randn(5, 7, generator=torch.Generator().manual_seed(step))
        for net in (clipped, plain):
            net.zero_grad()
            net(x).square().mean().backward()
        before = [param.grad.clone() for param in clipped.parameters() if param.grad is not None]
        norm = nn.utils.clip_grad_norm_(plain.parameters(), 0.05)
        one.step()
        other.step()
        assert one.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert_same(before, [param.grad for param in clipped.parameters() if param.grad is not None])
    for a, b in zip(clipped.parameters(), plain.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_tiny_gradients_are_clipped_as_torch_clips_them() -> None:
    # torch divides by the norm + 1e-6, which norms of this size show.
    param, plain = nn.Parameter(torch.zeros(4)), nn.Parameter(torch.zeros(4))
    param.grad, plain.grad = torch.full((4,), 1e-6), torch.full((4,), 1e-6)
    scale, _, _ = scaling_of([param], found_inf=None, loss_scale=None, max_norm=1e-6)
    nn.utils.clip_grad_norm_([plain], 1e-6)
    optim.SGD([param], lr=1.0, max_norm=1e-6).step()
    assert plain.grad is not None
    torch.testing.assert_close(param.detach(), -plain.grad, rtol=1e-5, atol=0)
    assert float(scale) == pytest.approx(1 / 3, rel=1e-4)  # with capturable=True


def test_an_overflow_that_the_scaler_found_skips_a_clipped_step() -> None:
    # The local gradient is finite: `found_inf` may come from another optimizer or rank.
    param = nn.Parameter(torch.ones(4))
    optimizer = optim.AdamW([param], max_norm=1.0)
    param.grad = torch.ones(4)
    for found in (1.0, 0.0):
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(found), torch.ones(())  # type: ignore[attr-defined]
        _, skip, _ = scaling_of([param], found_inf=torch.tensor([found]), loss_scale=None, max_norm=1.0)
        assert skip is not None
        assert bool(skip) is bool(found)  # with capturable=True
        optimizer.step()
        assert torch.equal(param.detach(), torch.ones(4)) is bool(found)


def test_with_max_norm_a_step_that_is_not_finite_changes_nothing() -> None:
    net = network()
    optimizer = optim.AdamW(net.parameters(), max_norm=1.0)
    before = train(net, optimizer, 1)
    state = copy.deepcopy(optimizer.state_dict())
    gradient = weight_of(net).grad
    assert gradient is not None
    gradient[0, 0] = torch.nan
    optimizer.step()
    assert_same(before, list(net.parameters()))
    assert str(optimizer.state_dict()) == str(state)
    assert optimizer.grad_norm is not None
    assert not optimizer.grad_norm < float("inf")


def test_the_grad_scaler_folds_its_scale_into_the_update_and_skips_overflows() -> None:
    ours, theirs = network(), network()
    optimizers = optim.AdamW(ours.parameters(), lr=1e-2), torch.optim.AdamW(theirs.parameters(), lr=1e-2)
    for net, optimizer in zip((ours, theirs), optimizers):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for step in range(4):
            optimizer.zero_grad()
            x = torch.randn(5, 7, generator=torch.Generator().manual_seed(step))
            scaler.scale(net(x).square().mean()).backward()
            gradient = weight_of(net).grad
            assert gradient is not None
            gradient[0, 0] *= torch.inf if step == 2 else 1.0
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
    for a, b in zip(ours.parameters(), theirs.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-6)


def test_learning_rates_may_be_tensors_and_schedulers_drive_them() -> None:
    one, other = network(), network()
    optimizers = optim.AdamW(one.parameters(), lr=torch.tensor(1e-2)), optim.AdamW(other.parameters(), lr=1e-2)
    for net, optimizer in zip((one, other), optimizers):
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for step in range(3):
            train(net, optimizer, 1, first=step)
            scheduler.step()
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1.25e-3)
    for a, b in zip(one.parameters(), other.parameters()):
        torch.testing.assert_close(a, b, rtol=1e-5, atol=1e-7)


def test_a_closure_is_run_with_gradients_and_its_loss_returned() -> None:
    param = nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([param], lr=0.1)

    def closure() -> float:
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss.item()

    with torch.no_grad():
        assert optimizer.step(closure) == 3.0
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.8))


def test_groups_may_be_added_later_and_keep_their_own_numbers_and_steps() -> None:
    early, late = nn.Parameter(torch.ones(5)), nn.Parameter(torch.ones(5))
    optimizer = optim.AdamW([early], lr=0.1, weight_decay=0.0)
    early.grad = torch.ones(5)
    optimizer.step()
    optimizer.add_param_group({"params": [late], "lr": 0.01})
    late.grad = torch.ones(5)
    optimizer.step()
    # The first steps of Adam have size lr for any gradient.
    torch.testing.assert_close(early.detach(), torch.full((5,), 0.8), rtol=1e-5, atol=0)
    torch.testing.assert_close(late.detach(), torch.full((5,), 0.99), rtol=1e-5, atol=0)
    assert [float(optimizer.state[p]["step"]) for p in (early, late)] == [2, 1]


REFUSED: Mapping[str, tuple[Callable[[Tensor], object], str]] = {
    "lr": (lambda p: optim.AdamW([p], lr=-1.0), "lr=-1.0 is not allowed"),
    "beta": (lambda p: optim.Lion([p], betas=(0.9, 1.0)), "below 1"),
    "max_norm": (lambda p: optim.SGD([p], max_norm=-1.0), "max_norm=-1.0"),
    "mains": (lambda p: optim.AdamW([p], mains="fp32"), "'param', 'float32', 'remainder'"),
}


@pytest.mark.parametrize(("build", "advice"), REFUSED.values(), ids=REFUSED.keys())
def test_an_illegal_option_is_refused(build: Callable[[Tensor], object], advice: str) -> None:
    with pytest.raises(ValueError, match=advice):
        build(nn.Parameter(torch.ones(2)))


OTHERS: Mapping[str, tuple[Build, Build, str]] = {
    "amsgrad": (lambda p: torch.optim.AdamW(p, amsgrad=True), lambda p: optim.AdamW(p), "amsgrad=True"),
    "nesterov": (
        lambda p: torch.optim.SGD(p, momentum=0.9, nesterov=True),
        lambda p: optim.SGD(p, momentum=0.9),
        "build it with nesterov=True",
    ),
    "decay": (lambda p: optim.AdamW(p), lambda p: optim.Adam(p), "build it with decoupled_weight_decay=True"),
}


@pytest.mark.parametrize(("build", "other", "advice"), OTHERS.values(), ids=OTHERS.keys())
def test_a_state_dict_saved_with_an_option_that_is_not_a_groups_own_is_refused(
    build: Build, other: Build, advice: str
) -> None:
    with pytest.raises(optim.StateDictError, match=advice):
        other([nn.Parameter(torch.ones(2))]).load_state_dict(build([nn.Parameter(torch.ones(2))]).state_dict())


def test_a_state_dict_that_is_refused_has_changed_nothing() -> None:
    net = network(torch.bfloat16)
    optimizer = optim.AdamW(net.parameters(), mains="remainder")
    train(net, optimizer, 2)
    saved, before = copy.deepcopy(optimizer.state_dict()), copy.deepcopy((net.state_dict(), optimizer.state_dict()))
    saved["param_groups"][0]["lr"] = 9.0
    saved["state"][1]["main"] += 1
    del saved["state"][2]["exp_avg"]
    with pytest.raises(optim.StateDictError, match=r"'exp_avg' of .* is missing"):
        optimizer.load_state_dict(saved)
    torch.testing.assert_close((net.state_dict(), optimizer.state_dict()), before, rtol=0, atol=0)


def test_a_state_dict_for_mains_that_cannot_be_is_refused_before_anything_is_loaded() -> None:
    saved, loading = ([nn.Parameter(torch.ones(3, dtype=d)) for d in (torch.bfloat16, torch.float16)] for _ in range(2))
    optimizer = optim.AdamW(saved, lr=0.5, mains="float32")
    for param in saved:
        param.grad = torch.ones_like(param)
    optimizer.step()
    with pytest.raises(ValueError, match="pass mains='float32'"):
        optim.AdamW(loading, mains="remainder").load_state_dict(optimizer.state_dict())
    assert torch.equal(loading[0], torch.ones_like(loading[0]))


def test_hooks_change_what_is_loaded_and_see_what_was() -> None:
    param = nn.Parameter(torch.ones(2))
    param.grad = torch.ones(2)
    optimizer = optim.SGD([param], lr=1.0, momentum=0.9)
    optimizer.step()
    saved, seen = optimizer.state_dict(), []

    def doubled(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {index: state | {"momentum_buffer": torch.full((2,), 2.0)} for index, state in saved["state"].items()}
        return state_dict | {"state": states}

    optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[param]["momentum_buffer"].tolist()))
    optimizer.load_state_dict(saved)
    assert seen == [[2.0, 2.0]]
    assert optimizer.state[param]["momentum_buffer"].tolist() == [2.0, 2.0]
