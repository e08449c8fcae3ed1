"""The wrapper and the step's reductions on devices that run their work later: the same bits in every legal order.

More orders at night.
"""

from functools import partial
from typing import Any

import pytest
from deferred_training import OVERLAP, SHARDED, WHOLE, Config, Program, are_equal, in_order, in_some_order, in_the_step
from deferred_training import wrapped as wrapped_program
from tiers import NIGHT

NUM_ORDERS = 50 if NIGHT else 4
INSTANCES = {"num_distributed_optimizer_instances": 2}


def wrapped(fields: dict[str, Any], whole: bool = False, num_microbatches: int = 1, **others: Any) -> Program:
    return wrapped_program(Config(**fields, **others), whole=whole, num_microbatches=num_microbatches)


PROGRAMS: dict[str, Program] = {  # of two optimizer instances if its name says so
    "replicated": wrapped(OVERLAP),
    "sharded": wrapped(SHARDED),
    "sharded, microbatches": wrapped(SHARDED, num_microbatches=2),
    "sharded, instances": wrapped(SHARDED, **INSTANCES),
    "sharded, sums in fp32": wrapped(SHARDED, reduce_scatter_with_fp32_accumulation=True),
    "sharded, checked": wrapped(SHARDED, check_for_nan_in_grad=True, check_for_large_grads=True),
    "instances, checked for large gradients": wrapped(SHARDED, check_for_large_grads=True, **INSTANCES),
    "sharded, aligned": wrapped(SHARDED, align_param_gather=True),
    "whole": wrapped(WHOLE, whole=True),
    "whole, instances": wrapped(WHOLE, whole=True, **INSTANCES),
    "whole, sums in fp32": wrapped(WHOLE, whole=True, reduce_scatter_with_fp32_accumulation=True),
    "whole, aligned": wrapped(WHOLE, whole=True, align_param_gather=True),
    "whole, not wrapped": partial(in_the_step, whole=True),
    "whole, not wrapped, instances": partial(in_the_step, whole=True),
    "not wrapped": in_the_step,
    "not wrapped, instances": in_the_step,
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_order_of_queued_work_gives_the_same_bits(name: str) -> None:
    program, instances = PROGRAMS[name], 2 if "instances" in name else 1
    expected = in_order(program, instances=instances)
    for seed in range(NUM_ORDERS):
        assert are_equal(in_some_order(program, seed=seed, instances=instances), expected), f"seed {seed}"
