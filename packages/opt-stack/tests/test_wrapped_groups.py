"""A wrapper and the optimizer around it reduce over the same ranks, not only over as many."""

from collections.abc import Iterator

import pytest
import torch.distributed as dist
from stack_models import make_model
from torch.testing._internal.distributed.fake_pg import FakeStore

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig
from opt_distributed.comm.collectives import Alone, TorchComm
from opt_distributed.comm.groups import Axes, Roles
from opt_stack import DistributedDataParallel, Registry
from opt_stack.planning.draft import Draft
from opt_stack.planning.wrapped import check_same_groups


@pytest.fixture
def world() -> Iterator[None]:
    """Rank 0 of four, of which the others need not be there: no collective is called."""
    dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    yield
    dist.destroy_process_group()


def roles_over(*ranks: int) -> Roles:
    comm = TorchComm(dist.new_group(list(ranks))) if ranks else Alone()
    axes = Axes(dp=comm, tp=Alone())
    return Roles(dense=axes, expert=axes, everyone=Alone())


def test_a_wrapper_over_other_ranks_in_equal_numbers_is_refused(world: None) -> None:
    chunk = DistributedDataParallel(DistributedDataParallelConfig(), make_model(), groups=roles_over())
    chunk.roles = roles_over(0, 2)
    draft = Draft(config=OptimizerConfig(lr=1e-2), chunks=[chunk], registry=Registry(), roles=roles_over(0, 2))
    check_same_groups(draft)  # another group object of the same ranks
    draft.roles = roles_over(0, 3)
    with pytest.raises(ConfigError, match=r"wrapped with data-parallel groups of 2 x 1 ranks .*\[0, 2\].*\[0, 3\]"):
        check_same_groups(draft)
