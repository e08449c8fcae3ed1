"""DTensor parameters: every rank updates its shard, and state dicts hold DTensors."""

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from processes import run_processes
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard, distribute_tensor
from torch.distributed.tensor.placement_types import _StridedShard

from opt_kernels import optim
from opt_kernels.dtensor import spans
from opt_kernels.hooks import CautiousDecay, CautiousUpdate, CentralizeGradient, ClipUpdateRms, HookError

WORLD = 2


def _sharded(tensor: torch.Tensor, mesh: DeviceMesh, placement: Placement) -> torch.nn.Parameter:
    return torch.nn.Parameter(distribute_tensor(tensor, mesh, [placement]))


def _steps(optimizer: torch.optim.Optimizer, param: torch.nn.Parameter, grads: Sequence[torch.Tensor]) -> torch.Tensor:
    """The whole of the parameter after a step with each of the whole gradients."""
    for grad in grads:
        is_whole = not isinstance(param.data, DTensor)
        param.grad = grad if is_whole else distribute_tensor(grad, param.data.device_mesh, param.data.placements)
        optimizer.step()
    return param.data.full_tensor() if isinstance(param.data, DTensor) else param.detach()


def _check_strided_shards(mesh: DeviceMesh) -> None:
    """A part that is not one block of the whole: its elements are not numbered, and no block is loaded for it."""
    placed = [_StridedShard(0, split_factor=2)]
    param = torch.nn.Parameter(DTensor.from_local(torch.zeros(4), mesh, placed, shape=(8,), stride=(1,)))
    assert spans(param) is None
    param.grad = torch.ones_like(param)
    optimizer = optim.AdamW([param], lr=1e-2)
    optimizer.step()
    saved = optimizer.state_dict()
    optimizer.load_state_dict(saved)
    saved["state"][0]["exp_avg"] = torch.arange(8.0)
    with pytest.raises(ValueError, match=r"is a whole tensor, but its parameter is placed .* pass a DTensor"):
        optimizer.load_state_dict(saved)


def _check_stochastic_rounding(mesh: DeviceMesh) -> None:
    """Shards are rounded to the bits of the whole: elements were numbered by shard, and the second half differed."""
    torch.manual_seed(1)
    for shape, dim in (((64, 6, 64), 1), ((1, 64), 0), ((64, 256), 0), ((64, 256), 1), ((65, 64), 0), ((192, 128), 1)):
        start = torch.randn(shape).bfloat16()
        grads = list(torch.randn(3, *shape).bfloat16())
        found = [
            _steps(optim.AdamW([param], lr=1e-2, stochastic_rounding=True), param, grads)
            for param in (torch.nn.Parameter(start.clone()), _sharded(start, mesh, Shard(dim)))
        ]
        assert torch.equal(*found), (shape, dim)
    with pytest.raises(ValueError, match=r"share scales across rows, .* shard it by rows"):
        optim.AdamW([_sharded(start, mesh, Shard(1))], stochastic_rounding=True, exp_avg_dtype=torch.int8)


def _check_hooks(mesh: DeviceMesh) -> None:
    """What needs a norm or a row that spans ranks is refused; replicas have the step of the whole."""
    start = torch.randn(64, 6)
    grad = torch.randn(64, 6)
    for hook in (ClipUpdateRms(), CautiousUpdate(), CentralizeGradient()):
        options: dict[str, Any] = {"hooks": (hook,), "backend": "torch"}
        for placement in (Shard(0), Shard(1)):
            with pytest.raises(HookError, match=r"span.* ranks, and this optimizer does not communicate"):
                optim.AdamW([_sharded(start, mesh, placement)], **options)
        whole = torch.nn.Parameter(start.clone())
        replica = _sharded(start, mesh, Replicate())
        assert torch.equal(*(_steps(optim.AdamW([param], **options), param, [grad]) for param in (whole, replica)))


def _check_foreign_writes(mesh: DeviceMesh) -> None:
    """A write to a DTensor, as by `load_state_dict`, left the version of its shard, and the next step undid it."""
    param = _sharded(torch.ones(8, 3, dtype=torch.bfloat16), mesh, Shard(0))
    optimizer = optim.AdamW([param], lr=1e-3, mains="float32")
    zeros = [torch.zeros(8, 3, dtype=torch.bfloat16)]
    _steps(optimizer, param, zeros)
    with torch.no_grad():
        param.copy_(distribute_tensor(torch.full_like(zeros[0], 5.0), mesh, [Shard(0)]))
    saved = optimizer.state_dict()["state"][0]["main"]
    assert torch.equal(saved.to_local(), torch.full((4, 3), 5.0))
    assert (_steps(optimizer, param, zeros) > 4.9).all()
    with torch.no_grad():
        param.to_local().fill_(7.0)
    assert (_steps(optimizer, param, zeros) > 6.9).all()
    main = optimizer.state_dict()["state"][0]["main"].to_local()
    assert main.data_ptr() == optimizer.state[param]["main"].data_ptr(), "nobody has written since"


def _check_matrices(mesh: DeviceMesh) -> None:
    """Matrices that a rank has a part of are refused by name; whole ones are moved."""
    net = torch.nn.Linear(6, 4, bias=False)
    net.weight = _sharded(net.weight.detach(), mesh, Shard(0))
    message = r"needs whole matrices, but this rank has only \(2, 6\) of 'weight' of shape \(4, 6\); replicate it"
    for kind in (optim.Muon, optim.AdaptiveMuon, optim.SOAP):
        for params in (net, net.named_parameters()):
            with pytest.raises(ValueError, match=f"{kind.__name__} {message}"):
                kind(params)
    with pytest.raises(ValueError, match=r"this rank has only .* of a parameter of shape \(4, 6\)"):
        optim.NAMO(net.parameters())
    net.weight = _sharded(net.weight.full_tensor().detach(), mesh, Replicate())
    _steps(optim.Muon(net), net.weight, [torch.ones(4, 6)])


def _check_resuming(mesh: DeviceMesh) -> None:
    # 256 rows of 5: rank shards of 640 elements, a multiple of 64 and of a block.
    start = torch.randn(256, 5)
    grads = list(torch.randn(3, 256, 5))
    narrow = {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8}
    choices: list[dict[str, Any]] = [{}, narrow, {"hooks": (CautiousDecay(),), "backend": "torch"}]
    for options in choices:
        whole = torch.nn.Parameter(start.clone())
        param = _sharded(start, mesh, Shard(0))
        optimizer = optim.AdamW([param], **options)
        _steps(optimizer, param, grads[:2])
        saved = optimizer.state_dict()
        exp_avg = saved["state"][0]["exp_avg"]
        assert isinstance(exp_avg, DTensor)
        assert (exp_avg.shape, exp_avg.placements) == ((256, 5), (Shard(0),))
        resumed = optim.AdamW([param], **options)
        resumed.load_state_dict(saved)
        expected = _steps(optim.AdamW([whole], **options), whole, grads)
        assert torch.equal(_steps(resumed, param, grads[2:]), expected)
    with pytest.raises(ValueError, match="its norm spans ranks"):
        optim.AdamW([param], max_norm=1.0).step()


def _rank() -> None:
    mesh = init_device_mesh("cpu", (WORLD,))
    torch.manual_seed(0)
    checks = (_check_strided_shards, _check_stochastic_rounding, _check_hooks, _check_matrices)
    for check in (*checks, _check_foreign_writes, _check_resuming):
        check(mesh)


def test_shards_move_as_the_whole_does() -> None:
    run_processes(WORLD, _rank)
