"""SOAP of rows that are matrices of their own: what it does to the parts as parameters."""

import copy

import pytest
import torch
from torch import nn

from opt_kernels import MatrixError, StateDictError
from opt_kernels.optim import SOAP, SOAPMuon
from opt_kernels.rules import SOAPMuonRule, SOAPRule, init_state
from opt_kernels.works import Batch, Hyper, MatrixSpec, Work

ROWS, COLS, STEPS = 12, 7, 4
MAKERS = {
    "kl": lambda params: SOAP(params, lr=0.1),
    "plain": lambda params: SOAP(params, lr=0.1, use_kl_shampoo=False, precondition_frequency=2),
    "megatron": lambda params: SOAP(params, lr=0.1, order="megatron"),
    "one_sided": lambda params: SOAP(params, lr=0.1, one_sided=True),  # the left of flat parts, the right of tall ones
    "limited": lambda params: SOAP(params, lr=0.1, max_precond_dim=7),  # no left factor of parts with 8 rows
    "soap_muon": lambda params: SOAPMuon(params, lr=0.1, fp32_matmul_prec="highest"),
}


def tensors(*shape):
    generator = torch.Generator().manual_seed(0)
    return [torch.randn(shape, generator=generator) for _ in range(1 + STEPS)]


def moved(maker, parts, **group):
    params = [nn.Parameter(start.clone()) for start, *_ in parts]
    optimizer = maker([{"params": params, **group}])
    for step in range(STEPS):
        for param, (_, *grads) in zip(params, parts, strict=True):
            param.grad = grads[step].clone()
        optimizer.step()
    return [param.detach() for param in params]


@pytest.mark.parametrize("maker", MAKERS.values(), ids=MAKERS)
def test_parts_heads_and_fused_rows_are_updated_as_separate_parameters(maker):
    whole = tensors(ROWS, COLS)
    for sizes in ((8, 1, 3), (3, 9)):
        (got,) = moved(maker, [whole], split_sizes=sizes)
        assert torch.equal(got, torch.cat(moved(maker, list(zip(*(x.split(sizes) for x in whole))))))
        assert not torch.allclose(got, *moved(maker, [whole]), atol=1e-2)
    (got,) = moved(maker, [whole], num_heads=3, split_rows=[])  # as JSON and YAML restore ()
    (stack,) = moved(maker, [[x.view(3, 4, COLS) for x in whole]], use_matrix_rule=True)
    assert torch.equal(got, stack.view(ROWS, COLS))
    # Rows (4, 1, 1) in each of two query groups: q, k and v.
    (got,) = moved(maker, [whole], split_rows=(4, 1, 1))
    for rows in ([0, 1, 2, 3, 6, 7, 8, 9], [4, 10], [5, 11]):
        (part,) = moved(maker, [[x[rows] for x in whole]])  # k and v of one shape would be stacked, with other bits
        assert torch.equal(got[rows], part)


@pytest.mark.parametrize("matrix", [MatrixSpec(split_rows=(2,), by_group=True), MatrixSpec(split_rows=(2, 1, 1))])
@pytest.mark.parametrize("rule", [SOAPRule(), SOAPMuonRule()], ids=["soap", "soap_muon"])
def test_stacks_of_split_matrices_move_as_each_does(rule, matrix):
    def moved(main, *grads):
        main = main.clone()
        state = init_state(rule, main, matrix)
        for step, grad in enumerate(grads, start=1):
            hyper = Hyper(lr=0.1, weight_decay=0.1, step=step)
            rule.update_([Batch(hyper, [Work(grad=grad, main=main, state=state, matrix=matrix)])])
        return main

    stacks = tensors(3, 8, 5)
    alone = [moved(*(x[index] for x in stacks)) for index in range(3)]
    # Products of batches run in another order: Newton-Schulz in bfloat16 makes more of it.
    tolerance = 5e-2 if rule.name == "soap_muon" else 1e-5
    torch.testing.assert_close(moved(*stacks), torch.stack(alone), rtol=0, atol=tolerance)


def test_state_of_another_split_is_refused_by_the_rule():
    rule, main = SOAPRule(), torch.randn(6, 6)
    matrix = MatrixSpec(split_rows=(2,), by_group=True)
    work = Work(grad=torch.randn(6, 6), main=main, state=rule.init_state(main), matrix=matrix)
    with pytest.raises(MatrixError, match=r"state 'L' has shape \(6, 6\), but for rows split as '2-each' its shape is"):
        rule.update_([Batch(Hyper(lr=0.1, step=2), [work])])


def test_a_state_dict_goes_on_with_the_same_split_and_is_refused_with_another():
    start, *grads = tensors(ROWS, COLS)

    def trained(grads, **group):
        weight = nn.Parameter(start.clone())
        optimizer = SOAP([{"params": [weight], **group}], lr=0.1)
        for grad in grads:
            weight.grad = grad.clone()
            optimizer.step()
        return weight, optimizer

    weight, optimizer = trained(grads[:3], split_rows=(4, 1, 1))
    saved = copy.deepcopy(optimizer.state_dict())
    resumed, again = trained([], split_rows=[4, 1, 1])
    again.load_state_dict(saved)
    resumed.data.copy_(weight)
    for param, of in ((weight, optimizer), (resumed, again)):
        param.grad = grads[3]
        of.step()
    assert torch.equal(resumed, weight)
    # (8, 2, 2) rows make factors of the same sizes, of other rows.
    for other in ({}, {"num_heads": 3}, {"split_sizes": (8, 2, 2)}):
        _, refusing = trained([], **other)
        with pytest.raises(StateDictError, match=r"'split_rows': \(4, 1, 1\)"):
            refusing.load_state_dict(saved)
        assert not refusing.state
    # Saved before SOAP had splits: the groups do not have the options.
    old = copy.deepcopy(trained(grads[:1])[1].state_dict())
    for name in ("split_rows", "num_heads", "split_sizes"):
        del old["param_groups"][0][name]
    with pytest.raises(StateDictError, match=r"here the group has \{.*'num_heads': 3"):
        trained([], num_heads=3)[1].load_state_dict(old)
