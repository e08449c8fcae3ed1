"""The drop-in optimizers: torch's behaviour and state_dict, what they add, and what a run may change and resume."""

import copy
import pickle

import pytest
import torch
from codec_values import DTYPES
from drop_ins import MATRIX_NAMES, NAMES, built, parameter, params_of, same, states_of, step
from elementwise_works import FAST, device_of, on_pairs_of
from torch import nn
from torch.optim.lr_scheduler import CosineAnnealingWarmRestarts, CyclicLR, OneCycleLR, StepLR
from torch.optim.optimizer import register_optimizer_step_pre_hook

from opt_kernels import optim
from opt_kernels.rules import Lion as LionRule

pytestmark = pytest.mark.usefixtures("poisoned")


def bf16(*shape, seed=0):
    return parameter(*shape, seed=seed, dtype=torch.bfloat16)


def pair(seed=0, dtype=torch.float32):
    return [nn.Parameter(parameter(6, 4, seed=seed, dtype=dtype).detach().t()), parameter(5, seed=seed, dtype=dtype)]


# --- groups -----------------------------------------------------------------------------------------------------------

TOLERATED = {
    "name": "decoder", "initial_lr": 0.1, "lr_mult": 0.5, "wd_mult": 0.0, "lr_scale": 0.7, "max_lr": 0.1, "min_lr": 0.0,
    "base_momentum": 0.8, "max_momentum": 0.9, "swa_lr": 0.1, "param_names": ["w"], "swanlab_group": "a",
    "is_expert_parallel": False, "optimizer": "adam", "default_config": True, "fused": True, "foreach": False,
    "capturable": False, "maximize": False, "amsgrad": None, "differentiable": False, "_mark": 1,
}  # fmt: skip
SCHEDULERS = {
    "OneCycle": lambda o: OneCycleLR(o, max_lr=0.1, total_steps=10),
    "Cyclic": lambda o: CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "Cosine": lambda o: CosineAnnealingWarmRestarts(o, 4),
    "SWA": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
}


@pytest.mark.parametrize("name", ["AdamW", "SGD", "Muon", "SOAP"])
def test_keys_of_schedulers_trainers_and_callers_are_saved(name):
    build = getattr(optim, name)
    for key, value in TOLERATED.items():
        group = {"params": [("w", parameter())]} if key == "param_names" else {"params": [parameter()], key: value}
        assert key in build([group]).param_groups[0]
    first = build([parameter()])
    second = build([parameter()])
    first.param_groups[0]["anything"] = object
    saved = first.state_dict()
    saved["param_groups"][0]["of_a_trainer"] = 1
    second.load_state_dict(copy.deepcopy(saved))
    assert second.param_groups[0]["of_a_trainer"] == 1
    for schedule in SCHEDULERS.values():
        optimizer = build([parameter()], **({"momentum": 0.9} if name == "SGD" else {}))
        scheduler = schedule(optimizer)
        for number in range(3):
            step(optimizer, number)
            scheduler.step()
        # A scheduler that resumes builds the optimizer from groups that have all its keys.
        resumed = build([{**optimizer.param_groups[0], "params": [parameter()]}])
        assert resumed.param_groups[0]["initial_lr"] == optimizer.param_groups[0]["initial_lr"]


def test_learning_rates_may_be_tensors_and_schedulers_drive_them():
    found = []
    for lr in (torch.tensor(1e-2), 1e-2):
        optimizer = optim.AdamW(pair(), lr=lr)
        scheduler = StepLR(optimizer, step_size=1, gamma=0.5)
        for number in range(3):
            found.append(step(optimizer, number))
            scheduler.step()
        assert float(optimizer.param_groups[0]["lr"]) == pytest.approx(1.25e-3)
    torch.testing.assert_close(found[2], found[5], rtol=1e-5, atol=1e-7)


def test_groups_added_later_keep_their_own_numbers_and_steps():
    early = nn.Parameter(torch.ones(5))
    late = nn.Parameter(torch.ones(5))
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


def test_parameters_that_move_together_are_counted_one_by_one():
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


def test_a_step_of_zero_gradients_and_rates_counts_nothing():
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
def test_backend_and_options_reach_the_rule_of_other_parameters(name):
    options = {"exp_avg_dtype": torch.bfloat16, "stochastic_rounding": True}
    rule = built(name, [parameter()], scalar_options=options, backend="reference").scalar_rule
    assert (rule.backend, rule.codecs["exp_avg"].dtype, rule.stochastic_rounding) == ("reference", torch.bfloat16, True)
    lion = built(name, [parameter()], scalar_optimizer="lion", scalar_options={"backend": "torch"}, backend="reference")
    assert lion.scalar_rule == LionRule(backend="torch")


@pytest.mark.parametrize("name", ["Lion", "Muon"])
def test_float64_params_of_rules_torch_lacks_have_float64_states(name):
    optimizer = getattr(optim, name)([parameter(dtype=torch.float64)])
    step(optimizer, 0)
    assert {tensor.dtype for tensor in states_of(optimizer) if tensor.dim()} == {torch.float64}


# --- clipping, scaling, closures and hooks of torch -------------------------------------------------------------------


@pytest.mark.parametrize(("name", "options"), [("AdamW", {}), ("SGD", {"momentum": 0.9, "nesterov": True})])
def test_max_norm_acts_as_clip_grad_norm_and_skips_nonfinite(name, options):
    params = pair()
    plain = pair()
    optimizer = getattr(optim, name)(params, lr=1e-2, max_norm=0.05, **options)
    unclipped = getattr(optim, name)(plain, lr=1e-2, **options)
    for _ in range(3):
        for param in (*params, *plain):
            param.grad = param.detach() * 2
        before = [param.grad.clone() for param in params]
        norm = nn.utils.clip_grad_norm_(plain, 0.05)
        optimizer.step()
        unclipped.step()
        assert optimizer.grad_norm == pytest.approx(float(norm), rel=1e-5)
        assert same(before, [param.grad for param in params])
    torch.testing.assert_close(params, plain, rtol=1e-5, atol=1e-6)
    before = copy.deepcopy((params, str(optimizer.state_dict())))
    params[0].grad[0, 0] = torch.nan
    optimizer.step()
    assert same(before[0], params)
    assert str(optimizer.state_dict()) == before[1]
    assert not optimizer.grad_norm < float("inf")


@pytest.mark.parametrize("max_norm", [1e-6, 1.0, torch.inf])
def test_tiny_gradients_are_clipped_as_torch_clips_them(max_norm):
    # torch divides by the norm + 1e-6, which norms of this size show. Those below the limit are not enlarged.
    param = nn.Parameter(torch.zeros(4))
    plain = nn.Parameter(torch.zeros(4))
    param.grad = torch.full((4,), 1e-6)
    plain.grad = torch.full((4,), 1e-6)
    nn.utils.clip_grad_norm_([plain], max_norm)
    optimizer = optim.SGD([param], lr=1.0, max_norm=max_norm)
    optimizer.step()
    torch.testing.assert_close(param.detach(), -plain.grad, rtol=1e-5, atol=0)
    assert optimizer.grad_norm == pytest.approx(2e-6)


@pytest.mark.parametrize("max_norm", [None, 0.5])
def test_grad_scaler_folds_its_scale_in_and_skips_overflows(max_norm):
    ours = pair()
    theirs = pair()
    options = {"lr": 0.1, "momentum": 0.9}
    optimizers = optim.SGD(ours, max_norm=max_norm, **options), torch.optim.SGD(theirs, **options)
    for params, optimizer in zip((ours, theirs), optimizers):
        scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
        for number in range(4):
            optimizer.zero_grad()
            scaler.scale(sum(param.square().sum() for param in params)).backward()
            params[0].grad[0, 0] *= torch.inf if number == 2 else 1.0
            if max_norm and params is theirs:
                scaler.unscale_(optimizer)
                nn.utils.clip_grad_norm_(params, max_norm)
            scaler.step(optimizer)
            scaler.update()
        assert scaler.get_scale() == 512.0
    torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
    optimizers[0].found_inf = torch.ones(())
    optimizers[0].grad_scale = torch.ones(())
    before = [param.detach().clone() for param in ours]
    optimizers[0].step()  # the local gradients are finite
    assert same(before, ours)


def test_a_closure_is_run_with_gradients_and_its_loss_returned():
    param = nn.Parameter(torch.ones(3))
    optimizer = optim.SGD([param], lr=0.1)

    def closure():
        optimizer.zero_grad()
        loss = param.square().sum()
        loss.backward()
        return loss.item()

    with torch.no_grad():
        assert optimizer.step(closure) == 3.0
    torch.testing.assert_close(param.detach(), torch.full((3,), 0.8))
    optimizer.register_step_pre_hook(lambda stepping, args, options: ((stepping, lambda: 7.0), {}))
    assert optimizer.step() == 7.0


class Counting(optim.AdamW):
    num_steps = 0

    def step(self, closure=None):
        self.num_steps += 1
        return super().step(closure)


def test_step_hooks_run_around_steps_and_a_profiler_sees_them():
    optimizer = Counting([parameter(3)], lr=0.1)
    seen = []
    see = lambda stepping, args, options: seen.append(stepping.param_groups[0]["params"][0].clone())
    handles = [register_optimizer_step_pre_hook(see), optimizer.register_step_post_hook(see)]
    with torch.profiler.profile() as profiler:
        (moved,) = step(optimizer, 0)
    for handle in handles:
        handle.remove()
    step(optimizer, 1)
    assert same([seen[0], seen[-1]], [parameter(3), moved])
    assert any(event.key.startswith("Optimizer.step#") for event in profiler.key_averages())
    assert optimizer.num_steps == 2


# --- mains and state_dicts --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("first", "second"), DTYPES.values(), ids=DTYPES.keys())
def test_states_are_saved_as_plain_numbers_and_load_in_others(first, second):
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


@on_pairs_of(name={name: name for name in NAMES}, narrow={"float32": False, "8 bit": True}, backend=FAST)
def test_a_run_that_is_resumed_or_copied_goes_on_bit_for_bit(name, narrow, backend):
    """What an optimizer keeps between steps has addresses of its own tensors: its copy must not use them."""
    backend = "torch" if name in MATRIX_NAMES and (backend == "cpp" or "SOAP" in name) else backend
    order = torch.contiguous_format if backend == "triton" else torch.preserve_format  # Muon's sweeps take no other
    options = {"lr": 0.01, "backend": backend, **({"mains": "remainder"} if narrow else {})}
    if narrow and name not in MATRIX_NAMES:
        states = getattr(optim, name).formula.declared
        options |= {f"{state.name}_dtype": torch.int8 if state.signed else torch.uint8 for state in states}
        if name == "AdEMAMix":
            options["betas"] = (0.9, 0.999, 0.999)  # its third is too slow for 8 bits
    elif narrow and "SOAP" not in name and name != "Muown":
        options["momentum_buffer_dtype"] = torch.int8
    dtype = torch.bfloat16 if narrow else torch.float32
    params, others = (
        [nn.Parameter(param.to(device_of(backend)).clone(memory_format=order)) for param in pair(seed, dtype)]
        for seed in range(2)
    )
    optimizer = built(name, params, **options)
    resumed = built(name, others, **options)
    for param, value in zip(others, step(optimizer, 0, 1, in_place=True)):
        param.data.copy_(value)
    resumed.load_state_dict(pickle.loads(pickle.dumps(optimizer.state_dict())))
    copies = [resumed, copy.deepcopy(optimizer), pickle.loads(pickle.dumps(optimizer))]
    expected = step(optimizer, 2, 3, in_place=True)
    for other in copies:
        assert type(other) is type(optimizer)
        assert same(step(other, 2, 3, in_place=True), expected)
        assert same([*params, *states_of(other)], [*expected, *states_of(optimizer)])


def test_a_parameter_whose_state_was_only_read_has_none():
    """Symptom: `optimizer.state[param]` of a logger made the next `state_dict` fail."""
    params = pair()
    optimizer = optim.AdamW(params)
    for param in params[:1]:
        param.grad = torch.ones_like(param)
    optimizer.step()
    assert not optimizer.state[params[1]]
    saved = optimizer.state_dict()
    assert not saved["state"][1]
    optim.AdamW(pair()).load_state_dict(saved)
    theirs = torch.optim.AdamW(params)
    theirs.load_state_dict(saved)


@pytest.mark.parametrize("steps", [0, 2])
def test_a_run_without_momentum_loads_whatever_was_before(steps):
    saved = optim.SGD(pair(), lr=0.1)
    step(saved, 0)
    loading = optim.SGD(pair(), lr=0.1, momentum=0.9)
    step(loading, *range(steps))
    loading.load_state_dict(saved.state_dict())
    assert all(set(state) == {"step"} for state in loading.state.values())


def test_the_norm_of_a_step_that_the_scaler_skips_is_infinite():
    optimizer = optim.AdamW(pair(), max_norm=1.0)
    step(optimizer, 0)
    optimizer.found_inf = torch.ones(())
    step(optimizer, 1)
    assert optimizer.grad_norm == torch.inf


def refused_state_dict(optimizer, saved, message):
    before = copy.deepcopy((optimizer.state_dict(), optimizer.param_groups[0]["params"]))
    with pytest.raises(ValueError, match=message):
        optimizer.load_state_dict(saved)
    torch.testing.assert_close((optimizer.state_dict(), optimizer.param_groups[0]["params"]), before, rtol=0, atol=0)


def test_state_dicts_of_other_options_or_rules_are_refused():
    param = [parameter(3, 3)]
    ademamix = optim.AdEMAMix(param).state_dict()
    ademamix["param_groups"][0]["alpha"] = -2.0
    for loading, saved, message in (
        (optim.AdamW(param), torch.optim.AdamW(param, amsgrad=True).state_dict(), "amsgrad=True"),
        (optim.SGD(param), torch.optim.SGD(param, momentum=0.9, nesterov=True).state_dict(), "with nesterov=True"),
        (optim.Adam(param), optim.AdamW(param).state_dict(), "build it with decoupled_weight_decay=True"),
        (optim.AdamW([parameter(2), parameter(2)]), optim.AdamW(param).state_dict(), r"\[1\] .* optimizer has \[2\]"),
        (optim.AdEMAMix(param), ademamix, r"alpha=-2.0 is not allowed"),
    ):
        refused_state_dict(loading, saved, message)
    for saved_by, loaded_by, message in (
        (optim.SOAP(param, betas=(0.9, 0.999)), optim.AdamW, "unknown to rule .*; load one that was saved "),
        (optim.AdamW(param), optim.Lion, "unknown to rule .*; load one that was saved by the same rule"),
        (optim.Adan(param), optim.AdamW, "unknown to rule .*; load one that was saved by the same rule"),
        (optim.NAdam(param, decoupled_weight_decay=True), optim.AdamW, r"\['mu_product'\] are unknown to rule 'adam'"),
    ):
        step(saved_by, 0)
        saved = copy.deepcopy(saved_by.state_dict())
        loading = loaded_by([parameter(3, 3)])
        step(loading, 0)
        saved["param_groups"][0]["betas"] = loading.param_groups[0]["betas"]
        refused_state_dict(loading, saved, message)


def test_a_state_dict_that_is_refused_late_has_changed_nothing():
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


def test_state_loads_after_momentum_was_switched_off():
    optimizer = optim.SGD([parameter(3)], momentum=0.9)
    other = optim.SGD([parameter(3)])
    step(optimizer, 0)
    optimizer.param_groups[0]["momentum"] = 0.0
    step(optimizer, 1)
    other.load_state_dict(optimizer.state_dict())
    assert float(other.state[other.param_groups[0]["params"][0]]["step"]) == 2.0


# --- the order of parameters ------------------------------------------------------------------------------------------

NAMED = ["q", "k", "v"]


def named(*names, **entries):
    return {"params": [(name, parameter(3, 3, seed=NAMED.index(name))) for name in names], **entries}


def momenta(optimizer):
    """The sum of the first moment of each parameter, by its name."""
    return {
        name: float(optimizer.state[param]["exp_avg"].sum())
        for group in optimizer.param_groups
        for name, param in zip(group["param_names"], group["params"], strict=True)
    }


@pytest.mark.parametrize("saved_by", [torch.optim.AdamW, optim.AdamW], ids=["torch", "ours"])
def test_states_follow_names_in_another_order(saved_by, caplog):
    """Symptom: q and k, saved in this order, were swapped where they are k and q, and were then called q and k."""
    saving = saved_by([named("q", "k", "v")])
    loading = optim.AdamW([named("v", "q", "k")])
    step(saving, 0)
    with caplog.at_level("INFO", logger="opt_kernels"):
        loading.load_state_dict(saving.state_dict())
    assert momenta(loading) == momenta(saving)
    assert loading.param_groups[0]["param_names"] == ["v", "q", "k"]
    assert [record.getMessage() for record in caplog.records] == [
        "load_state_dict: the state_dict has the parameters in another order; states are loaded by name"
    ]
    caplog.clear()
    loading.load_state_dict(loading.state_dict())
    assert not caplog.records


def test_numbers_follow_the_names_of_their_group():
    first = named("q", weight_decay=0.5)
    second = named("k", "v", weight_decay=0.0)
    saving = optim.AdamW([first, second])
    step(saving, 0)
    loading = optim.AdamW([named("v", "k"), named("q")])
    loading.load_state_dict(saving.state_dict())
    assert momenta(loading) == momenta(saving)
    assert [group["weight_decay"] for group in loading.param_groups] == [0.0, 0.5]
    merged = optim.AdamW([named("q", "k", "v")])
    with pytest.raises(ValueError, match=r"'q' and 'k' were saved in groups with weight_decay=0\.5 and 0\.0, but "):
        merged.load_state_dict(saving.state_dict())


@pytest.mark.parametrize("saved_names", [["q", "other"], None], ids=["other names", "no names"])
def test_states_of_other_names_are_loaded_by_position(saved_names, caplog):
    """As torch documents; but the optimizer's own names stay, and the first difference is named."""
    saving = torch.optim.AdamW([parameter(3, 3, seed=seed) for seed in range(2)])
    step(saving, 0)
    saved = saving.state_dict()
    if saved_names is not None:
        saved["param_groups"][0]["param_names"] = saved_names
    loading = optim.AdamW([named("q", "k")])
    loading.load_state_dict(saved)
    sums = [float(saving.state[param]["exp_avg"].sum()) for param in saving.param_groups[0]["params"]]
    assert momenta(loading) == dict(zip(["q", "k"], sums, strict=True))
    assert [record.getMessage() for record in caplog.records] == [
        "load_state_dict: names differ, so states are loaded by position: parameter 1 is 'k', and 'other' in the "
        "state_dict"
    ] * (saved_names is not None)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_pre_hooks_decide_the_order_before_anything_is_read(mode):
    """Symptom: in evaluation mode, trained weights were taken from the state_dict that the hooks had not seen."""

    def reversed_params(_, state_dict):
        groups = [{**group, "params": group["params"][::-1]} for group in state_dict["param_groups"]]
        return {**state_dict, "param_groups": groups}

    saving = optim.AdamWScheduleFree([parameter(3, 3, seed=0), parameter(3, 3, seed=1)], lr=0.1)
    step(saving, 0, 1)
    getattr(saving, mode)()
    loading = optim.AdamWScheduleFree([parameter(3, 3), parameter(3, 3)], lr=0.1)
    for param, of_saved in zip(params_of(loading), params_of(saving)[::-1], strict=True):
        param.data.copy_(of_saved)
    loading.register_load_state_dict_pre_hook(reversed_params)
    loading.load_state_dict(saving.state_dict())
    for optimizer in (saving, loading):
        optimizer.train()
    assert same(params_of(loading), params_of(saving)[::-1])


def test_load_hooks_change_what_is_loaded_and_see_it():
    param = parameter(2)
    optimizer = optim.SGD([param], lr=1.0, momentum=0.9)
    seen = []
    step(optimizer, 0)
    saved = optimizer.state_dict()
    replaced = {0: saved["state"][0] | {"momentum_buffer": torch.full((2,), 2.0)}}
    optimizer.register_load_state_dict_pre_hook(lambda _, state_dict: state_dict | {"state": replaced})
    optimizer.register_load_state_dict_post_hook(lambda o: seen.append(o.state[param]["momentum_buffer"].tolist()))
    optimizer.load_state_dict(saved)
    assert seen == [[2.0, 2.0]]


@pytest.mark.parametrize("name", ["AdamW", "AdamWScheduleFree"])
def test_a_resume_has_weights_that_were_loaded_before_the_save(name):
    """The saved main was that of before the load, which a resume wrote to the parameter."""
    param = nn.Parameter(torch.ones(6, dtype=torch.bfloat16))
    optimizer = getattr(optim, name)([param], lr=0.01, mains="float32")
    param.grad = torch.ones_like(param)
    optimizer.step()
    main = optimizer.state[param]["main"].clone()
    with torch.no_grad():  # other code shows other weights in a save
        shown = param.clone()
        param.zero_()
        optimizer.state_dict()
        param.copy_(shown)
    assert torch.equal(optimizer.state[param]["main"], main)
    with torch.no_grad():
        param.fill_(5.0)
    if name == "AdamWScheduleFree":
        optimizer.eval()
        assert param.mean() > 2  # of the loaded weights and the states
        optimizer.train()
    saved = copy.deepcopy(optimizer.state_dict())
    other = nn.Parameter(param.detach().clone())
    getattr(optim, name)([other], lr=0.01, mains="float32").load_state_dict(saved)
    assert torch.equal(other, param)
