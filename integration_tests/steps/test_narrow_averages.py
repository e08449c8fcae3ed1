"""Averages in narrow formats are rounded by noise that no layout changes, and that a resumed run repeats."""

from typing import Any

import pytest
import torch
from parity import Net, config, grads_of, roles_over, sharded_state
from torch import Tensor

from opt_checkpoint import load, save
from opt_config import ConfigError
from opt_distributed import run_threads
from opt_distributed.comm import Comm
from opt_distributed.comm.threads import ThreadComm
from opt_stack import Optimizer, get_optimizer

BF16: dict[str, Any] = {"exp_avg_sq_dtype": torch.bfloat16}
FP8: dict[str, Any] = {"exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}  # scaled, as in Megatron-Core
FORMATS = {"bf16": BF16, "fp8": FP8}


def begun(comm: Comm, format: str, **fields: Any) -> tuple[Net, Optimizer]:
    net = Net(torch.float32)
    numbers = {"use_precision_aware_optimizer": True, "use_distributed_optimizer": True, **FORMATS[format], **fields}
    return net, get_optimizer(config(clip_grad=0.0, **numbers), [net], {}, pg_collection=roles_over(comm))


def step_(net: Net, optimizer: Optimizer, number: int, comm: Comm) -> None:
    net(grads_of(number, comm.rank, comm.size)).backward()
    assert optimizer.step().success
    optimizer.zero_grad()


def weights_after(steps: int, comm: Comm, format: str, **fields: Any) -> list[Tensor]:
    net, optimizer = begun(comm, format, **fields)
    for number in range(steps):
        step_(net, optimizer, number, comm)
    return [param.detach().clone() for param in net.parameters()]


@pytest.mark.parametrize("format", FORMATS)
def test_sharded_averages_have_the_bits_of_one_process(format: str) -> None:
    """A shard that begins within a parameter was rounded as if it began the parameter."""
    (alone,) = run_threads(1, lambda comm: weights_after(4, comm, format))
    (quick,) = run_threads(1, lambda comm: weights_after(4, comm, format, adam_beta2=0.5, adam_beta1=0.2))
    assert not all(map(torch.equal, alone, quick))
    for size in (2, 3):
        for found in run_threads(size, lambda comm: weights_after(4, comm, format)):
            assert all(map(torch.equal, found, alone))


@pytest.mark.parametrize("format", FORMATS)
def test_a_run_resumed_on_other_ranks_repeats_the_noise(format: str, tmp_path: Any) -> None:
    (whole,) = run_threads(1, lambda comm: weights_after(5, comm, format))

    def first_half(comm: ThreadComm) -> None:
        net, optimizer = begun(comm, format)
        for number in range(3):
            step_(net, optimizer, number, comm)
        save(sharded_state(net, optimizer), tmp_path / "run")

    run_threads(1, first_half)
    comms = run_threads(1, lambda comm: comm)
    net, optimizer = begun(comms[0], format)
    loaded = load(sharded_state(net, optimizer), tmp_path / "run").state
    optimizer.load_state_dict(loaded["optimizer"])
    for number in range(3, 5):
        step_(net, optimizer, number, comms[0])
    assert all(map(torch.equal, whole, net.parameters()))


def test_a_beta_with_too_much_noise_is_refused() -> None:
    (comm,) = run_threads(1, lambda comm: comm)
    with pytest.raises(ConfigError, match=r"betas=\(0.99, 0.999\) with exp_avg in torch.float8_e4m3fn: rounding would"):
        begun(comm, "fp8", adam_beta1=0.99)
    net, optimizer = begun(comm, "fp8")
    net(grads_of(0, comm.rank, comm.size)).backward()
    before = [param.detach().clone() for param in net.parameters()]
    optimizer.param_groups[0]["betas"] = (0.99, 0.999)
    with pytest.raises(ValueError, match="rounding would make updates more than 5 % longer"):
        optimizer.step()
    assert all(map(torch.equal, net.parameters(), before))
