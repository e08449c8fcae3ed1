"""SOAP of rows that are matrices of their own: what it does to the parts as parameters."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from opt_kernels import MatrixError, StateDictError
from opt_kernels.optim import SOAP, SOAPMuon
from opt_kernels.rules import SOAPMuonRule, SOAPRule, init_state
from opt_kernels.works import Batch, Hyper, MatrixSpec, Work

ROWS, COLS, STEPS = 12, 7, 4
MAKERS: dict[str, Callable[..., Any]] = {
    "kl": lambda params: SOAP(params, lr=0.1),
    "plain": lambda params: SOAP(params, lr=0.1, use_kl_shampoo=False, precondition_frequency=2),
    "megatron": lambda params: SOAP(params, lr=0.1, order="megatron"),
    "one_sided": lambda params: SOAP(params, lr=0.1, one_sided=True),  # the left of flat parts, the right of tall ones
    "limited": lambda params: SOAP(params, lr=0.1, max_precond_dim=7),  # no left factor of parts with 8 rows
    "soap_muon": lambda params: SOAPMuon(params, lr=0.1, fp32_matmul_prec="highest"),
}


def tensors(*shape: int) -> list[Tensor]:
    """A start, and a gradient for each step."""
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(1 + STEPS)]


def trained(
    maker: Callable[..., Any], params: list[nn.Parameter], grads: list[list[Tensor]], **group: Any
) -> list[Tensor]:
    optimizer = maker([{"params": params, **group}])
    for of_step in grads:
        for param, grad in zip(params, of_step, strict=True):
            param.grad = grad.clone()
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("kind", MAKERS)
@pytest.mark.parametrize("sizes", [(8, 1, 3), (3, 9)], ids=str)
def test_parts_of_any_sizes_are_updated_as_separate_parameters(kind: str, sizes: tuple[int, ...]) -> None:
    start, *grads = tensors(ROWS, COLS)
    (got,) = trained(MAKERS[kind], [nn.Parameter(start.clone())], [[grad] for grad in grads], split_sizes=sizes)
    parts = [nn.Parameter(part.clone()) for part in start.split(sizes)]
    apart = trained(MAKERS[kind], parts, [list(grad.split(sizes)) for grad in grads])
    assert torch.equal(got, torch.cat(apart))
    (whole,) = trained(MAKERS[kind], [nn.Parameter(start.clone())], [[grad] for grad in grads])
    assert not torch.allclose(got, whole, atol=1e-2)


@pytest.mark.parametrize("kind", MAKERS)
def test_heads_move_as_the_matrices_of_a_stack(kind: str) -> None:
    start, *grads = tensors(ROWS, COLS)
    (got,) = trained(MAKERS[kind], [nn.Parameter(start.clone())], [[grad] for grad in grads], num_heads=3)
    stack = nn.Parameter(start.clone().view(3, 4, COLS))
    (stacked,) = trained(MAKERS[kind], [stack], [[grad.view(3, 4, COLS)] for grad in grads], use_matrix_rule=True)
    assert torch.equal(got, stacked.view(ROWS, COLS))


@pytest.mark.parametrize("kind", MAKERS)
def test_query_key_and_value_of_all_groups_move_as_three_parameters(kind: str) -> None:
    """Rows (4, 1, 1) in each of two query groups: q has rows 0-3 and 6-9, k has 4 and 10, v has 5 and 11."""
    start, *grads = tensors(ROWS, COLS)
    rows = [[0, 1, 2, 3, 6, 7, 8, 9], [4, 10], [5, 11]]
    (got,) = trained(MAKERS[kind], [nn.Parameter(start.clone())], [[grad] for grad in grads], split_rows=(4, 1, 1))
    for of_part in rows:  # one by one: k and v of one shape would be stacked, with other last bits
        part = nn.Parameter(start[of_part].clone())
        (apart,) = trained(MAKERS[kind], [part], [[grad[of_part]] for grad in grads])
        assert torch.equal(got[of_part], apart)


@pytest.mark.parametrize("matrix", [MatrixSpec(split_rows=(2,), by_group=True), MatrixSpec(split_rows=(2, 1, 1))])
@pytest.mark.parametrize("rule", [SOAPRule(), SOAPMuonRule()], ids=["soap", "soap_muon"])
def test_stacks_of_split_matrices_move_as_each_does(rule: SOAPRule | SOAPMuonRule, matrix: MatrixSpec) -> None:
    def moved(main: Tensor, grads: list[Tensor]) -> Tensor:
        state = init_state(rule, main, matrix)
        for step, grad in enumerate(grads, start=1):
            hyper = Hyper(lr=0.1, weight_decay=0.1, step=step)
            rule.update_([Batch(hyper, [Work(grad=grad, main=main, state=state, matrix=matrix)])])
        return main

    start, *grads = tensors(3, 8, 5)
    together = moved(start.clone(), grads)
    alone = [moved(start[index].clone(), [grad[index] for grad in grads]) for index in range(3)]
    # Products of batches run in another order: Newton-Schulz in bfloat16 makes more of it.
    torch.testing.assert_close(together, torch.stack(alone), rtol=0, atol=5e-2 if rule.name == "soap_muon" else 1e-5)


def test_state_of_another_split_is_refused_by_the_rule() -> None:
    rule, main = SOAPRule(), torch.randn(6, 6)
    matrix = MatrixSpec(split_rows=(2,), by_group=True)
    work = Work(grad=torch.randn(6, 6), main=main, state=rule.init_state(main), matrix=matrix)
    with pytest.raises(MatrixError, match=r"state 'L' has shape \(6, 6\), but for rows split as '2-each' its shape is"):
        rule.update_([Batch(Hyper(lr=0.1, step=2), [work])])


def test_a_state_dict_goes_on_with_the_same_split_and_is_refused_with_another() -> None:
    start, *grads = tensors(ROWS, COLS)

    def made(**group: Any) -> tuple[nn.Parameter, SOAP]:
        weight = nn.Parameter(start.clone())
        return weight, SOAP([{"params": [weight], **group}], lr=0.1)

    def step(weight: nn.Parameter, optimizer: SOAP, grad: Tensor) -> None:
        weight.grad = grad.clone()
        optimizer.step()

    weight, optimizer = made(split_rows=(4, 1, 1))
    for grad in grads[:3]:
        step(weight, optimizer, grad)
    saved, then = copy.deepcopy(optimizer.state_dict()), weight.detach().clone()
    step(weight, optimizer, grads[3])
    resumed, again = made(split_rows=[4, 1, 1])
    again.load_state_dict(saved)
    resumed.data.copy_(then)
    step(resumed, again, grads[3])
    assert torch.equal(resumed, weight)
    # (8, 2, 2) rows make factors of the same sizes, of other rows.
    for other in ({}, {"num_heads": 3}, {"split_sizes": (8, 2, 2)}):
        _, refusing = made(**other)
        with pytest.raises(StateDictError, match=r"'split_rows': \(4, 1, 1\)"):
            refusing.load_state_dict(saved)
        assert not refusing.state
    # Saved before SOAP had splits: the groups do not have the options.
    _, unsplit = made()
    step(*made(), grads[0])
    old = copy.deepcopy(unsplit.state_dict())
    for name in ("split_rows", "num_heads", "split_sizes"):
        del old["param_groups"][0][name]
    _, split = made(num_heads=3)
    with pytest.raises(StateDictError, match=r"here the group has \{.*'num_heads': 3"):
        split.load_state_dict(old)
