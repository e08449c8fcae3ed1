"""Muon, AdaptiveMuon and SOAP as drop-in torch optimizers."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from elementwise_works import device_of, on
from torch import Tensor, nn

from opt_kernels.hooks import HookError
from opt_kernels.matrices import Decay
from opt_kernels.optim import NAMO, SOAP, Adam, AdaptiveMuon, Lion, Muon, MuonH, NorMuon, RuleOptimizer, SOAPMuon
from opt_kernels.rules import AdaptiveMuonRule, MuonRule, Rule, SOAPRule
from opt_kernels.works import Batch, Hyper, Work


def model(seed: int = 0) -> nn.Sequential:
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(8, 24), nn.Tanh(), nn.Linear(24, 4))


def train(net: nn.Module, optimizer: torch.optim.Optimizer, num_steps: int, *, seed: int = 1) -> list[float]:
    """The losses of a few steps on one batch."""
    generator = torch.Generator().manual_seed(seed)
    x, y = torch.randn(32, 8, generator=generator), torch.randn(32, 4, generator=generator)
    losses = []
    for _ in range(num_steps):
        optimizer.zero_grad()
        loss = (net(x) - y).square().mean()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


Params = Iterator[nn.Parameter]
MAKERS: dict[str, Callable[[Params], RuleOptimizer]] = {
    "muon": lambda params: Muon(params, lr=0.02, adjust_lr_fn="match_rms_adamw", scalar_optimizer="adam"),
    "muon_with_lion": lambda params: Muon(
        params, lr=0.01, scale_mode="spectral", extra_scale_factor=0.2, nesterov=False, scalar_optimizer="lion"
    ),
    "adamuon": lambda params: AdaptiveMuon(params, lr=0.01, extra_scale_factor=0.05, scalar_optimizer="adam"),
    "normuon_preset": lambda params: NorMuon(params, lr=0.02, lines="longer", scalar_optimizer="adam"),
    "namo": lambda params: NAMO(params, lr=0.02, extra_scale_factor=0.2, scalar_optimizer="adam"),
    "soap": lambda params: SOAP(params, lr=0.02, scalar_optimizer="adam"),
    "soap_one_sided": lambda params: SOAP(params, lr=0.02, one_sided=True, scalar_optimizer="adam"),
    "soap_megatron": lambda params: SOAP(
        params, lr=0.02, order="megatron", use_kl_shampoo=False, scalar_optimizer="adam"
    ),
    "soap_muon": lambda params: SOAPMuon(params, lr=0.02, scalar_optimizer="adam"),
    "narrow": lambda params: Muon(
        params, lr=0.02, adjust_lr_fn="match_rms_adamw", scalar_optimizer="adam", momentum_buffer_dtype=torch.int8
    ),
}


@pytest.mark.parametrize("kind", MAKERS)
def test_a_network_learns(kind: str) -> None:
    net = model()
    losses = train(net, MAKERS[kind](net.parameters()), 40)
    # Of random targets a third can be learned at these rates; a step in a wrong direction learns nothing.
    assert losses[-1] < 0.7 * losses[0]


@pytest.mark.parametrize(("name", "peer"), [("adam", Adam), ("lion", Lion)])
def test_what_is_no_matrix_moves_by_the_scalar_optimizer(name: str, peer: type[RuleOptimizer]) -> None:
    net, other = model(), model()
    options = {"lr": 0.01, "betas": (0.9, 0.95), "weight_decay": 0.1}
    optimizer = Muon(net.parameters(), scalar_optimizer=name, **options)  # type: ignore[arg-type]
    vectors = [p for p in other.parameters() if p.dim() == 1]
    if peer is Adam:
        options["decoupled_weight_decay"] = True
    of_vectors = peer(vectors, **options)  # type: ignore[arg-type]
    for a, b in zip(net.parameters(), other.parameters()):
        a.grad = torch.randn(a.shape, generator=torch.Generator().manual_seed(a.numel()))
        b.grad = a.grad.clone()
    optimizer.step()
    of_vectors.step()
    moved = [p for p in net.parameters() if p.dim() == 1]
    assert all(torch.equal(a, b) for a, b in zip(moved, vectors))
    states = [set(optimizer.state[p]) for p in net.parameters()]
    assert states[0] == {"step", "momentum_buffer"} != states[1]


def test_a_group_may_keep_its_matrices_from_muon() -> None:
    embedding, weight = nn.Parameter(torch.randn(16, 8)), nn.Parameter(torch.randn(16, 8))
    groups: list[dict[str, Any]] = [{"params": [embedding], "use_matrix_rule": False}, {"params": [weight]}]
    optimizer = Muon(groups, scalar_optimizer="adam")
    embedding.grad, weight.grad = torch.randn(16, 8), torch.randn(16, 8)
    optimizer.step()
    assert "exp_avg" in optimizer.state[embedding]
    assert "momentum_buffer" in optimizer.state[weight]


def test_a_group_may_give_stacks_of_matrices_to_muon() -> None:
    stack = nn.Parameter(torch.zeros(3, 4, 4))
    stack.grad = torch.randn(3, 4, 4, generator=torch.Generator().manual_seed(0))
    group = {"params": [stack], "use_matrix_rule": True}
    Muon([group], lr=1.0, weight_decay=0.0, scale_mode="spectral", coefficient_type="quintic").step()
    # Each matrix of the stack has become as orthogonal as five bf16 steps make it: norm 2 x sqrt(4).
    norms = torch.linalg.matrix_norm(stack.detach())
    torch.testing.assert_close(norms, torch.full((3,), 4.0), rtol=0.05, atol=0)


def test_a_group_may_have_heads_and_matrices_of_any_sizes() -> None:
    grad = torch.randn(12, 8)

    def moved(grad: Tensor, **group: Any) -> Tensor:
        weight = nn.Parameter(torch.zeros_like(grad))
        weight.grad = grad.clone()
        Muon([{"params": [weight], **group}], lr=1.0, fp32_matmul_prec="highest").step()
        return weight.detach()

    def apart(*sizes: int) -> Tensor:
        return torch.cat([moved(part) for part in grad.split(sizes)])

    close = {"rtol": 0.0, "atol": 1e-4}
    torch.testing.assert_close(moved(grad, num_heads=3), apart(4, 4, 4), **close)
    torch.testing.assert_close(moved(grad, split_sizes=(5, 1, 6)), apart(5, 1, 6), **close)
    torch.testing.assert_close(moved(grad, num_heads=1), moved(grad), **close)
    # As JSON and YAML bring them back.
    torch.testing.assert_close(moved(grad, num_heads=3, split_rows=[]), apart(4, 4, 4), **close)
    assert not torch.allclose(moved(grad, num_heads=3), moved(grad), atol=0.1)


def test_muonh_keeps_the_norm_of_every_matrix_and_of_matrices_alone() -> None:
    net = model()
    norms = [float(p.detach().norm()) for p in net.parameters()]
    losses = train(net, MuonH(net, lr=0.05, scalar_optimizer="adam"), 40)
    assert losses[-1] < 0.7 * losses[0]
    for norm, p in zip(norms, net.parameters()):
        assert (float(p.detach().norm()) == pytest.approx(norm, rel=1e-5)) is (p.dim() == 2)
    weight = nn.Parameter(torch.randn(4, 4))
    with pytest.raises(HookError, match=r"weight_decay=0\.1"):
        MuonH([weight], weight_decay=0.1)


@pytest.mark.parametrize("mains", ["float32", "remainder"])
@pytest.mark.parametrize("maker", [Muon, AdaptiveMuon, SOAP])
def test_bf16_parameters_with_mains_follow_fp32_ones(maker: Callable[..., RuleOptimizer], mains: str) -> None:
    start = torch.randn(12, 8).bfloat16()
    narrow, wide = nn.Parameter(start.clone()), nn.Parameter(start.float())
    optimizers = [maker([narrow], lr=1e-3, mains=mains), maker([wide], lr=1e-3)]
    for seed in range(20):
        grad = torch.randn(12, 8, generator=torch.Generator().manual_seed(seed)).bfloat16()
        narrow.grad, wide.grad = grad, grad.float()
        for optimizer in optimizers:
            optimizer.step()
    # Half a unit of bf16 at the largest weight, 4: what rounding the last main once may cost, not twenty updates.
    torch.testing.assert_close(narrow.float(), wide.detach(), rtol=0, atol=0.0157)
    assert torch.equal(narrow, wide.detach().bfloat16()) or mains == "remainder"


INFINITE: dict[str, tuple[Callable[..., Rule], float]] = {
    **{f"muon, {decay.value}": (lambda d=decay, **o: MuonRule(weight_decay_method=d, **o), 0.0) for decay in Decay},
    **{
        f"adaptive, {decay.value}": (
            lambda d=decay, **o: AdaptiveMuonRule(muon=MuonRule(weight_decay_method=d, **o)), 0.0
        )
        for decay in Decay
    },
    # The reference and Triton took the decay off it, infinity less infinity.
    "decoupled decay": (lambda **o: MuonRule(weight_decay_method=Decay.DECOUPLED, **o), 0.1),
    "independent decay": (lambda **o: MuonRule(weight_decay_method=Decay.INDEPENDENT, **o), 0.1),
    "soap": (lambda **o: SOAPRule(), 0.0),
}  # fmt: skip


@on("reference", "torch", "triton")
@pytest.mark.parametrize("name", INFINITE)
def test_an_infinite_weight_stays_infinite_as_torchs(name: str, backend: str) -> None:
    make, decay = INFINITE[name]
    rule, main = make(backend=backend), torch.full((6, 4), torch.inf, device=device_of(backend))
    work = Work(grad=torch.randn(6, 4).to(main), main=main, state=rule.init_state(main))
    for step in (1, 2):
        rule.update_([Batch(Hyper(lr=0.1, weight_decay=decay, step=step), [work])])
    assert bool((main == torch.inf).all())


# --- embeddings and output layers -------------------------------------------------------------------------------------


class Tagger(nn.Module):
    """A stock model: nothing is marked."""

    def __init__(self, *, tied: bool = False) -> None:
        super().__init__()
        self.wte, self.hidden = nn.Embedding(9, 4), nn.Linear(4, 4)
        self.lm_head = nn.Linear(4, 9, bias=False)
        if tied:
            self.lm_head.weight = self.wte.weight


def by_muon(net: nn.Module, optimizer: Any) -> set[str]:
    rules = {id(p): optimizer.rule_of(group, p) for group in optimizer.param_groups for p in group["params"]}
    return {name for name, p in net.named_parameters() if rules[id(p)] is optimizer.rule}


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize("cls", [Muon, AdaptiveMuon, SOAP])
def test_given_the_model_embeddings_and_output_layers_are_not_moved_as_matrices(cls: Any, tied: bool) -> None:
    net = Tagger(tied=tied)
    assert by_muon(net, cls(net, scalar_optimizer="adam")) == {"hidden.weight"}


@pytest.mark.parametrize(("name", "answer"), [("lm_head", False), ("hidden", True)])
def test_an_attribute_of_a_parameter_has_the_last_word(name: str, answer: bool) -> None:
    net = Tagger()
    net.get_submodule(name).weight.is_embedding_or_output_parameter = answer  # type: ignore[union-attr]
    assert (f"{name}.weight" in by_muon(net, Muon(net, scalar_optimizer="adam"))) is not answer


def test_names_of_embeddings_and_heads_are_warned_of_unless_the_caller_chose() -> None:
    # Embeddings and heads of a Hugging Face GPT-2 were orthogonalised without a word.
    with pytest.warns(UserWarning, match=r"'wte\.weight', 'lm_head\.weight': updated as hidden matrices"):
        Muon(Tagger().named_parameters(), scalar_optimizer="adam")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        Muon([{"params": [*Tagger().named_parameters()], "use_matrix_rule": False}], scalar_optimizer="adam")
        Muon(Tagger(), scalar_optimizer="adam")
