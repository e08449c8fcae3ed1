"""A saved run resumes on other layouts, dtypes and numbers of ranks: on the same ranks to the last bit, on others as
near as summation order allows. Real processes over gloo. At the end, moments in blocks of 8-bit codes.
"""

from pathlib import Path
from typing import Any, NamedTuple

import cut_ranks as ranks
import pytest
import torch
from cut_ranks import EVEN, OBLONG, UNEVEN, fsdp, resume, tp, train, train_and_save
from expert_grid import cut
from processes import FSDP2_RUNS, Job, run_jobs
from torch import Tensor, nn

from opt_checkpoint import ShardedTensor, load, save
from opt_config import OptimizerConfig
from opt_kernels.codecs import codecs_of
from opt_kernels.rules import Adam
from opt_stack import get_optimizer


def config(**fields: Any) -> OptimizerConfig:
    """Not clipped: norms are summed in another order."""
    base = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0, "muon_fp32_matmul_prec": "highest"}
    return OptimizerConfig(**{**base, **fields})


def adaptive(method: str, mode: str = "duplicated") -> OptimizerConfig:
    return config(optimizer="adaptive_muon", muon_tp_mode=mode, adaptive_muon_moment2_method=method)


class Case(NamedTuple):
    """Configuration and layout of the run on four ranks, and of the one that resumes it on two."""

    saved: OptimizerConfig
    saved_as: ranks.LayOut
    loaded: OptimizerConfig
    loaded_as: ranks.LayOut
    shapes: ranks.Shapes = UNEVEN
    near: float = 1e-6  # of weights: Adam on other runs of elements: in the lanes of a vector, or left over


ZERO: dict[str, Any] = {"use_distributed_optimizer": True}
BF16: dict[str, Any] = {"bf16": True}
AWARE: dict[str, Any] = {**BF16, "use_precision_aware_optimizer": True}
NARROW = {**AWARE, "exp_avg_dtype": torch.bfloat16, "exp_avg_sq_dtype": torch.bfloat16}
FP8 = {**AWARE, "exp_avg_dtype": torch.uint8, "exp_avg_sq_dtype": torch.uint8}
SHORT = {**AWARE, "main_params_dtype": torch.int8}
ADAM = config()
SOAP = config(optimizer="soap")
PARTS = config(optimizer="soap", soap_split_qkv=True)
MUON = config(optimizer="muon", muon_tp_mode="duplicated")
WHOLE = config(optimizer="muon", use_layer_wise_distributed_optimizer=True)
NORMUON = adaptive("normuon")
ADAMUON = adaptive("adamuon")
NAMO = adaptive("namo")
ULPS = 2.0**-8  # two units of bf16 in weights below a half
MARKED = ranks.tp_by_attributes
CASES = {
    "flat": Case(config(**ZERO), None, config(**ZERO), None),
    "replicated to flat": Case(ADAM, None, config(**ZERO), None),
    "flat to replicated, bf16": Case(config(**ZERO, **BF16), None, config(**BF16), None, near=ULPS),
    "remainders to copies, narrow moments to wide": Case(
        config(**ZERO, **NARROW), None, config(**ZERO, **BF16), None, near=ULPS
    ),
    "8-bit moments to wide": Case(config(**ZERO, **FP8), None, config(**ZERO, **BF16), None, near=ULPS),
    "24-bit mains, flat to fsdp": Case(config(**ZERO, **SHORT), None, config(**SHORT), fsdp, near=ULPS),
    "24-bit mains, fsdp to copies": Case(config(**SHORT), fsdp, config(**BF16), None, near=ULPS),
    "fsdp to flat, bf16": Case(config(**NARROW), fsdp, config(**ZERO, **BF16), None, near=ULPS),
    "layer-wise to replicated muon": Case(WHOLE, None, MUON, None, OBLONG),
    "muon, fsdp to layer-wise": Case(MUON, fsdp, WHOLE, None, OBLONG),
    "muon, layer-wise to fsdp": Case(WHOLE, None, MUON, fsdp, OBLONG),
    "fsdp": Case(ADAM, fsdp, ADAM, fsdp),
    "soap": Case(SOAP, fsdp, SOAP, tp),
    "soap of parts": Case(PARTS, fsdp, PARTS, tp),
    "normuon": Case(NORMUON, ranks.hsdp, NORMUON, tp, OBLONG),
    "adamuon": Case(ADAMUON, tp, ADAMUON, tp, OBLONG),
    "namo": Case(NAMO, fsdp, NAMO, tp, OBLONG),
    "adam, a vector outside the tensor-parallel plan": Case(ADAM, ranks.fsdp_x_tp, ADAM, tp, EVEN),
    "muon, a vector outside the tensor-parallel plan": Case(MUON, ranks.fsdp_x_tp, MUON, tp, EVEN),
    "adam, replicas of tensor parallelism": Case(ADAM, ranks.tp_on_a_part_of_the_mesh, ADAM, tp, EVEN),
    # Matrix state that one rank has, that all have, or that lies in parts, is saved as that of the whole.
    "soap, tensor parallel": Case(SOAP, MARKED, SOAP, MARKED, EVEN, near=2e-5),
    "soap of parts, tensor parallel": Case(PARTS, MARKED, PARTS, MARKED, EVEN, near=2e-5),
    "muon, tensor parallel": Case(MUON, MARKED, MUON, MARKED, EVEN, near=2e-5),
    "normuon, gathered to joint": Case(NORMUON, MARKED, adaptive("normuon", "distributed"), MARKED, EVEN, near=2e-5),
    "namo, tensor parallel": Case(NAMO, MARKED, NAMO, MARKED, EVEN, near=2e-5),
}
if not FSDP2_RUNS:
    CASES = {name: case for name, case in CASES.items() if {case.saved_as, case.loaded_as} <= {None, MARKED}}


@pytest.fixture(scope="module")
def weights(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[dict[str, Tensor]]]:
    """Weights after the last step, by rank: of the uninterrupted run, and resumed on four, two and one rank."""
    folder = tmp_path_factory.mktemp("checkpoints")
    four = {}
    two = {}
    one = {}
    for name, case in CASES.items():
        path = str(folder / name)
        four[f"uninterrupted {name}"] = Job(train_and_save, (case.saved, case.shapes, case.saved_as, path))
        four[f"four {name}"] = Job(resume, (case.saved, case.shapes, case.saved_as, path))
        two[f"two {name}"] = Job(resume, (case.loaded, case.shapes, case.loaded_as, path))
        one[f"one {name}"] = Job(resume, (case.loaded, case.shapes, None, path))
    found = run_jobs(4, four) | run_jobs(2, two)
    return found | {name: [job.rank_main(*job.args)] for name, job in one.items()}


@pytest.mark.parametrize("name", CASES)
def test_a_run_resumed_on_the_same_ranks_has_identical_bits(name: str, weights: Any) -> None:
    for resumed, want in zip(weights[f"four {name}"], weights[f"uninterrupted {name}"], strict=True):
        assert resumed.keys() == want.keys()
        assert all(torch.equal(resumed[param], weight) for param, weight in want.items())


@pytest.mark.parametrize("name", CASES)
def test_a_run_resumed_on_other_ranks_or_formats_is_nearly_equal(name: str, weights: Any) -> None:
    case = CASES[name]
    want = train(case.saved, case.shapes).weights
    for where in ("uninterrupted", "two", "one"):
        for got in weights[f"{where} {name}"]:
            assert got.keys() == want.keys()
            for param, weight in want.items():
                torch.testing.assert_close(got[param], weight, rtol=case.near, atol=case.near, msg=f"{where} {param}")


# --- moments in blocks of codes, which are stored decoded, in fp32 ----------------------------------------------------

MOMENTS = ("exp_avg", "exp_avg_sq")
DTYPES: dict[str, dict[str, Any]] = {
    "wide": {},
    "int8": {"exp_avg_dtype": torch.int8, "exp_avg_sq_dtype": torch.uint8},
    "fp8": {"exp_avg_dtype": torch.float8_e4m3fn, "exp_avg_sq_dtype": torch.float8_e4m3fn},
}
PARAMS = {"rows": ((72, 24), 0), "columns": ((24, 48), 1), "vector": ((24,), None)}  # the dim that is cut


class Run:
    """A rank's part of matrices that are cut by rows and by columns, and of a vector."""

    def __init__(self, dtypes: str, rank: int = 0, size: int = 1):
        self.net = nn.Module()
        generator = torch.Generator().manual_seed(0)
        self.weights = {}
        for name, (shape, dim) in PARAMS.items():
            part = cut(torch.randn(shape, generator=generator), rank, size, dim=dim)
            self.net.register_parameter(name, nn.Parameter(part))
            offsets = [] if dim is None else [(dim, rank, size)]
            self.weights[name] = ShardedTensor.from_rank_offsets(name, self.net.get_parameter(name), *offsets)
        self.optimizer = get_optimizer(config(optimizer_options=DTYPES[dtypes]), [self.net])

    def sharded(self) -> dict[str, Any]:
        return {"model": self.weights, "optimizer": self.optimizer.sharded_state_dict(self.weights)}

    def states(self) -> dict[str, Any]:
        """Decoded."""
        return self.sharded()["optimizer"]["state"]


def rounded(dtypes: str, moment: str, values: Tensor) -> Tensor:
    """Values that were encoded and decoded."""
    if dtypes == "wide":
        return values
    codec = codecs_of(Adam(**DTYPES[dtypes]))[moment]
    found = torch.empty(values.numel())
    codes = torch.empty(values.numel(), dtype=codec.dtype)
    scales = torch.empty(-(-values.numel() // codec.block))
    codec.encode_(codes, scales, values.flatten())
    codec.decode_(found, codes, scales)
    return found.view(values.shape)


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, dict[str, Any]]]:
    """By dtypes: a run after three steps, and its decoded state then."""
    found = {}
    for dtypes in DTYPES:
        run = Run(dtypes)
        path = tmp_path_factory.mktemp("narrow") / dtypes
        for step in range(3):
            generator = torch.Generator().manual_seed(1 + step)
            for param in run.net.parameters():  # rows of other sizes, so that blocks differ
                sizes = torch.logspace(-1, 0, param.shape[0]).view(-1, *[1] * (param.dim() - 1))
                param.grad = torch.randn(param.shape, generator=generator) * sizes
            run.optimizer.step()
        save(run.sharded(), path)
        found[dtypes] = path, run.states()
    return found


@pytest.mark.parametrize(("rank", "size"), [(0, 1), (0, 2), (1, 2)])
@pytest.mark.parametrize(("before", "after"), [(a, b) for a in DTYPES for b in DTYPES if {a, b} != {"wide"}])
def test_loaded_moments_are_rounded_once_in_the_new_blocks(
    before: str, after: str, rank: int, size: int, saved: Any
) -> None:
    """On a half of each matrix, by rows or by columns, blocks hold elements of several of the saved ones."""
    path, want = saved[before]
    run = Run(after, rank, size)
    run.optimizer.load_state_dict(load(run.sharded(), path).state["optimizer"])
    found = run.states()
    for name, (_, dim) in PARAMS.items():
        for moment in MOMENTS:
            expected = rounded(after, moment, cut(want[name][moment].data, rank, size, dim=dim))
            assert torch.equal(found[name][moment].data, expected), f"{moment} of {name}"
