"""Muon, AdaptiveMuon and SOAP as drop-in torch optimizers."""

import copy
import warnings
from dataclasses import replace

import pytest
import torch
from drop_ins import layers, parameter, params_of, same, step
from elementwise_works import device_of, on
from matrix_works import tensor
from torch import nn

from opt_kernels import MatrixError, StateDictError
from opt_kernels.hooks import HookError
from opt_kernels.matrices import CoefficientType, Decay, PostNorm, PreNorm, ScaleMode
from opt_kernels.matrices.coefficients import Coefficients
from opt_kernels.optim import NAMO, SOAP, Adam, AdaptiveMuon, Lion, Muon, MuonH, Muown, NorMuon, Scion, SOAPMuon
from opt_kernels.rules import AdaptiveMuonRule, Lines, MuonRule, MuownRule, Order, SecondMoment, SOAPMuonRule, SOAPRule
from opt_kernels.works import Batch, Hyper, Work

INT8 = {"momentum_buffer_dtype": torch.int8}
SPECTRAL = MuonRule(scale_mode=ScaleMode.SPECTRAL)
RULES = [
    (Muon, {"nesterov": False, "ns_steps": 3, "eps": 1e-3, "scale_mode": "mup", "weight_decay_method": "l2"},
     MuonRule(num_ns_steps=3, eps=1e-3, scale_mode=ScaleMode.MUP, weight_decay_method=Decay.L2,
              coefficient_type=CoefficientType.CUSTOM, custom_coefficients=(Coefficients(3.4445, -4.775, 2.0315),))),
    (Muon, {"coefficient_type": "aol", **INT8, "backend": "torch"},
     replace(MuonRule(coefficient_type=CoefficientType.AOL, **INT8), backend="torch", nesterov=True, eps=1e-7,
             scale_mode=ScaleMode.SHAPE_SCALING)),
    (AdaptiveMuon, {"moment2_method": "adamuon_paper", "extra_scale_factor": 0.2, "scale_mode": "spectral"},
     AdaptiveMuonRule(muon=replace(SPECTRAL, extra_scale_factor=0.2), second_moment=SecondMoment.ADAMUON_PAPER)),
    (NorMuon, {"lines": "longer", "nesterov": True},
     AdaptiveMuonRule(muon=replace(SPECTRAL, scale_mode=ScaleMode.MATCH_RMS_ADAMW, nesterov=True),
                      second_moment=SecondMoment.NORMUON, lines=Lines.LONGER)),
    (Scion, {"extra_scale_factor": 50.0},
     MuonRule(scale_mode=ScaleMode.UNIT_RMS_NORM, eps=1e-7, extra_scale_factor=50.0)),
    (Muon, {"scale_mode": "spectral", "coefficient_type": "quintic", "pre_norm": "rows", "post_norm": "cols"},
     replace(SPECTRAL, nesterov=True, eps=1e-7, pre_norm=PreNorm.ROWS, post_norm=PostNorm.COLS)),
    (Muown, {"num_ns_steps": 3, "scale_mode": "mup"}, MuownRule(num_ns_steps=3, scale_mode=ScaleMode.MUP)),
    (NAMO, {"scale_mode": "spectral"}, AdaptiveMuonRule(muon=SPECTRAL, second_moment=SecondMoment.NAMO)),
    (SOAP, {"order": "megatron", "use_kl_shampoo": False, "precondition_frequency": 3},
     SOAPRule(order=Order.MEGATRON, use_kl_shampoo=False, precondition_frequency=3)),
    (SOAPMuon, {"shampoo_beta": 0.5, "scale_mode": "mup"}, SOAPMuonRule(shampoo_beta=0.5, scale_mode=ScaleMode.MUP)),
]  # fmt: skip


@pytest.mark.parametrize(("cls", "options", "rule"), RULES)
def test_options_of_a_drop_in_are_those_of_its_rule(cls, options, rule):
    assert cls([nn.Parameter(torch.ones(2, 2))], **options).rule == rule


@pytest.mark.parametrize("steps", [0, 2])
def test_a_copy_updates_marked_matrices_by_the_same_rule(steps):
    """Symptom: `nn.Parameter` loses its attributes in a copy, and the matrix rule updated what it must not."""
    weights = [parameter(4, 4), parameter(4, 4, seed=1)]
    weights[1]._no_weight_decay = True
    optimizer = Muon(weights, lr=0.01, weight_decay=0.0, scalar_optimizer="adam")
    step(optimizer, *range(steps))
    other = copy.deepcopy(optimizer)
    assert same(step(other, 7, 8), step(optimizer, 7, 8))


def test_a_gradient_not_finite_is_refused_before_any_write():
    """Symptom: SOAP said that nothing was written, but other parameters had been updated."""
    weights = [parameter(4), parameter(4, 4), parameter(5, 4)]
    optimizer = SOAP(weights, lr=0.01, scalar_optimizer="adam")
    step(optimizer, 0, 1)
    before = copy.deepcopy((optimizer.state_dict(), weights))
    for param in weights:
        param.grad = torch.ones_like(param)
    weights[2].grad[0, 0] = torch.inf
    with pytest.raises(
        MatrixError, match=r"gradient of a parameter of shape \(5, 4\) is not finite; nothing was written"
    ):
        optimizer.step()
    torch.testing.assert_close((optimizer.state_dict(), weights), before, rtol=0, atol=0)


@pytest.mark.parametrize(
    ("name", "peer"), [("adam", lambda *params, **o: Adam(*params, decoupled_weight_decay=True, **o)), ("lion", Lion)]
)
def test_what_is_no_matrix_moves_by_the_scalar_optimizer(name, peer):
    net = layers(8, 24, 4)
    other = layers(8, 24, 4)
    options = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer = Muon(net.parameters(), scalar_optimizer=name, **options)
    vectors = [p for p in other.parameters() if p.dim() == 1]
    for a, b in zip(net.parameters(), other.parameters()):
        a.grad = b.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(a.numel()))
    optimizer.step()
    peer(vectors, **options).step()
    assert all(map(torch.equal, [p for p in net.parameters() if p.dim() == 1], vectors))
    states = [set(optimizer.state[p]) for p in net.parameters()]
    assert states[0] == {"step", "momentum_buffer"} != states[1]


def test_muonh_keeps_the_norm_of_matrices_only():
    net = layers(8, 24, 4)
    optimizer = MuonH(net, lr=0.05, scalar_optimizer="adam")
    norms = [float(p.detach().norm()) for p in net.parameters()]
    step(optimizer, 0, 1, 2)
    for norm, p in zip(norms, net.parameters()):
        assert (float(p.detach().norm()) == pytest.approx(norm, rel=1e-5)) is (p.dim() == 2)
    with pytest.raises(HookError, match=r"weight_decay=0\.1"):
        MuonH([nn.Parameter(torch.randn(4, 4))], weight_decay=0.1)


def moved(cls, start, *grads, **group):
    param = nn.Parameter(start.clone())
    exact = {} if cls is SOAP else {"fp32_matmul_prec": "highest"}
    optimizer = cls([{"params": [param], **group}], lr=0.1, **exact)
    for grad in grads:
        param.grad = grad.clone()
        optimizer.step()
    return param.detach()


GROUPS = [
    ({"num_heads": 3, "split_rows": []}, [[0, 1, 2, 3], [4, 5, 6, 7], [8, 9, 10, 11]]),  # as JSON and YAML restore ()
    ({"split_sizes": (8, 1, 3)}, [[*range(8)], [8], [9, 10, 11]]),
    ({"split_rows": (4, 1, 1)}, [[0, 1, 2, 3, 6, 7, 8, 9], [4, 10], [5, 11]]),
]


@pytest.mark.parametrize("cls", [Muon, SOAP, SOAPMuon])
def test_heads_parts_and_fused_rows_are_updated_like_parameters(cls):
    whole = tensor(4, 12, 4)  # weights and gradients, of heads that are square: null spaces are bases of rounding
    for group, matrices in GROUPS:
        found = moved(cls, *whole, **group)
        for rows in matrices:
            torch.testing.assert_close(found[rows], moved(cls, *whole[:, rows]), rtol=0, atol=1e-4)


def test_soap_resumes_with_the_same_split_and_refuses_another():
    def built(**group):
        return SOAP([{"params": [parameter(12, 7)], **group}], lr=0.1)

    optimizer = built(split_rows=(4, 1, 1))
    resumed = built(split_rows=[4, 1, 1])
    (weight,) = step(optimizer, 0, 1, 2)
    saved = copy.deepcopy(optimizer.state_dict())
    resumed.load_state_dict(saved)
    params_of(resumed)[0].data.copy_(weight)
    assert same(step(resumed, 3), step(optimizer, 3))
    # (8, 2, 2) rows make factors of the same sizes, of other rows.
    for group in ({}, {"num_heads": 3}, {"split_sizes": (8, 2, 2)}):
        refusing = built(**group)
        with pytest.raises(StateDictError, match=r"'split_rows': \(4, 1, 1\)"):
            refusing.load_state_dict(saved)
        assert not refusing.state
    for name in ("split_rows", "num_heads", "split_sizes"):  # as saved before SOAP had splits
        del saved["param_groups"][0][name]
    with pytest.raises(StateDictError, match=r"with \{.*'num_heads': 1.*\}, but here .*'num_heads': 3"):
        built(num_heads=3).load_state_dict(saved)


INFINITE = [
    (SOAPRule(), 0.0),
    *((MuonRule(weight_decay_method=decay), 0.0 if decay is Decay.L2 else 0.1) for decay in Decay),
    *((MuonRule(weight_decay_method=decay), 0.0) for decay in (Decay.DECOUPLED, Decay.INDEPENDENT)),
    *((AdaptiveMuonRule(muon=MuonRule(weight_decay_method=decay)), 0.0) for decay in Decay),
]


@on("reference", "torch", "triton")
def test_an_infinite_weight_stays_infinite_as_torchs(backend):
    for rule, decay in INFINITE:
        if isinstance(rule, AdaptiveMuonRule):
            rule = replace(rule, muon=replace(rule.muon, backend=backend))
        elif isinstance(rule, MuonRule):
            rule = replace(rule, backend=backend)
        main = torch.full((6, 4), torch.inf, device=device_of(backend))
        work = Work(grad=torch.randn(6, 4).to(main), main=main, state=rule.init_state(main))
        for number in (1, 2):
            rule.update_([Batch(Hyper(lr=0.1, weight_decay=decay, step=number), [work])])
        assert bool((main == torch.inf).all()), (rule, decay)


class Tagger(nn.Module):
    def __init__(self, *, tied=False):
        super().__init__()
        self.wte = nn.Embedding(9, 4)
        self.hidden = nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 9, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


def by_matrix_rule(net, cls=Muon):
    optimizer = cls(net, scalar_optimizer="adam")
    rules = {p: optimizer.rule_of(group, p) for group in optimizer.param_groups for p in group["params"]}
    return {name for name, p in net.named_parameters() if rules[p] is optimizer.rule}


def test_given_a_model_embeddings_and_heads_are_not_matrices():
    for cls in (Muon, SOAP):
        for tied in (False, True):
            assert by_matrix_rule(Tagger(tied=tied), cls) == {"hidden.weight"}
    for name, answer, expected in (("lm_head", False, {"lm_head.weight", "hidden.weight"}), ("hidden", True, set())):
        net = Tagger()  # an attribute of a parameter has the last word
        net.get_submodule(name).weight.is_embedding_or_output_parameter = answer
        assert by_matrix_rule(net) == expected


def test_embeddings_and_heads_warn_unless_the_caller_chose():
    with pytest.warns(UserWarning, match=r"'wte\.weight', 'lm_head\.weight': updated as hidden matrices"):
        Muon(Tagger().named_parameters(), scalar_optimizer="adam")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Muon([{"params": [*Tagger().named_parameters()], "use_matrix_rule": False}], scalar_optimizer="adam")
        Muon(Tagger(), scalar_optimizer="adam")


class Hybrid(nn.Module):
    """A hidden matrix, a bias, and stacks of vectors of experts, of Mamba and of an author's mark."""

    def __init__(self, dtype=torch.float32):
        super().__init__()
        self.A_log = parameter(4, 3, dtype=dtype)
        self.dt_bias = parameter(4)
        self.marked = parameter(4, 5)
        self.gate_up_proj_bias = parameter(2, 4, seed=1, dtype=dtype)
        self.fc = nn.Linear(4, 4).to(dtype)
        self.q_norm = nn.LayerNorm((2, 3))
        self.marked._no_weight_decay = True


STACKS = {"A_log", "marked", "gate_up_proj_bias", "q_norm.weight", "q_norm.bias"}


def names_of(net, params):
    return {name for name, param in net.named_parameters() if any(param is other for other in params)}


@pytest.mark.parametrize("cls", [Muon, SOAP])
def test_stacks_of_vectors_have_no_decay_and_no_matrix_rule(cls):
    """Symptom: Muon(model) orthogonalised the biases of gpt-oss's experts and Mamba's A_log."""
    net = Hybrid()
    assert by_matrix_rule(net, cls) == {"fc.weight"}
    groups = cls(net, scalar_optimizer="adam", weight_decay=0.1).param_groups
    assert [group["weight_decay"] for group in groups] == [0.1, 0.1, 0.0]
    assert names_of(net, groups[1]["params"]) == {"fc.bias"}
    assert names_of(net, groups[2]["params"]) == {*STACKS, "dt_bias"}
    net.A_log._no_weight_decay = False
    assert by_matrix_rule(net, cls) == {"fc.weight", "A_log"}


def test_stacks_of_vectors_have_no_matrix_rule_but_a_named_decay():
    net = Hybrid()
    with pytest.warns(UserWarning, match="weight decay of a bias or of another parameter that by its name") as warned:
        optimizer = Muon(net.named_parameters(), scalar_optimizer="adam")
    assert all(repr(name) in str(warned[0].message) for name in (*STACKS, "dt_bias"))
    (group,) = optimizer.param_groups
    assert names_of(net, [p for p in group["params"] if optimizer.rule_of(group, p) is optimizer.rule]) == {"fc.weight"}
    with pytest.warns(UserWarning, match=r"a parameter of shape \(4, 5\): weight decay"):  # its mark needs no name
        optimizer = Muon([net.marked, net.fc.weight], scalar_optimizer="adam")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Muon(net.named_parameters(), scalar_optimizer="adam", weight_decay=0.0)


@pytest.mark.parametrize("mains", ["param", "float32"])
@pytest.mark.parametrize("cls", [Muon, SOAP])
def test_a_state_from_before_stacks_of_vectors_were_known_loads(cls, mains, caplog):
    """In the groups of that release, Muon(model) kept matrices, and all other parameters after them."""
    options = {"scalar_optimizer": "adam", "weight_decay": 0.1, "mains": mains}
    dtype = torch.bfloat16 if mains == "float32" else torch.float32
    net = Hybrid(dtype)
    other = Hybrid(dtype)
    matrices = [net.A_log, net.gate_up_proj_bias, net.fc.weight]
    rest = [net.dt_bias, net.fc.bias]
    for module in (net, other):
        for name in ("marked", "q_norm"):
            delattr(module, name)
    saving = cls([{"params": matrices}, {"params": rest, "use_matrix_rule": False}], **options)
    step(saving, 0)
    saving.param_groups[0]["lr"] = saving.param_groups[1]["lr"] = 0.25
    loading = cls(other, **options)
    for resumed in (loading, copy.deepcopy(loading)):
        caplog.clear()
        resumed.load_state_dict(saving.state_dict())
        groups = [(group["lr"], group["weight_decay"], len(group["params"])) for group in resumed.param_groups]
        assert groups == [(0.25, 0.1, 1), (0.25, 0.1, 1), (0.25, 0.0, 3)]
        states = [resumed.state[param] for group in resumed.param_groups for param in group["params"]]
        steps = [float(state["step"]) for state in states]
        assert steps == [1.0, 1.0, 0.0, 1.0, 0.0]  # fc.weight; fc.bias; A_log, dt_bias, gate_up_proj_bias
        assert same([states[3]["exp_avg"]], [saving.state[net.dt_bias]["exp_avg"]])
        if mains == "float32":
            assert same([states[2]["main"]], [saving.state[net.A_log]["main"]])
        (record,) = caplog.records
        assert "'A_log' of shape (4, 3), 'gate_up_proj_bias' of shape (2, 4): biases" in record.getMessage()


def test_entries_of_former_groups_bring_no_decay_back():
    """A checkpoint by parameters gives a group the entries that its parameter was saved with."""
    net = nn.Module()
    net.fc = nn.Linear(4, 4, bias=False)
    net.A_log = parameter(4, 3)
    saving = Muon([net.A_log, net.fc.weight], weight_decay=0.1)
    step(saving, 0)
    loading = Muon(net, scalar_optimizer="adam", weight_decay=0.1)
    saved = saving.state_dict()
    (of_all,) = saved["param_groups"]
    saved["param_groups"] = [{**of_all, "params": [1]}, {**of_all, "params": [0]}]
    loading.load_state_dict(saved)
    assert [group["weight_decay"] for group in loading.param_groups] == [0.1, 0.0]
    assert [group["use_matrix_rule"] for group in loading.param_groups] == [None, False]
    loading.param_groups[1]["weight_decay"] = 0.05  # the caller's own decay is restored
    again = Muon(net, scalar_optimizer="adam", weight_decay=0.1)
    again.load_state_dict(loading.state_dict())
    assert again.param_groups[1]["weight_decay"] == 0.05
