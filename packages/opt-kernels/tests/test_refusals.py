"""What drop-in optimizers and rules refuse when they are built, by name and with what to do instead."""

import math
import re

import pytest
import torch
from drop_ins import NAMES, Undecayed, parameter, step
from torch import nn

import opt_kernels
from opt_kernels import BackendError, MatrixError, optim
from opt_kernels.foreign import CLASSES
from opt_kernels.formulas import NumberError
from opt_kernels.hooks import CentralizeGradient, RelativeUpdate
from opt_kernels.optim import on_device
from opt_kernels.quantized import QuantizedTensor
from opt_kernels.rules import SGD

OPTIONS = [
    ("AdamW", {"optim_bits": 8}, TypeError, r"AdamW: .*'optim_bits'\. optim_bits: exp_avg_dtype=torch.int8, exp_avg"),
    (
        "AdamW",
        {"foo": 1, "min_8bit_size": 9, "is_paged": True},
        TypeError,
        r"AdamW: got an unexpected keyword argument 'foo', 'min_8bit_size', 'is_paged'\. min_8bit_size: states of.*; "
        r"is_paged: optimizer_cpu_offload=True of opt_stack",
    ),
    ("Muon", {"percentile_clipping": 5}, TypeError, r"Muon: .*'percentile_clipping'\. percentile_clipping: max_norm"),
    *((name, {"learning_rate": 0.1}, TypeError, "unexpected keyword argument 'learning_rate'") for name in NAMES),
    ("AdamW", {"differentiable": True}, ValueError, "differentiable=True is not supported; None or False is allowed: "),
    ("NAdam", {"capturable": True}, ValueError, "capturable=True with a parameter on 'cpu': only cuda devices have gr"),
    ("AdamW", {"exp_avg_dtype": "int8"}, ValueError, r"exp_avg_dtype='int8' is a string; pass a dtype, such as torch"),
    ("AdamW", {"exp_avg_dtype": torch.int32}, ValueError, r"exp_avg_dtype=torch\.int32 has no codec"),
    ("AdamW", {"exp_avg_sq_dtype": torch.int8}, ValueError, r"exp_avg_sq_dtype=torch\.int8 has no codec"),
    ("AdamW", {"mains": "fp32"}, ValueError, "'param', 'float32', 'remainder'"),
    ("AdEMAMix", {"betas": (0.9, 1.0, 0.9)}, NumberError, "pass 3 numbers of at least 0 and below 1"),
    ("Adan", {"betas": (0.9, 0.99)}, NumberError, r"betas=\(0.9, 0.99\) are not allowed; pass 3"),
    ("MARSAdamW", {"gamma": "0.1"}, NumberError, "gamma='0.1' is not allowed; pass a number of at least 0"),
    ("SGD", {"max_norm": -1.0}, ValueError, "max_norm=-1.0"),
    ("AdamW", {"order": "apex"}, NumberError, "order='apex' is not allowed; pass 'torch' or 'te'"),
    ("Muon", {"scalar_optimizer": "sgd"}, ValueError, "scalar_optimizer='sgd' is unknown"),
    ("Muon", {"adjust_lr_fn": "spectral"}, ValueError, "'original', 'match_rms_adamw' or None"),
    ("Muon", {"adjust_lr_fn": "original", "scale_mode": "spectral"}, ValueError, "set only one of them"),
    ("Muon", {"ns_coefficients": (1.0, 2.0, 3.0), "coefficient_type": "quintic"}, ValueError, "pass one of them"),
    ("Muon", {"ns_steps": 0}, ValueError, "num_ns_steps is 0"),
    ("Muon", {"fp32_matmul_prec": "bf16"}, ValueError, "'bf16' is not a MatmulPrecision; pass one of 'medium', 'high'"),
    ("AdaptiveMuon", {"moment2_method": "nemo"}, ValueError, "'nemo' is not a SecondMoment; pass one of 'adamuon'"),
    ("AdaptiveMuon", {"lines": "cols"}, ValueError, "only 'normuon' has lines"),
    ("AdaptiveMuon", {"lines": "cols", "moment2_method": "namo"}, ValueError, "lines='cols' with 'namo'"),
    ("NAMO", {"weight_decay_method": "l2"}, ValueError, "NAMO with L2 weight decay"),
    ("Muon", {"scalar_optimizer": "adam", "scalar_options": {"maximize": True}}, ValueError, "always minimized"),
    ("SOAP", {"precondition_frequency": 0}, ValueError, "precondition_frequency is 0"),
    ("SOAP", {"shampoo_beta": 1.0}, ValueError, r"shampoo_beta is 1\.0"),
    ("SOAP", {"power_iterations": 0}, ValueError, "power_iterations is 0"),
    ("SOAPMuon", {"max_precond_dim": 0}, ValueError, "max_precond_dim is 0"),
    ("SGD", {"nesterov": True, "dampening": 0.1}, ValueError, r"dampening=0\.0"),
    ("Lion", {"exp_avg_dtype": torch.uint8}, ValueError, "int8"),
    ("Muon", {"scalar_options": {"exp_avg_dtype": torch.int8}}, ValueError, "without scalar_optimizer"),
    ("Muon", {"scalar_optimizer": "lion", "scalar_options": {"exp_avg_sq_dtype": torch.uint8}}, ValueError,
     r"exp_avg_sq_dtype=torch\.uint8: rule 'lion' has no such option; allowed are exp_avg_dtype"),
    ("AdaptiveMuon", {"backend": "cpp"}, BackendError, "'reference', 'torch', 'triton', or None"),
    ("SOAP", {"backend": "triton"}, BackendError, "pass one of 'reference', 'torch', or None"),
    ("AdamW", {"backend": "cuda"}, BackendError, "backend='cuda' is unknown"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "error", "message"), OPTIONS)
def test_an_illegal_option_is_refused(name, options, error, message):
    with pytest.raises(error, match=message):
        getattr(optim, name)([parameter(3, 3)], **options)


def test_nesterov_without_a_buffer_is_refused():
    with pytest.raises(ValueError, match="momentum_buffer=True"):
        SGD(nesterov=True, momentum_buffer=False)


NUMBERS = [
    ({"lr": "1e-3"}, "lr='1e-3' is"), ({"lr": torch.ones(2)}, r"lr=tensor\(\[1., 1.\]\) is"), ({"lr": -1.0}, "lr=-1"),
    ({"lr": math.inf}, "lr=inf is"), ({"weight_decay": None}, "weight_decay=None is"),
    ({"weight_decay": math.inf}, "weight_decay=inf is"), ({"betas": 0.9}, "betas=0.9 is"),
    ({"betas": (0.9,)}, r"betas=\(0.9,\) are"), ({"lr": 10**400}, "lr=10+ is not allowed"),
]  # fmt: skip
OF_GROUPS = [
    *((name, *case) for name in ("Muon", "SOAP", "NorMuon", "NAMO", "AdamW") for case in NUMBERS),
    ("AdEMAMix", {"alpha": -2.0}, r"alpha=-2.0 is not allowed"),
    (
        Undecayed,
        {"weight_decay": 0.1},
        "weight_decay=0.1 has no effect: formula 'undecayed' never reads it; pass 0.0, or",
    ),
    (Undecayed, {"betas": (0.9, 0.5)}, r"betas=\(0.9, 0.5\): formula 'undecayed' never reads beta2; leave it at 0.99"),
    (Undecayed, {"betas": 0.9}, "betas=0.9 is not allowed; pass 2 numbers of at least 0 and below 1"),
    ("SGD", {"nesterov": True}, "nesterov=True"),
    ("Muon", {"use_muon": False}, r"use_muon=False .* Did you mean 'use_matrix_rule'\?"),
    ("AdamW", {"bets": (0.9, 0.99)}, r"bets=\(0.9, 0.99\) .* Did you mean 'betas'\?"),
    ("AdamW", {"momentum": 0.9}, r"momentum=0.9 .* allowed are amsgrad, betas, "),
    ("AdamW", {"amsgrad": True}, "build it with amsgrad=True"),
    ("SGD", {"amsgrad": True}, "amsgrad=True is not supported"),
    ("Muon", {"ns_steps": 7}, "build it with ns_steps=7"),
    ("AdamW", {"capturable": True}, "capturable=True is not supported; None or False is allowed: it applies to all"),
    ("Muon", {"split_rows": (4, 1)}, r"split_rows=\(4, 1\) does not divide the 6 rows"),
    ("Muon", {"num_heads": 5}, r"num_heads=5 does not divide the 6 rows of a parameter of shape \(6, 4\)"),
    ("Muon", {"split_sizes": (5, 6)}, r"split_sizes=\(5, 6\) are not positive numbers that make up the 6 rows"),
    ("Muon", {"num_heads": 3, "split_rows": (1, 1)}, r"split_rows=\(1, 1\) and num_heads=3: set only one of them"),
]


@pytest.mark.parametrize(("name", "options", "message"), OF_GROUPS)
def test_wrong_numbers_and_keys_are_refused_wherever_given(name, options, message):
    build = getattr(optim, name) if isinstance(name, str) else name
    if options.keys() <= {"lr", "weight_decay", "betas", "alpha"}:
        with pytest.raises(ValueError, match=message):
            build([parameter()], **options)
    with pytest.raises(ValueError, match=message):
        build([{"params": [parameter()], **options}])
    optimizer = build([parameter()])
    with pytest.raises(ValueError, match=message):
        optimizer.add_param_group({"params": [parameter(seed=1)], **options})
    assert len(optimizer.param_groups) == 1


PARAMETERS = [
    ("AdamW", {}, lambda: torch.ones(6, 4)[:, ::2], "holes, overlapping"),
    ("SGD", {}, lambda: torch.ones(1, 4).expand(6, 4), "make it contiguous"),
    ("Lion", {}, lambda: torch._neg_view(torch.ones(3)), "negative bit"),
    ("AdamW", {}, lambda: QuantizedTensor.of(torch.ones(3)), "QuantizedTensor.*fp8_recipe"),
    ("Muon", {}, lambda: QuantizedTensor.of(torch.ones(3, 4)), "not in memory of its own"),
    ("AdamW", {}, lambda: torch.ones(3, dtype=torch.complex64), "view_as_real"),
    ("Muon", {}, lambda: torch.ones(2, 3, 4), r"shape \(2, 3, 4\) is not a matrix for Muon"),
    ("SOAP", {}, lambda: torch.ones(3), r"shape \(3,\) is not a matrix for SOAP; set scalar_optimizer"),
    ("SOAP", {}, lambda: torch.ones(3, 3).double(), r"torch\.float64, but .* keeps float32 states; pass float32 param"),
    ("AdaptiveMuon", {}, lambda: torch.ones(3, 3).double(), r"torch\.float64, but .* keeps float32 states"),
    ("SOAPMuon", {}, lambda: torch.ones(3, 3).double(), r"torch\.float64, but .* keeps float32 states"),
    ("Muown", {}, lambda: torch.ones(3, 3).double(), r"torch\.float64, but .* keeps float32 states"),
    ("SOAP", {"hooks": [CentralizeGradient()]}, lambda: torch.ones(3, 3).double(), "keeps float32 states"),
    ("AdamW", {"mains": "remainder"}, lambda: torch.ones(3).half(), "pass mains='float32'"),
    ("AdamW", {"stochastic_rounding": True}, lambda: torch.ones(3).half(), "stochastic_rounding"),
    ("AdamW", {"mains": "remainder", "stochastic_rounding": True}, lambda: torch.ones(3).bfloat16(),
     "stochastic_rounding=True has no effect"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "options", "param", "message"), PARAMETERS)
def test_a_parameter_that_no_step_could_update_is_refused(name, options, param, message):
    with pytest.raises(ValueError, match=message):
        getattr(optim, name)([nn.Parameter(param())], **options)


def test_a_matrix_that_is_refused_is_named():
    net = nn.Sequential(nn.Linear(8, 24), nn.Linear(24, 4))
    with pytest.raises(MatrixError, match=r"'0\.bias' of shape \(24,\) is not a matrix for Muon"):
        optim.Muon(net)
    with pytest.raises(MatrixError, match=r"'0\.bias' of shape \(24,\) is not a matrix for SOAP"):
        optim.SOAP(net.named_parameters())
    for group in ({"use_matrix_rule": True}, {"split_rows": (2, 1)}):
        with pytest.raises(MatrixError, match=r"shape \(7,\) is not a matrix"):
            optim.Muon([{"params": [parameter(7)], **group}])


SCALAR = {"scalar_optimizer": "lion", "scalar_options": {"stochastic_rounding": True}}
NO_EFFECT = [
    ("AdamW", {"stochastic_rounding": True}, "stochastic_rounding=True has no effect"),
    ("Muon", SCALAR, "stochastic_rounding=True "),
    ("SGD", {"lr": 0.1, "mains": "remainder"}, "mains='remainder' has no effect"),
    ("Lion", {"mains": "float32"}, "mains='float32' has no effect: all parameters are torch.fl"),
]


@pytest.mark.parametrize(("name", "options", "message"), NO_EFFECT)
def test_a_setting_that_affects_no_parameter_is_refused(name, options, message):
    wide = [parameter(2, 3), parameter(3)]
    with pytest.raises(ValueError, match=message):
        getattr(optim, name)(wide, **options)
    getattr(optim, name)([*wide, parameter(3, dtype=torch.bfloat16)], **options)  # it affects another parameter


@pytest.mark.filterwarnings("ignore:optimizer contains a parameter group with duplicate parameters")
@pytest.mark.parametrize("name", ["AdamW", "Muon"])
def test_a_parameter_given_twice_is_refused(name):
    """torch.optim warns and updates it twice; one fused sweep would race with itself."""
    param = parameter(3, 3)
    with pytest.raises(ValueError, match=r"parameter 1 of a group, of shape \(3, 3\), is also parameter 0"):
        getattr(optim, name)([param, param])
    optimizer = getattr(optim, name)([parameter(2, 2)])
    with pytest.raises(ValueError, match="pass each parameter once"):
        optimizer.add_param_group({"params": [param, param]})
    assert len(optimizer.param_groups) == 1


@pytest.mark.parametrize("cut", [(slice(8), slice(6, 12)), (slice(4), slice(4, 7), slice(4))])
@pytest.mark.parametrize("in_groups", [False, True])
def test_parameters_that_share_memory_are_refused(cut, in_groups):
    data = torch.zeros(12)
    params = [nn.Parameter(data[part]) for part in cut]
    with pytest.raises(ValueError, match=r"share memory; tie parameters by using one nn\.Parameter twice"):
        optim.AdamW([{"params": [param]} for param in params] if in_groups else params)
    step(optim.AdamW([nn.Parameter(data[:8]), nn.Parameter(data[8:8]), nn.Parameter(data[8:])], lr=0.1), 0)
    assert (data != 0).all()


def test_capturable_steps_that_cannot_be_replayed_are_refused(monkeypatch):
    monkeypatch.setattr(on_device, "DEVICES", ("cpu",))
    for cls, options, message in (
        (optim.AdamW, {"hooks": (RelativeUpdate(),)}, "hooks .* which allocate memory in every step"),
        (optim.AdamW, {"backend": "torch"}, "a backend that reads numbers on the host; pass backend=None or 'triton'"),
        (optim.SOAP, {}, "rule 'soap', which reads numbers on the host"),
    ):
        with pytest.raises(ValueError, match=f"capturable=True with {message}"):
            cls([parameter()], capturable=True, **options)


@pytest.mark.parametrize("name", CLASSES)
def test_an_optimizer_of_another_library_is_answered(name: str) -> None:
    """`from opt_kernels import AdamW8bit` said that it cannot be imported."""
    with pytest.raises(ImportError, match=f"opt_kernels has no {name}; write ") as caught:
        getattr(opt_kernels, name)
    line = caught.value.msg.partition("; write ")[2].partition(";")[0]
    for expression in re.findall(r"opt_kernels\.\w+(?:\([^)]*\))?", line):
        made = eval(expression, {"opt_kernels": opt_kernels, "torch": torch, "params": [nn.Parameter(torch.zeros(4))]})
        assert isinstance(made, torch.optim.Optimizer) or issubclass(made, torch.optim.Optimizer)
