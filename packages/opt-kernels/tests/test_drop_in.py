"""The drop-in optimizers: torch's behaviour and state_dict, what they add, and what a run may change and resume."""

import copy
import pickle
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from codec_values import DTYPES
from drop_ins import MATRIX_NAMES, NAMES, built, parameter, same, states_of, step
from torch import Tensor, nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, OneCycleLR
from torch.optim.optimizer import register_optimizer_step_post_hook, register_optimizer_step_pre_hook

from opt_kernels import optim
from opt_kernels.optim.param_rows import scaling_of
from opt_kernels.rules import Lion as LionRule

pytestmark = pytest.mark.usefixtures("poisoned")
ON_SOME = pytest.mark.parametrize("name", ["Adam", "AdamW", "SGD", "Lion", "Muon", "AdaptiveMuon", "SOAP"])
MAINS = pytest.mark.parametrize("mains", ["float32", "remainder"])


def bf16(*shape: int, seed: int = 0) -> nn.Parameter:
    return parameter(*shape, seed=seed, dtype=torch.bfloat16)


def pair(seed: int = 0, dtype: torch.dtype = torch.float32) -> list[nn.Parameter]:
    """A transposed matrix and a vector."""
    matrix = nn.Parameter(parameter(6, 4, seed=seed, dtype=dtype).detach().t())
    return [matrix, parameter(5, seed=seed, dtype=dtype)]


# --- groups -----------------------------------------------------------------------------------------------------------

TOLERATED: dict[str, Any] = {
    "name": "decoder", "initial_lr": 0.1, "lr_mult": 0.5, "wd_mult": 0.0, "lr_scale": 0.7, "max_lr": 0.1, "min_lr": 0.0,
    "base_momentum": 0.8, "max_momentum": 0.9, "swa_lr": 0.1, "param_names": ["w"], "swanlab_group": "a",
    "is_expert_parallel": False, "optimizer": "adam", "default_config": True, "fused": True, "foreach": False,
    "capturable": False, "maximize": False, "amsgrad": None, "differentiable": False, "_mark": 1,
}  # fmt: skip


@ON_SOME
def test_keys_of_schedulers_trainers_and_of_the_caller_are_taken_and_saved(name: str) -> None:
    build = getattr(optim, name)
    for key, value in TOLERATED.items():
        group = {"params": [("w", parameter())]} if key == "param_names" else {"params": [parameter()], key: value}
        assert key in build([group]).param_groups[0]
    first, second = build([parameter()]), build([parameter()])
    first.param_groups[0]["anything"] = object
    saved = first.state_dict()
    saved["param_groups"][0]["of_a_trainer"] = 1
    second.load_state_dict(copy.deepcopy(saved))
    assert second.param_groups[0]["of_a_trainer"] == 1


SCHEDULERS: Mapping[str, Callable[[torch.optim.Optimizer], Any]] = {
    "OneCycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=10),
    "Cyclic": lambda o: CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "Cosine": lambda o: CosineAnnealingWarmRestarts(o, 4),
    "SWA": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
}


@ON_SOME
@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_torchs_schedulers_write_their_keys_into_groups(
    name: str, schedule: Callable[[torch.optim.Optimizer], Any]
) -> None:
    build = getattr(optim, name)
    optimizer = build([parameter()], **({"momentum": 0.9} if name == "SGD" else {}))
    scheduler = schedule(optimizer)
    for number in range(3):
        step(optimizer, number)
        scheduler.step()
    # A scheduler that resumes builds the optimizer from groups that carry all it wrote.
    again = build([{**optimizer.param_groups[0], "params": [parameter()]}])
    assert again.param_groups[0]["initial_lr"] == optimizer.param_groups[0]["initial_lr"]


def test_learning_rates_may_be_tensors_and_schedulers_drive_them() -> None:
    found = []
    for lr in (torch.tensor(1e-2), 1e-2):
        optimizer = optim.AdamW(pair(), lr=lr)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, step_size=1, gamma=0.5)
        for number in range(3):
            found.append(step(optimizer, number))
            scheduler.step()
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1.25e-3)
    torch.testing.assert_close(found[2], found[5], rtol=1e-5, atol=1e-7)


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


def test_parameters_that_move_together_are_counted_one_by_one() -> None:
    params = [parameter(3, seed=seed) for seed in range(3)]
    optimizer = optim.AdamW(params, backend="torch")
    step(optimizer, 0)
    saved = optimizer.state_dict()
    step(optimizer, 1)
    assert [float(state["step"]) for state in saved["state"].values()] == [1.0, 1.0, 1.0]
    params[1].grad = None
    optimizer.step()
    step(optimizer, 2)
    assert [float(optimizer.state[param]["step"]) for param in params] == [4.0, 3.0, 4.0]
    # Steps may be set from outside, in place or by another tensor, and count on from there.
    optimizer.state[params[0]]["step"].fill_(10)
    optimizer.state[params[2]]["step"] = torch.tensor(20.0)
    step(optimizer, 3)
    assert [float(optimizer.state[param]["step"]) for param in params] == [11.0, 4.0, 21.0]


def test_a_first_step_of_zero_gradients_and_rates_makes_state_and_counts_nothing() -> None:
    """As torch.distributed.checkpoint makes state, before a first step, to save or to load into."""
    probed, plain = (optim.AdamW([parameter()], weight_decay=0.1) for _ in range(2))
    (param,) = probed.param_groups[0]["params"]
    param.grad = torch.zeros_like(param)
    probed.param_groups[0]["lr"] = 0.0
    probed.step()
    probed.param_groups[0]["lr"] = 1e-3
    assert float(probed.state[param]["step"]) == 0.0
    assert same(step(probed, 0), step(plain, 0))


@pytest.mark.parametrize("name", ["Muon", "AdaptiveMuon", "SOAP"])
def test_backend_and_options_reach_the_rule_of_other_parameters(name: str) -> None:
    options = {"exp_avg_dtype": torch.bfloat16, "stochastic_rounding": True}
    rule = built(name, [parameter()], scalar_options=options, backend="reference").scalar_rule
    assert (rule.backend, rule.codecs["exp_avg"].dtype, rule.stochastic_rounding) == ("reference", torch.bfloat16, True)
    lion = built(name, [parameter()], scalar_optimizer="lion", scalar_options={"backend": "torch"}, backend="reference")
    assert lion.scalar_rule == LionRule(backend="torch")


@pytest.mark.parametrize("name", ["Lion", "Muon"])
def test_float64_parameters_of_rules_that_torch_lacks_have_float64_states(name: str) -> None:
    optimizer = getattr(optim, name)([parameter(dtype=torch.float64)])
    step(optimizer, 0)
    assert {tensor.dtype for tensor in states_of(optimizer) if tensor.dim()} == {torch.float64}


# --- clipping, scaling, closures and hooks of torch -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "options"), [("Adam", {}), ("SGD", {"momentum": 0.9, "nesterov": True}), ("Lion", {})]
)
def test_clipping_within_the_update_is_clip_grad_norm(name: str, options: dict[str, Any]) -> None:
    clipped, plain = pair(), pair()
    one = getattr(optim, name)(clipped, lr=1e-2, max_norm=0.05, **options)
    other = getattr(optim, name)(plain, lr=1e-2, **options)
    for _ in range(3):
        for params in (clipped, plain):
            for param in params:
                param.grad = param.detach() * 2
        before = [param.grad.clone() for param in clipped if param.grad is not None]
        norm = nn.utils.clip_grad_norm_(plain, 0.05)
        one.step()
        other.step()
        assert one.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert same(before, [param.grad for param in clipped])
    torch.testing.assert_close(clipped, plain, rtol=1e-5, atol=1e-6)


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
    unclipped = optim.AdamW([param], max_norm=torch.inf)
    unclipped.step()
    assert unclipped.grad_norm == pytest.approx(2e-6)


def test_an_overflow_that_the_scaler_found_skips_a_clipped_step() -> None:
    # The local gradient is finite: `found_inf` may come from another optimizer or rank.
    param = nn.Parameter(torch.ones(4))
    optimizer: Any = optim.AdamW([param], max_norm=1.0)
    param.grad = torch.ones(4)
    for found in (1.0, 0.0):
        optimizer.found_inf, optimizer.grad_scale = torch.tensor(found), torch.ones(())
        _, skip, _ = scaling_of([param], found_inf=torch.tensor([found]), loss_scale=None, max_norm=1.0)
        assert skip is not None
        assert bool(skip) is bool(found)  # with capturable=True
        optimizer.step()
        assert torch.equal(param.detach(), torch.ones(4)) is bool(found)


def test_with_max_norm_a_step_that_is_not_finite_changes_nothing() -> None:
    params = pair()
    optimizer = optim.AdamW(params, max_norm=1.0)
    before, state = step(optimizer, 0), copy.deepcopy(optimizer.state_dict())
    params[0].grad[0, 0] = torch.nan  # type: ignore[index]
    optimizer.step()
    assert same(before, params)
    assert str(optimizer.state_dict()) == str(state)
    assert optimizer.grad_norm is not None
    assert not optimizer.grad_norm < float("inf")


def test_the_grad_scaler_folds_its_scale_into_the_update_and_skips_overflows() -> None:
    ours, theirs = pair(), pair()
    for params, optimizer in ((ours, optim.AdamW(ours, lr=1e-2)), (theirs, torch.optim.AdamW(theirs, lr=1e-2))):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number in range(4):
            optimizer.zero_grad()
            scaler.scale(sum(param.square().sum() for param in params)).backward()
            assert params[0].grad is not None
            params[0].grad[0, 0] *= torch.inf if number == 2 else 1.0
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)


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
    optimizer.register_step_pre_hook(lambda stepping, args, options: ((stepping, lambda: 7.0), {}))
    assert optimizer.step() == 7.0  # type: ignore[func-returns-value]


class Counting(optim.AdamW):
    """A user's subclass that overrides `step`."""

    num_steps = 0

    def step(self, closure: Any = None) -> Any:
        self.num_steps += 1
        return super().step(closure)


@pytest.mark.parametrize("is_global", [False, True])
def test_step_hooks_run_around_steps_and_a_profiler_sees_them(is_global: bool) -> None:
    optimizer = Counting([parameter(3)], lr=0.1)
    seen: list[tuple[str, Tensor]] = []
    before = lambda stepping, args, options: seen.append(("before", stepping.param_groups[0]["params"][0].clone()))
    after = lambda stepping, args, options: seen.append(("after", stepping.param_groups[0]["params"][0].clone()))
    if is_global:
        handles = [register_optimizer_step_pre_hook(before), register_optimizer_step_post_hook(after)]
    else:
        handles = [optimizer.register_step_pre_hook(before), optimizer.register_step_post_hook(after)]
    with torch.profiler.profile() as profiler:
        (moved,) = step(optimizer, 0)
    assert [seen[0][0], seen[-1][0]] == ["before", "after"]
    assert torch.equal(seen[0][1], parameter(3))
    assert torch.equal(seen[-1][1], moved)
    assert any(event.key.startswith("Optimizer.step#") for event in profiler.key_averages())
    for handle in handles:
        handle.remove()
    seen.clear()
    step(optimizer, 1)
    assert (seen, optimizer.num_steps) == ([], 2)


# --- mains and state_dicts --------------------------------------------------------------------------------------------


@MAINS
def test_a_main_keeps_what_a_bfloat16_parameter_rounds_away(mains: str) -> None:
    kept, lost = (nn.Parameter(torch.ones(4, dtype=torch.bfloat16)) for _ in range(2))
    optimizers = optim.AdamW([kept], lr=1e-4, weight_decay=0, mains=mains), optim.AdamW([lost], lr=1e-4, weight_decay=0)
    for _ in range(100):
        kept.grad = lost.grad = torch.ones(4, dtype=torch.bfloat16)
        for optimizer in optimizers:
            optimizer.step()
    assert torch.equal(lost, torch.ones(4))
    assert torch.equal(kept, torch.tensor(0.99).bfloat16().expand(4))


@pytest.mark.parametrize(("first", "second"), DTYPES.values(), ids=DTYPES.keys())
def test_states_are_saved_in_plain_numbers_and_loaded_by_another_kind(first: torch.dtype, second: torch.dtype) -> None:
    params = pair(dtype=torch.bfloat16)
    optimizer = optim.AdamW(params, mains="remainder", exp_avg_dtype=first, exp_avg_sq_dtype=second)
    step(optimizer, 0, 1, 2)
    saved = optimizer.state_dict()["state"][0]
    assert set(saved) == {"step", "exp_avg", "exp_avg_sq", "main"}
    assert saved["exp_avg"].dtype in (torch.float32, torch.bfloat16)
    # Another optimizer, with other numbers, loads them: bfloat16 parameters become the mains, rounded.
    for dtype, mains in ((torch.bfloat16, "float32"), (torch.float32, "param")):
        others = pair(seed=1, dtype=dtype)
        wide = optim.AdamW(others, mains=mains)
        wide.load_state_dict(optimizer.state_dict())
        main = wide.state[others[0]]["main"] if mains == "float32" else others[0].detach()
        assert torch.equal(others[0], params[0] if mains == "float32" else saved["main"])
        assert torch.equal(main, saved["main"])
        assert torch.equal(wide.state[others[0]]["exp_avg"], saved["exp_avg"].float())
        wide.load_state_dict(wide.state_dict())
        assert {tensor.dtype for tensor in states_of(wide)} == {torch.float32}


@pytest.mark.parametrize("narrow", [False, True], ids=["float32", "8 bit, remainders"])
@pytest.mark.parametrize("name", NAMES)
def test_a_run_that_is_resumed_or_copied_goes_on_bit_for_bit(name: str, narrow: bool) -> None:
    options: dict[str, Any] = {"lr": 0.01, "backend": "torch"}
    if narrow and name not in MATRIX_NAMES:
        states = getattr(optim, name).formula.declared
        dtypes = {f"{state.name}_dtype": torch.int8 if state.signed else torch.uint8 for state in states}
        options |= {"mains": "remainder", **dtypes}
    elif narrow:
        options |= {"mains": "remainder", **({"momentum_buffer_dtype": torch.int8} if "SOAP" not in name else {})}
    optimizer, resumed = (
        built(name, pair(seed=seed, dtype=torch.bfloat16 if narrow else torch.float32), **options) for seed in range(2)
    )
    for one, other in zip(resumed.param_groups[0]["params"], step(optimizer, 0, 1, 2)):
        one.data.copy_(other)
    resumed.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    copies = [resumed, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    expected = step(optimizer, 3, 4, 5)
    for other in copies:
        assert type(other) is type(optimizer)
        assert same(step(other, 3, 4, 5), expected)
        assert same(states_of(other), states_of(optimizer))


def refused_state_dict(optimizer: Any, saved: dict[str, Any], message: str) -> None:
    """Loading changes nothing."""
    before = copy.deepcopy((optimizer.state_dict(), optimizer.param_groups[0]["params"]))
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    torch.testing.assert_close((optimizer.state_dict(), optimizer.param_groups[0]["params"]), before, rtol=0, atol=0)


def test_state_dicts_of_other_options_groups_and_rules_are_refused() -> None:
    one = [parameter(3, 3)]
    refused_state_dict(optim.AdamW(one), torch.optim.AdamW(one, amsgrad=True).state_dict(), "amsgrad=True")
    nesterov = torch.optim.SGD(one, momentum=0.9, nesterov=True)
    refused_state_dict(optim.SGD(one, momentum=0.9), nesterov.state_dict(), "build it with nesterov=True")
    refused_state_dict(optim.Adam(one), optim.AdamW(one).state_dict(), "build it with decoupled_weight_decay=True")
    two = optim.AdamW([parameter(2), parameter(2)])
    refused_state_dict(two, optim.AdamW(one).state_dict(), r"\[1\] parameters where this optimizer has \[2\]")
    # SOAP's moments, which are in a rotated basis, were loaded as Adam's; NAdam's have the same names.
    of_nadam = optim.NAdam([parameter(3, 3)], decoupled_weight_decay=True)
    for saved_by, loaded_by, message in (
        (
            optim.SOAP([parameter(3, 3)], betas=(0.9, 0.999)),
            optim.AdamW,
            "unknown to rule .*; load one that was saved ",
        ),
        (optim.AdamW([parameter(3, 3)]), optim.Lion, "unknown to rule .*; load one that was saved by the same rule"),
        (optim.Adan([parameter(3, 3)]), optim.AdamW, "unknown to rule .*; load one that was saved by the same rule"),
        (of_nadam, optim.AdamW, r"\['mu_product'\] are unknown to rule 'adam'"),
    ):
        step(saved_by, 0)
        saved = saved_by.state_dict()
        loading = loaded_by([parameter(3, 3)])  # type: ignore[operator]
        step(loading, 0)
        saved["param_groups"][0]["betas"] = loading.param_groups[0]["betas"]
        refused_state_dict(loading, saved, message)
    ademamix = optim.AdEMAMix([parameter(3)])
    saved = copy.deepcopy(ademamix.state_dict())
    saved["param_groups"][0]["alpha"] = -2.0
    refused_state_dict(ademamix, saved, r"alpha=-2.0 is not allowed")


def test_a_state_dict_that_is_refused_late_has_changed_nothing() -> None:
    optimizer = optim.AdamW([bf16(3), bf16(4)], mains="remainder")
    step(optimizer, 0, 1)
    saved = copy.deepcopy(optimizer.state_dict())
    saved["param_groups"][0]["lr"] = 9.0
    saved["state"][0]["main"] += 1
    del saved["state"][1]["exp_avg"]
    refused_state_dict(optimizer, saved, r"'exp_avg' of .* is missing")
    mixed = optim.AdamW([bf16(3), parameter(3, dtype=torch.float16)], mains="float32")
    step(mixed, 0)
    loading = [bf16(3), parameter(3, dtype=torch.float16)]
    with pytest.raises(ValueError, match="pass mains='float32'"):
        optim.AdamW(loading, mains="remainder").load_state_dict(mixed.state_dict())
    assert torch.equal(loading[0], bf16(3))


def test_a_momentum_that_was_switched_off_does_not_keep_a_state_from_loading() -> None:
    optimizer, other = optim.SGD([parameter(3)], momentum=0.9), optim.SGD([parameter(3)])
    step(optimizer, 0)
    optimizer.param_groups[0]["momentum"] = 0.0
    step(optimizer, 1)
    other.load_state_dict(optimizer.state_dict())
    assert float(other.state[other.param_groups[0]["params"][0]]["step"]) == 2.0


def test_load_hooks_change_what_is_loaded_and_see_what_was() -> None:
    param = parameter(2)
    optimizer = optim.SGD([param], lr=1.0, momentum=0.9)
    step(optimizer, 0)
    saved, seen = optimizer.state_dict(), []

    def doubled(_: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        states = {index: state | {"momentum_buffer": torch.full((2,), 2.0)} for index, state in saved["state"].items()}
        return state_dict | {"state": states}

    optimizer.register_load_state_dict_pre_hook(doubled)
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[param]["momentum_buffer"].tolist()))
    optimizer.load_state_dict(saved)
    assert seen == [[2.0, 2.0]]
    assert optimizer.state[param]["momentum_buffer"].tolist() == [2.0, 2.0]
