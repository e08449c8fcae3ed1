"""The modes of `modes.py` at any number of ranks: the cases, and the weights that one process ends with.

Gradients are known to the bit (see `parity.grads_of`), so the weights of a mode depend on the number of ranks only
where the order of a sum does. They are equal to the bit with an elementwise rule, a mean that is exact (not over three
ranks), and no clip coefficient, which comes from a norm. Otherwise they stay within `Distance.of` it.
"""

import itertools
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from modes import IN_FP8, MATRIX_RULES, REFUSALS, Values, allocated, config_of, every_mode
from parity import Net, Wrapping, norms_while_training, roles_over
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import Comm
from opt_kernels.quantized import QuantizedTensor, quantized
from opt_stack import Optimizer, get_optimizer

STEPS = 3
CLIPPED, FREE = "clipped", "not clipped"
WORLDS = ("1", "2", "3", "4")

SHAPES: Mapping[str, tuple[int, ...]] = {  # of 32 columns for mxfp8, square for SOAP
    "embedding": (13, 16),
    "first": (32, 32),
    "bias": (7,),
    "qkv": (12, 12),
    "norm": (65,),
    "router": (6, 6),
    "second": (32, 32),
    "scale": (1,),
}
IN_CODES = ("first", "second")  # the parameters in fp8, where the mode has some


# One more rounding of a stored weight, relative to it; 0 for fp32.
WEIGHT_ROUNDING = {"fp32": 0.0, "fp16": 2.0**-10, **dict.fromkeys(IN_FP8, 2.0**-3)}
# One more rounding of a moment, relative to the update.
MOMENT_ROUNDING = {"fp32": 0.0, "bf16": 2.0**-7, "scaled fp16": 2.0**-9, "scaled fp8": 2.0**-2}
# Of fp32 weights with fp32 moments. Between a mean of three ranks, or another order of a norm, and one process lie
# a few fp32 roundings of the gradient, 2**-23 relative each. Updates are of size lr whatever the gradient, and move by
# that fraction. SOAP's turn with the eigenvectors of its factors, by the same fraction over the gap between two
# eigenvalues, which is 1e-3 of the largest in such matrices. AdaptiveMuon divides each element of an update by its own
# size, so that small ones move more; SOAPMuon makes singular values equal, small ones too.
RULE = {"adaptive_muon": 1e-4, "soap": 5e-4, "soap_muon": 1e-3}


class Distance(NamedTuple):
    """Allowed distance of a weight from that of one process. Few differ: roundings move a weight only at a tie."""

    rtol: float
    atol: float
    mean: float  # of the absolute differences

    @classmethod
    def of(cls, case: Values) -> "Distance":
        """The fp32 roundings of a mean over three ranks and of a norm, and the roundings that these turn over.

        Gradients summed over three ranks in bf16 are rounded to it; matrix rules then turn updates of small elements.
        """
        if is_exact(case):
            return cls(0.0, 0.0, 0.0)
        moved = STEPS * config_of(case).lr
        base = RULE.get(case["rule"], 2e-5)
        rtol, atol = WEIGHT_ROUNDING.get(case["numbers"], 2.0**-7), base + MOMENT_ROUNDING[case["moments"]] * moved
        if case["numbers"] == "bf16, bf16 gradients" and case["world"] == "3":
            return cls(rtol, atol + (2 * moved if case["rule"] in MATRIX_RULES else 2.0**-7 * moved), 0.02 * moved)
        return cls(2e-5 + rtol, atol, base)


class Trained(NamedTuple):
    weights: dict[str, Tensor]  # fp32; of parameters in fp8 their dequantised values
    codes: dict[str, Tensor]
    norms: list[float]
    held_bytes: int  # of main values and state
    planned_bytes: int


EVALUATES_OTHER_WEIGHTS = "overlap_param_gather=True: .*evaluates other weights than it trains"


def every_combination() -> Iterator[dict[str, str]]:
    """Every mode at every number of ranks, wrapped or not, with clipping and without."""
    for mode, world, wrapping, clipping in itertools.product(every_mode(), WORLDS, Wrapping, (CLIPPED, FREE)):
        yield {**mode, "world": world, "wrapping": wrapping.value, "clipping": clipping}


def every_case() -> Iterator[dict[str, str]]:
    """Every combination that is not refused."""
    return (case for case in every_combination() if not refusals(case))


def refusals(case: Values) -> list[str]:
    """A regular expression for each reason for which the case is refused."""
    found = [refusal.sentence for refusal in REFUSALS if refusal.applies(case)]
    if case["rule"] == "schedule_free" and overlaps_gathers(case):
        found.append(EVALUATES_OTHER_WEIGHTS)
    return found


def overlaps_gathers(case: Values) -> bool:
    return case["wrapping"] == Wrapping.OVERLAP.value and case["sharding"] != "replicated"


def alone(case: Values) -> dict[str, str]:
    """The same mode in one process, not wrapped."""
    return {**case, "world": "1", "sharding": "replicated", "wrapping": Wrapping.PLAIN.value}


def is_exact(case: Values) -> bool:
    return case["rule"] not in MATRIX_RULES and case["world"] != "3" and case["clipping"] == FREE


def train(case: Values, *, steps: int = STEPS) -> list[Trained]:
    """Every rank's final weights."""
    return run_threads(int(case["world"]), lambda comm: _train(case, steps, comm))


def make_net(config: OptimizerConfig) -> Net:
    net = Net(config.precision.params, SHAPES)
    for name in IN_CODES if config.fp8_recipe is not None else ():
        held: Any = net.get_submodule(name)
        held.weight = nn.Parameter(QuantizedTensor.of(held.weight.detach(), str(config.fp8_recipe)))
    return net


def configured(case: Values) -> tuple[OptimizerConfig, Wrapping]:
    wrapping = Wrapping(case["wrapping"])
    clip = 3.0 if case["clipping"] == CLIPPED else 0.0
    return config_of(case, clip_grad=clip, overlap_param_gather=overlaps_gathers(case)), wrapping


def wrap(net: Net, config: OptimizerConfig, wrapping: Wrapping, roles: Any) -> nn.Module:
    if wrapping is Wrapping.PLAIN:
        return net
    overlaps, whole = wrapping is Wrapping.OVERLAP, config.use_layer_wise_distributed_optimizer
    sharded = config.use_distributed_optimizer or whole
    ddp_config = DistributedDataParallelConfig(
        grad_reduce_in_fp32=config.main_grads_dtype is torch.float32,
        use_distributed_optimizer=sharded,
        overlap_grad_reduce=overlaps,
        overlap_param_gather=sharded and overlaps,
        fp8_param_gather=sharded and config.fp8_recipe is not None,
        bucket_size=1500 if overlaps else None,
    )
    return DistributedDataParallel(ddp_config, net, groups=roles, optimizer_config=config)


def _build(case: Values, comm: Comm) -> tuple[Net, nn.Module, Optimizer]:
    config, wrapping = configured(case)
    net, roles = make_net(config), roles_over(comm)
    model = wrap(net, config, wrapping, roles)
    return net, model, get_optimizer(config, [model], {}, pg_collection=roles)


def _train(case: Values, steps: int, comm: Comm) -> Trained:
    net, model, optimizer = _build(case, comm)
    norms = norms_while_training(model, optimizer, range(steps), comm, SHAPES)
    params = dict(net.named_parameters())
    codes = {name: stored.codes.clone() for name, param in params.items() if (stored := quantized(param)) is not None}
    weights = {name: param.detach().float().clone() for name, param in params.items()}
    return Trained(weights, codes, norms, allocated(optimizer), optimizer.plan.state_bytes(comm.rank))
