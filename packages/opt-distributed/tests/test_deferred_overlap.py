"""The wrapper and the step's reductions on devices that run their work later: the same bits in every legal order.

More orders at night.
"""

import pytest
from deferred_training import (
    OVERLAP,
    SHARDED,
    WHOLE,
    Config,
    Program,
    are_equal,
    in_order,
    in_some_order,
    in_the_step,
    whole_in_the_step,
    wrapped,
)
from tiers import NIGHT

NUM_ORDERS = 50 if NIGHT else 4

# Program and number of optimizer instances.
PROGRAMS: dict[str, tuple[Program, int]] = {
    "replicated": (wrapped(Config(**OVERLAP)), 1),
    "sharded": (wrapped(Config(**SHARDED)), 1),
    "sharded, microbatches": (wrapped(Config(**SHARDED), num_microbatches=2), 1),
    "sharded, instances": (wrapped(Config(**SHARDED, num_distributed_optimizer_instances=2)), 2),
    "sharded, sums in fp32": (wrapped(Config(**SHARDED, reduce_scatter_with_fp32_accumulation=True)), 1),
    "sharded, checked": (wrapped(Config(**SHARDED, check_for_nan_in_grad=True, check_for_large_grads=True)), 1),
    "instances, checked for large gradients": (
        wrapped(Config(**SHARDED, check_for_large_grads=True, num_distributed_optimizer_instances=2)),
        2,
    ),
    "sharded, aligned": (wrapped(Config(**SHARDED, align_param_gather=True)), 1),
    "whole": (wrapped(Config(**WHOLE), whole=True), 1),
    "whole, instances": (wrapped(Config(**WHOLE, num_distributed_optimizer_instances=2), whole=True), 2),
    "whole, sums in fp32": (wrapped(Config(**WHOLE, reduce_scatter_with_fp32_accumulation=True), whole=True), 1),
    "whole, aligned": (wrapped(Config(**WHOLE, align_param_gather=True), whole=True), 1),
    "whole, not wrapped": (whole_in_the_step, 1),
    "whole, not wrapped, instances": (whole_in_the_step, 2),
    "not wrapped": (in_the_step, 1),
    "not wrapped, instances": (in_the_step, 2),
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_every_order_of_queued_work_gives_the_same_bits(name: str) -> None:
    program, instances = PROGRAMS[name]
    expected = in_order(program, instances=instances)
    for seed in range(NUM_ORDERS):
        assert are_equal(in_some_order(program, seed=seed, instances=instances), expected), f"seed {seed}"
