"""Drop-in optimizers and torch's arguments, groups and parameters: taken as torch takes them, or refused when built."""

import copy
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opt_kernels import BackendError, MatrixError, optim
from opt_kernels.hooks import RelativeUpdate
from opt_kernels.optim import on_device
from opt_kernels.quantized import QuantizedTensor
from opt_kernels.rules import Lion as LionRule
from opt_kernels.rules import MuonRule, SOAPRule

Build = Callable[..., torch.optim.Optimizer]
ALL: Mapping[str, Build] = {
    name: getattr(optim, name) for name in ("Adam", "AdamW", "SGD", "Lion", "Muon", "AdaptiveMuon", "SOAP")
}
PEERS: Mapping[str, tuple[Build, Build]] = {
    "Adam": (optim.Adam, torch.optim.Adam),
    "AdamW": (optim.AdamW, torch.optim.AdamW),
    "SGD": (optim.SGD, torch.optim.SGD),
}
ON_ALL = pytest.mark.parametrize("build", ALL.values(), ids=ALL.keys())
ON_PEERS = pytest.mark.parametrize(("ours", "theirs"), PEERS.values(), ids=PEERS.keys())


def matrix(*shape: int, seed: int = 0, dtype: torch.dtype = torch.float32) -> nn.Parameter:
    values = torch.randn(shape or (6, 4), generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return nn.Parameter(values.to(dtype))


def stepped(optimizer: torch.optim.Optimizer, param: Tensor, steps: int = 3) -> Tensor:
    for seed in range(steps):
        generator = torch.Generator().manual_seed(100 + seed)
        param.grad = torch.randn(param.shape, generator=generator, dtype=torch.float64).to(param.dtype)
        optimizer.step()
    return param.detach()


# --- keys of groups -------------------------------------------------------------------------------------------------

NO_EFFECT: Mapping[str, tuple[Callable[[list[nn.Parameter]], object], str]] = {
    "rounding": (lambda p: optim.AdamW(p, stochastic_rounding=True), "stochastic_rounding=True has no effect"),
    "rounding, of other parameters": (
        lambda p: optim.Muon(p, scalar_optimizer="lion", scalar_options={"stochastic_rounding": True}),
        "stochastic_rounding=True has no effect",
    ),
    "remainders": (lambda p: optim.SGD(p, lr=0.1, mains="remainder"), "mains='remainder' has no effect"),
    "copies": (lambda p: optim.Lion(p, mains="float32"), "mains='float32' has no effect: all parameters are torch.fl"),
    "remainders of Muon": (lambda p: optim.Muon(p, scalar_optimizer="adam", mains="remainder"), "mains='remainder' ha"),
}


@pytest.mark.parametrize(("build", "message"), NO_EFFECT.values(), ids=NO_EFFECT)
def test_a_setting_that_no_parameter_can_feel_is_refused(build: Callable[..., object], message: str) -> None:
    wide = [nn.Parameter(torch.ones(2, 3)), nn.Parameter(torch.ones(3))]
    with pytest.raises(ValueError, match=message):
        build(wide)
    build([*wide, nn.Parameter(torch.ones(3, dtype=torch.bfloat16))])  # another parameter feels it


def test_arguments_of_other_libraries_are_answered_with_ours() -> None:
    with pytest.raises(TypeError, match=r"AdamW: .*'optim_bits'\. optim_bits: exp_avg_dtype=torch.int8, exp_avg"):
        optim.AdamW([matrix()], optim_bits=8)  # type: ignore[call-arg]
    with pytest.raises(TypeError, match=r"Muon: .*'percentile_clipping'\. percentile_clipping: max_norm clips"):
        optim.Muon([matrix()], percentile_clipping=5)  # type: ignore[call-arg]
    with pytest.raises(ValueError, match=r"exp_avg_dtype='int8' is a string; pass a dtype, such as torch\.int8"):
        optim.AdamW([matrix()], exp_avg_dtype="int8")  # type: ignore[arg-type]


UNKNOWN = {
    "use_muon": (optim.Muon, {"use_muon": False}, r"use_muon=False .* Did you mean 'use_matrix_rule'\?"),
    "bets": (optim.AdamW, {"bets": (0.9, 0.99)}, r"bets=\(0.9, 0.99\) .* Did you mean 'betas'\?"),
    "weight_deacy": (optim.SGD, {"weight_deacy": 0.0}, r"Did you mean 'weight_decay'\?"),
    "another rule's": (optim.AdamW, {"momentum": 0.9}, r"momentum=0.9 .* allowed are amsgrad, betas, "),
    "algorithm": (optim.Muon, {"algorithm": "adamw"}, "algorithm='adamw'"),
    "amsgrad": (optim.AdamW, {"amsgrad": True}, "build it with amsgrad=True"),
    "amsgrad of another": (optim.SGD, {"amsgrad": True}, "amsgrad=True is not supported"),
}


@pytest.mark.parametrize(("build", "keys", "message"), UNKNOWN.values(), ids=UNKNOWN.keys())
def test_a_key_that_nothing_reads_is_refused_when_built(build: Build, keys: dict[str, Any], message: str) -> None:
    # `use_muon: False` of other implementations was dropped, and embeddings were orthogonalised.
    with pytest.raises(ValueError, match=message):
        build([{"params": [matrix()], **keys}])
    optimizer = build([matrix()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [matrix(seed=1)], **keys})
    assert len(optimizer.param_groups) == 1


TOLERATED: dict[str, Any] = {
    "name": "decoder", "initial_lr": 0.1, "lr_mult": 0.5, "wd_mult": 0.0, "lr_scale": 0.7, "max_lr": 0.1, "min_lr": 0.0,
    "base_momentum": 0.8, "max_momentum": 0.9, "swa_lr": 0.1, "param_names": ["w"], "swanlab_group": "a",
    "is_expert_parallel": False, "optimizer": "adam", "default_config": True, "fused": True, "foreach": False,
    "capturable": False, "maximize": False, "amsgrad": None, "differentiable": False, "_mark": 1,
}  # fmt: skip


@ON_ALL
def test_keys_of_schedulers_trainers_and_neutral_flags_are_taken(build: Build) -> None:
    for key, value in TOLERATED.items():
        group = {"params": [("w", matrix())]} if key == "param_names" else {"params": [matrix()], key: value}
        assert key in build([group]).param_groups[0]


@ON_ALL
def test_keys_set_after_construction_are_ignored_and_survive_a_round_trip(build: Build) -> None:
    first, second = build([matrix()]), build([matrix()])
    first.param_groups[0]["anything"] = object
    saved = first.state_dict()
    saved["param_groups"][0]["of_a_trainer"] = 1
    second.load_state_dict(copy.deepcopy(saved))
    assert second.param_groups[0]["of_a_trainer"] == 1


SCHEDULERS: Mapping[str, Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]] = {
    "OneCycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.1, total_steps=10),
    "Cyclic": lambda o: torch.optim.lr_scheduler.CyclicLR(o, 0.01, 0.1, cycle_momentum=False),
    "Cosine": lambda o: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts(o, 4),
    "SWA": lambda o: torch.optim.swa_utils.SWALR(o, swa_lr=0.05),
}


@ON_ALL
@pytest.mark.parametrize("schedule", SCHEDULERS.values(), ids=SCHEDULERS.keys())
def test_torchs_schedulers_write_their_keys_into_groups(
    build: Build, schedule: Callable[[torch.optim.Optimizer], torch.optim.lr_scheduler.LRScheduler]
) -> None:
    param = matrix()
    optimizer = build([param], **({"momentum": 0.9} if build is optim.SGD else {}))
    scheduler = schedule(optimizer)
    for _ in range(3):
        stepped(optimizer, param, 1)
        scheduler.step()
    # A scheduler that resumes builds the optimizer from groups that carry all it wrote.
    again = build([{**{k: v for k, v in optimizer.param_groups[0].items() if k != "params"}, "params": [matrix()]}])
    assert again.param_groups[0]["initial_lr"] == optimizer.param_groups[0]["initial_lr"]


# --- torch's flags --------------------------------------------------------------------------------------------------

FLAGS = ("foreach", "fused", "maximize", "differentiable", "capturable", "amsgrad")


@ON_PEERS
def test_flags_that_ask_for_nothing_or_for_what_is_done_anyway_are_taken(ours: Build, theirs: Build) -> None:
    given = [(flag, value) for flag in FLAGS for value in (None, False)] + [("foreach", True), ("fused", True)]
    for flag, value in given:
        if ours is optim.SGD and flag == "amsgrad":
            with pytest.raises(TypeError, match=flag):  # as torch's SGD
                ours([matrix()], **{flag: value})
            continue
        a, b = matrix(), matrix()
        expected = stepped(theirs([b], **({flag: True} if value else {})), b)
        torch.testing.assert_close(stepped(ours([a], **{flag: value}), a), expected, rtol=1e-5, atol=1e-6)


def test_flags_for_what_is_not_offered_are_refused_by_name() -> None:
    with pytest.raises(ValueError, match="differentiable=True is not supported; None or False is allowed: "):
        optim.AdamW([matrix()], differentiable=True)


def test_capturable_steps_are_refused_where_nothing_can_be_captured() -> None:
    with pytest.raises(ValueError, match="capturable=True with a parameter on 'cpu': only cuda devices have graphs"):
        optim.AdamW([matrix()], capturable=True)
    with pytest.raises(
        ValueError, match="capturable=True is not supported; None or False is allowed: it applies to all"
    ):
        optim.AdamW([{"params": [matrix()], "capturable": True}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"hooks": (RelativeUpdate(),)}, "hooks .* which allocate memory in every step"),
        ({"backend": "torch"}, "a backend that reads numbers on the host; pass backend=None or 'triton'"),
    ],
)
def test_capturable_steps_are_refused_where_they_cannot_be_repeated(
    options: dict[str, Any], message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(on_device, "DEVICES", ("cpu",))
    with pytest.raises(ValueError, match=f"capturable=True with {message}"):
        optim.AdamW([matrix()], capturable=True, **options)
    with pytest.raises(ValueError, match="capturable=True with rule 'soap', which reads numbers on the host"):
        optim.SOAP([matrix()], capturable=True)


@ON_PEERS
def test_positional_arguments_have_torchs_order(ours: Build, theirs: Build) -> None:
    arguments = (0.1, 0.9, 0.0, 0.01, True) if ours is optim.SGD else (0.1, (0.8, 0.9), 1e-6, 0.01, False)
    a, b = matrix(), matrix()
    expected = stepped(theirs([b], *arguments), b)
    torch.testing.assert_close(stepped(ours([a], *arguments), a), expected, rtol=1e-5, atol=1e-6)


# --- parameters -----------------------------------------------------------------------------------------------------


@ON_PEERS
def test_float64_parameters_have_float64_states(ours: Build, theirs: Build) -> None:
    options = {"momentum": 0.9} if ours is optim.SGD else {}
    a, b = matrix(dtype=torch.float64), matrix(dtype=torch.float64)
    one, other = ours([a], lr=0.1, **options), theirs([b], lr=0.1, **options)
    # Float32 moments were seven digits off.
    torch.testing.assert_close(stepped(one, a), stepped(other, b), rtol=1e-13, atol=1e-14)
    kept = [t.dtype for name, t in one.state[a].items() if name != "step"]
    assert set(kept) == {torch.float64}
    resumed = ours([a], lr=0.1, **options)
    resumed.load_state_dict(copy.deepcopy(one.state_dict()))
    torch.testing.assert_close(stepped(resumed, a), stepped(other, b), rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("build", [optim.Lion, optim.Muon], ids=["Lion", "Muon"])
def test_float64_parameters_of_rules_that_torch_lacks_have_float64_states(build: Build) -> None:
    param = matrix(dtype=torch.float64)
    optimizer = build([param])
    stepped(optimizer, param)
    assert {t.dtype for name, t in optimizer.state[param].items() if name != "step"} == {torch.float64}


@pytest.mark.parametrize("build", [optim.SOAP, optim.AdaptiveMuon], ids=["SOAP", "AdaptiveMuon"])
def test_float64_parameters_of_rules_with_float32_factors_are_refused_when_built(build: Build) -> None:
    with pytest.raises(ValueError, match=r"torch\.float64, but .* keeps float32 states; pass float32 parameters"):
        build([matrix(dtype=torch.float64)])


DENSE: Mapping[str, Callable[[Tensor], Tensor]] = {
    "transposed": lambda x: x.t(),
    "channels last": lambda x: x.reshape(2, 3, 2, 2).to(memory_format=torch.channels_last),
    "permuted": lambda x: x.reshape(4, 3, 2).permute(2, 0, 1),
    "of one element": lambda x: x[:1, :1],
    "empty": lambda x: x[:0],
}


@ON_PEERS
@pytest.mark.parametrize("arrange", DENSE.values(), ids=DENSE.keys())
def test_parameters_in_any_dense_order_move_as_torchs(
    ours: Build, theirs: Build, arrange: Callable[[Tensor], Tensor]
) -> None:
    a, b = (nn.Parameter(arrange(matrix().detach().clone())) for _ in range(2))
    torch.testing.assert_close(stepped(ours([a]), a), stepped(theirs([b]), b), rtol=1e-5, atol=1e-6)


REFUSED_PARAMETERS: Mapping[str, tuple[Build, Callable[[], Tensor], str]] = {
    "nothing to round": (
        lambda p: optim.AdamW(p, mains="remainder", stochastic_rounding=True),
        lambda: matrix(dtype=torch.bfloat16), "stochastic_rounding=True has no effect",
    ),
    "with holes": (optim.AdamW, lambda: nn.Parameter(torch.ones(6, 4)[:, ::2]), "holes, overlapping"),
    "expanded": (optim.SGD, lambda: nn.Parameter(torch.ones(1, 4).expand(6, 4)), "make it contiguous"),
    "negative bit": (optim.Lion, lambda: nn.Parameter(torch._neg_view(torch.ones(3))), "negative bit"),
    "fp8": (optim.AdamW, lambda: nn.Parameter(QuantizedTensor.of(torch.ones(3))), "QuantizedTensor.*fp8_recipe"),
    "fp8 to Muon": (optim.Muon, lambda: nn.Parameter(QuantizedTensor.of(torch.ones(3, 4))), "not in memory of its own"),
    "complex": (optim.AdamW, lambda: nn.Parameter(torch.ones(3, dtype=torch.complex64)), "view_as_real"),
    "3-d to Muon": (optim.Muon, lambda: matrix(2, 3, 4), r"shape \(2, 3, 4\) is not a matrix for Muon"),
    "1-d to SOAP": (optim.SOAP, lambda: matrix(3), r"shape \(3,\) is not a matrix for SOAP"),
    "fp16 remainder": (
        lambda p: optim.AdamW(p, mains="remainder"), lambda: matrix(dtype=torch.float16), "pass mains='float32'",
    ),
    "fp16 stochastic": (
        lambda p: optim.AdamW(p, stochastic_rounding=True), lambda: matrix(dtype=torch.float16), "stochastic_rounding",
    ),
}  # fmt: skip


@pytest.mark.parametrize(("build", "param", "message"), REFUSED_PARAMETERS.values(), ids=REFUSED_PARAMETERS.keys())
def test_a_parameter_that_no_step_could_update_is_refused_when_built(
    build: Build, param: Callable[[], Tensor], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        build([param()])


NO_MATRICES: list[tuple[tuple[int, ...], dict[str, Any], str]] = [
    ((7,), {"use_matrix_rule": True}, r"shape \(7,\) is not a matrix"),
    ((7,), {"split_rows": (2, 1)}, r"shape \(7,\) is not a matrix for Muon"),
    ((6, 4), {"split_rows": (4, 1)}, r"split_rows=\(4, 1\) does not divide the 6 rows"),
]


@pytest.mark.parametrize(("shape", "group", "message"), NO_MATRICES)
def test_groups_that_are_no_matrices_are_refused_when_built(
    shape: tuple[int, ...], group: dict[str, Any], message: str
) -> None:
    with pytest.raises(MatrixError, match=message):
        optim.Muon([{"params": [matrix(*shape)], **group}])


# --- SGD's momentum -------------------------------------------------------------------------------------------------


def test_groups_of_sgd_have_their_own_momenta_and_dampenings_also_when_set_later_as_in_torch() -> None:
    results = []
    for build in (optim.SGD, torch.optim.SGD):
        a, b, c = (matrix(seed=seed) for seed in range(3))
        groups = [{"params": [a]}, {"params": [b], "momentum": 0.8, "dampening": 0.5}, {"params": [c], "momentum": 0.0}]
        optimizer = build(groups, lr=0.1, momentum=0.9, dampening=0.25)
        late = matrix(seed=3)
        without = build([late], lr=0.1)
        for number, momentum in enumerate((0.0, 0.9, 0.0, 0.5)):
            if number == 2:
                optimizer.param_groups[0]["dampening"] = 0.75
            for param in (a, b, c):
                param.grad = torch.ones_like(param) * (number + 1)
            optimizer.step()
            without.param_groups[0]["momentum"] = momentum
            stepped(without, late)
        results.append([param.detach() for param in (a, b, c, late)])
    torch.testing.assert_close(*results)


def test_a_dampened_momentum_that_is_set_after_the_first_step_is_refused() -> None:
    param = matrix()
    optimizer = optim.SGD([param], lr=0.1, dampening=0.5)
    stepped(optimizer, param)
    optimizer.param_groups[0]["momentum"] = 0.9
    with pytest.raises(ValueError, match="set the momentum before the first step"):
        stepped(optimizer, param)


# --- backends -------------------------------------------------------------------------------------------------------

BACKENDS: Mapping[str, tuple[Callable[[], object], str]] = {
    "Muon": (lambda: optim.Muon([matrix()], backend="cpp"), "'reference', 'torch', 'triton', or None"),
    "AdaptiveMuon": (lambda: optim.AdaptiveMuon([matrix()], backend="cpp"), "'reference', 'torch', 'triton', or None"),
    "SOAP": (lambda: optim.SOAP([matrix()], backend="triton"), "pass one of 'reference', 'torch', or None"),
    "rule of Muon": (lambda: MuonRule(backend="cpp"), "'cpp' is not available for 'muon'"),
    "rule of SOAP": (lambda: SOAPRule(backend="cpp"), "'cpp' is not available for 'soap'"),
    "unknown": (lambda: optim.AdamW([matrix()], backend="cuda"), "backend='cuda' is unknown"),
}


@pytest.mark.parametrize(("build", "message"), BACKENDS.values(), ids=BACKENDS.keys())
def test_a_backend_that_a_rule_does_not_have_is_refused_when_built(build: Callable[[], object], message: str) -> None:
    with pytest.raises(BackendError, match=message):
        build()


def test_a_backend_that_is_not_installed_is_refused_when_built(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPT_KERNELS_CPP", "0")
    monkeypatch.setattr("opt_kernels.backends.dispatch._REQUIRED", {k: lambda: False for k in optim_requirements()})
    for backend, advice in (("cpp", r"install a C\+\+ compiler"), ("triton", "install triton")):
        with pytest.raises(BackendError, match=advice):
            optim.AdamW([matrix()], backend=backend)


def optim_requirements() -> list[Any]:
    from opt_kernels.backends.dispatch import Backend

    return [Backend.CPP, Backend.TRITON]


@pytest.mark.parametrize("build", [optim.Muon, optim.AdaptiveMuon, optim.SOAP])
def test_backend_and_options_reach_the_rule_of_other_parameters(build: Build) -> None:
    options = {"exp_avg_dtype": torch.bfloat16, "stochastic_rounding": True}
    optimizer = build([matrix()], scalar_optimizer="adam", scalar_options=options, backend="reference")
    rule = optimizer.scalar_rule  # type: ignore[attr-defined]
    assert (rule.backend, rule.codecs["exp_avg"].dtype, rule.stochastic_rounding) == ("reference", torch.bfloat16, True)
    lion = build([matrix()], scalar_optimizer="lion", scalar_options={"backend": "torch"}, backend="reference")
    assert lion.scalar_rule == LionRule(backend="torch")  # type: ignore[attr-defined]
    with pytest.raises(
        ValueError, match=r"exp_avg_sq_dtype=torch\.uint8: rule 'lion' has no such option; allowed are exp_avg_dtype"
    ):
        build([matrix()], scalar_optimizer="lion", scalar_options={"exp_avg_sq_dtype": torch.uint8})
    with pytest.raises(ValueError, match="without scalar_optimizer"):
        build([matrix()], scalar_options=options)


def test_a_shard_without_elements_is_accepted_whatever_its_strides() -> None:
    param = nn.Parameter(torch.empty(6, 4)[:, 4:])
    optimizer = optim.AdamW([param], lr=0.1)
    param.grad = torch.zeros_like(param)
    optimizer.step()
    assert param.shape == (6, 0)
