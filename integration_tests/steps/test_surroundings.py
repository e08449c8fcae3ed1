"""The caller's settings change no bit: a default dtype or device, autocast, inference mode, deterministic algorithms,
the precision of products. Every rule is built, stepped, saved and loaded under each of them, and goes on outside."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import pytest
import torch
from named import PLAIN, Named
from parity import sharded_state
from tiers import NIGHT
from torch import Tensor, nn

from opt_checkpoint import load, save
from opt_config import OptimizerConfig
from opt_kernels import optim
from opt_stack import Optimizer, Registry, get_optimizer, torch_rule

SHAPES = {"weight": (6, 4), "bias": (4,), "odd": (7,)}
STEPS = 3
BEFORE = 2  # steps before the save
MATRICES = ("AdaptiveMuon", "Muon", "MuonH", "Muown", "NAMO", "NorMuon", "SOAP", "SOAPMuon", "Scion")
BASES = ("FormulaOptimizer", "RuleOptimizer", "StateDictError", "drop_in")
DROP_INS = [name for name in optim.__all__ if name not in BASES]
OF_TORCH = Registry().with_rule(torch_rule("of_torch", torch.optim.AdamW))


@contextmanager
def deterministic_medium() -> Iterator[None]:
    """Deterministic algorithms, which fill new memory with NaN, and 16-bit products of float32 matrices."""
    torch.use_deterministic_algorithms(True)
    torch.set_float32_matmul_precision("medium")
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(False)
        torch.set_float32_matmul_precision("highest")


@contextmanager
def assigned(assign: Callable[[Any], object], value: object, before: object) -> Iterator[None]:
    assign(value)
    try:
        yield
    finally:
        assign(before)


Setting: TypeAlias = Callable[[], AbstractContextManager[object]]
SETTINGS: dict[str, Setting] = {
    "bfloat16": partial(assigned, torch.set_default_dtype, torch.bfloat16, torch.float32),
    "float16": partial(assigned, torch.set_default_dtype, torch.float16, torch.float32),
    "float64": partial(assigned, torch.set_default_dtype, torch.float64, torch.float32),
    "device": partial(assigned, torch.set_default_device, "meta", None),
    "autocast": partial(torch.autocast, "cpu", dtype=torch.bfloat16),
    "inference": torch.inference_mode,
    "algorithms": deterministic_medium,
}
if NIGHT:
    SETTINGS["autocast to float16"] = partial(torch.autocast, "cpu", dtype=torch.float16)


class Case(NamedTuple):
    """An optimizer that is built for a model."""

    build: Callable[[nn.Module], Any]
    dtype: torch.dtype = torch.float32


def drop_in(name: str, model: nn.Module, **options: Any) -> Any:
    scalar = {"scalar_optimizer": "adam"} if name in MATRICES else {}
    return getattr(optim, name)(model.parameters(), **scalar, **options)


def of_stack(name: str, model: nn.Module, **options: Any) -> Optimizer:
    config = OptimizerConfig(optimizer=name, **{**PLAIN, "weight_decay": 0.0, **options})
    return get_optimizer(config, [model], rules=OF_TORCH)


def cases() -> dict[str, Case]:
    found = {}
    for name in DROP_INS:
        found[name] = Case(partial(drop_in, name))
        if NIGHT:
            found[f"{name} in bf16"] = Case(partial(drop_in, name, mains="float32"), torch.bfloat16)
    for name in MATRICES:
        if name != "SOAP":
            found[f"{name} in fp32"] = Case(partial(drop_in, name, fp32_matmul_prec="highest"))
    # A step of AdamW in torch 2.6 refuses a count that the default device "meta" made.
    of_torch = () if torch.__version__.startswith("2.6.") else ("of_torch",)
    for name in (*Registry().entries, *of_torch):
        found[f"optimizer={name}"] = Case(partial(of_stack, name))
        if NIGHT and name != "of_torch":
            found[f"optimizer={name} in bf16"] = Case(partial(of_stack, name, bf16=True), torch.bfloat16)
    for name in ("muon", "adaptive_muon", "soap_muon"):
        found[f"optimizer={name} in fp32"] = Case(partial(of_stack, name, muon_fp32_matmul_prec="highest"))
    return found


def normal(shape: tuple[int, ...], seed: int, dtype: torch.dtype) -> Tensor:
    generator = torch.Generator(device="cpu").manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float32, device="cpu").to(dtype)


def bits(case: Case, folder: Path, setting: Setting = nullcontext, *, goes_on: bool = False) -> list[Tensor]:
    """The weights and states of a run that is built, stepped, saved and loaded under `setting`. With `goes_on`, so are
    its last steps."""
    model, other = (Named(**{name: normal(shape, 0, case.dtype) for name, shape in SHAPES.items()}) for _ in range(2))
    grads = [[normal(shape, step, case.dtype) for shape in SHAPES.values()] for step in range(STEPS)]

    def train(model: nn.Module, optimizer: Any, steps: range) -> None:
        for step in steps:
            for place, param in enumerate(model.parameters()):
                # A gradient that comes and goes makes the drop-ins read the saved step counts.
                param.grad = None if place == step % 2 else grads[step][place].clone()
            optimizer.step()

    with setting():
        optimizer = case.build(model)
        resumed = case.build(other)
        train(model, optimizer, range(BEFORE))
        if NIGHT and isinstance(optimizer, Optimizer):
            save(sharded_state(model, optimizer), folder)
            resumed.load_state_dict(load(sharded_state(other, resumed), folder).state["optimizer"])
        else:
            other.load_state_dict(model.state_dict())
            resumed.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    with setting() if goes_on else nullcontext():
        train(model, optimizer, range(BEFORE, STEPS))
        train(other, resumed, range(BEFORE, STEPS))
    states = [state for one in (optimizer, resumed) for state in one.state_dict()["state"].values()]
    saved = [state[name] for state in states for name in sorted(state)]
    return [*model.parameters(), *other.parameters(), *saved]


@pytest.fixture(scope="module")
def usual(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Tensor]]:
    """The bits of every case without a setting."""
    folder = tmp_path_factory.mktemp("usual")
    return {name: bits(case, folder / name) for name, case in cases().items()}


@pytest.mark.parametrize("goes_on", [False, True] if NIGHT else [False])
@pytest.mark.parametrize("name", SETTINGS)
def test_a_setting_of_the_caller_changes_no_bit(
    name: str, goes_on: bool, usual: dict[str, list[Tensor]], tmp_path: Path
) -> None:
    """Step counts in bfloat16 stopped at 256; steps under autocast raised errors, as did those after inference mode."""
    differing = []
    for rule, case in cases().items():
        found = bits(case, tmp_path / rule, SETTINGS[name], goes_on=goes_on)
        if not all(a.dtype is b.dtype and torch.equal(a, b) for a, b in zip(found, usual[rule], strict=True)):
            differing.append(rule)
    assert not differing


def test_a_loop_inside_of_autocast_trains_as_one_outside() -> None:
    """The region kept the 16-bit weights of its first forward, so that the loss never changed."""

    def loss_after(build: Callable[[nn.Module], Any], *, wrapped: bool) -> float:
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.Linear(8, 1))
        optimizer = build(model)
        inputs = torch.randn(16, 8)
        region = SETTINGS["autocast"]
        with region() if wrapped else nullcontext():
            for _ in range(3):
                with nullcontext() if wrapped else region():
                    loss = model(inputs).float().square().mean()
                optimizer.zero_grad()
                loss.backward()
                optimizer.step()
        return loss.item()

    for build in (partial(drop_in, "AdamW"), partial(of_stack, "adam")):
        assert loss_after(build, wrapped=True) == loss_after(build, wrapped=False)
