"""Models divided over tensor, expert and pipeline ranks come back on the ranks they belong to, at other sizes too."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fuzz.cases import Grid, Place
from fuzz.ranks import process_groups
from processes import once_a_world, run_processes
from torch import Tensor, nn

from opt_checkpoint import load, save, sharded_model
from opt_stack import OptimizerConfig, ProcessGroups, get_optimizer

LAYERS, EXPERTS, LR, STEPS = 4, 4, 0.05, 3


@once_a_world
def groups_of(layout: Grid) -> ProcessGroups:
    """Process groups by role. Collective."""
    return process_groups(layout, dist.get_rank())


def whole(kind: str, step: int = 0) -> dict[str, Tensor]:
    """Values of the whole model (step 0) or gradients of a step, by global name, in fp64."""
    generator = torch.Generator().manual_seed(1000 * step + 1)
    names: dict[str, tuple[int, ...]] = {"embed": (12, 4), "head": (12, 4)}
    for n in range(LAYERS):
        names |= {f"layers.{n}.up": (8, 4), f"layers.{n}.up_bias": (8,), f"layers.{n}.down": (4, 8)}
        names |= {f"layers.{n}.down_bias": (4,), f"layers.{n}.norm": (4,), f"layers.{n}.gate": (16, 4)}
        if kind == "moe":
            names |= {f"layers.{n}.experts.{e}.up": (4, 3) for e in range(EXPERTS)}
            names[f"layers.{n}.stack"] = (EXPERTS, 3, 4)
        names[f"layers.{n}.scale"] = (4,)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in names.items()}


CUT = {"up": 0, "up_bias": 0, "down": 1, "gate": 0, "embed": 0, "head": 0}
BUFFERS = ("scale",)


class Part(NamedTuple):
    local: str  # name on this rank
    cuts: tuple[tuple[int, int, int], ...]
    stride: int = 1


def parts(layout: Grid, at: Place, kind: str) -> dict[str, Part]:
    """This rank's part of each whole tensor that it has, by global name."""
    found = {}
    each, experts = LAYERS // layout.pp, EXPERTS // layout.ep
    for name in whole(kind):
        words = name.split(".")
        if words[0] != "layers":
            stage = 0 if name == "embed" else layout.pp - 1
            if at.stage != stage:
                continue
        else:
            stage, words[1] = int(words[1]) // each, str(int(words[1]) % each)
            if at.stage != stage:
                continue
        if "experts" in words:
            if int(words[3]) // experts != at.ep:
                continue
            words[3] = str(int(words[3]) % experts)
            cuts = ((0, at.etp, layout.etp),)
        elif words[-1] == "stack":
            cuts = ((0, at.ep, layout.ep), (2, at.etp, layout.etp))
        else:
            dim = CUT.get(words[-1])
            cuts = () if dim is None else ((dim, at.tp, layout.tp),)
        found[name] = Part(".".join(words), cuts, 2 if words[-1] == "gate" else 1)
    return found


def cut(value: Tensor, part: Part) -> Tensor:
    for dim, rank, size in part.cuts:
        value = torch.cat([run.chunk(size, dim)[rank] for run in value.chunk(part.stride, dim)], dim)
    return value.contiguous()


def make(layout: Grid, at: Place, kind: str, dtype: torch.dtype, *, fill: float | None = None) -> nn.Module:
    model = nn.Module()
    for name, part in parts(layout, at, kind).items():
        value = cut(whole(kind)[name], part).to(dtype)
        value = value if fill is None else torch.full_like(value, fill)
        *outer, last = part.local.split(".")
        module = model
        for number, word in enumerate(outer):
            if word not in module._modules:
                is_list = number + 1 < len(outer) and outer[number + 1].isdigit()
                module.add_module(word, nn.ModuleList() if is_list else nn.Module())
            module = module._modules[word]
        if last in BUFFERS:
            module.register_buffer(last, value.clone())
            continue
        param: Any = nn.Parameter(value.clone())
        is_expert = "experts" in name or last == "stack"
        if is_expert:
            param.allreduce = False
        if (part.cuts and not is_expert) or (is_expert and layout.etp > 1):
            param.tensor_model_parallel, param.partition_dim = True, part.cuts[-1][0]
            param.partition_stride = part.stride
        setattr(module, last, param)
    return model


def build(layout: Grid, kind: str, *, bf16: bool = False, fill: float | None = None, **fields: Any) -> Any:
    at = layout.place(dist.get_rank())
    model = make(layout, at, kind, torch.bfloat16 if bf16 else torch.float32, fill=fill)
    groups = groups_of(layout)
    config = OptimizerConfig(lr=LR, weight_decay=0.1, clip_grad=0.0, bf16=bf16, **fields)
    return at, model, groups, get_optimizer(config, [model], {}, pg_collection=groups)


def step(layout: Grid, at: Place, kind: str, model: nn.Module, optimizer: Any, number: int) -> None:
    grads, named = whole(kind, number), dict(model.named_parameters())
    for name, part in parts(layout, at, kind).items():
        if part.local in named:
            param = named[part.local]
            param.grad = cut(grads[name], part).to(param.dtype)
            if not getattr(param, "allreduce", True):
                param.grad *= layout.dp / layout.expert_dp  # divided by the dense replicas, summed over its own
    assert optimizer.step().success
    optimizer.zero_grad()


def described(model: nn.Module, groups: ProcessGroups, optimizer: Any, *, groups_given: bool) -> dict[str, Any]:
    weights = sharded_model(model, groups=groups) if groups_given else sharded_model(model)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def train_and_save(layout: Grid, kind: str, path: str, *, groups_given: bool = False, **fields: Any) -> None:
    at, model, groups, optimizer = build(layout, kind, **fields)
    for number in (1, 2):
        step(layout, at, kind, model, optimizer, number)
    for buffer in model.buffers():
        buffer.add_(1)
    save(described(model, groups, optimizer, groups_given=groups_given), path)


def resume(layout: Grid, kind: str, path: str, *, groups_given: bool = False, **fields: Any) -> dict[str, Tensor]:
    """This rank's tensors after the load and one step, by global name."""
    at, model, groups, optimizer = build(layout, kind, fill=0.5, **fields)
    loaded = load(described(model, groups, optimizer, groups_given=groups_given), path).state
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    step(layout, at, kind, model, optimizer, 3)
    state = model.state_dict()
    return {name: state[part.local].clone() for name, part in parts(layout, at, kind).items()}


def save_and_resume_all(kind: str, pairs: dict[Grid, list[Grid]], folder: str, options: dict[str, Any]) -> Any:
    """Save on each layout, then resume on others; this rank's tensors by both."""
    found = {}
    for saved, others in pairs.items():
        path = f"{folder}/{saved}"
        train_and_save(saved, kind, path, **options)
        found |= {(saved, other): resume(other, kind, path, **options) for other in others}
    return found


def truth(kind: str) -> dict[str, Tensor]:
    """One process with the whole model, in fp64, by torch."""
    values = whole(kind)
    params = {n: nn.Parameter(v) for n, v in values.items() if n.rpartition(".")[2] not in BUFFERS}
    optimizer = torch.optim.AdamW(params.values(), lr=LR, weight_decay=0.1, eps=1e-8)
    for number in range(1, STEPS + 1):
        grads = whole(kind, number)
        for name, param in params.items():
            param.grad = grads[name]
        optimizer.step()
    buffers = {name: value + 1 for name, value in values.items() if name not in params}
    return {name: param.detach() for name, param in params.items()} | buffers


# --- tests ---

DENSE = [Grid(tp=2, dp=2), Grid(dp=4), Grid(tp=4), Grid(pp=2, dp=2), Grid(pp=2, tp=2), Grid(pp=4)]
MOE = [
    Grid(dp=4, ep=2),
    Grid(dp=4, ep=4),
    Grid(dp=4),
    Grid(tp=2, dp=2, ep=2, etp=2),
    Grid(tp=2, dp=2, ep=4),
    Grid(pp=2, dp=2, ep=2),
]
CASES: dict[str, tuple[str, list[Grid], dict[str, Any]]] = {
    "dense": ("dense", DENSE, {}),
    "dense, ZeRO-1": ("dense", DENSE, {"use_distributed_optimizer": True}),
    "dense, bf16": ("dense", DENSE[:4], {"use_distributed_optimizer": True, "bf16": True}),
    "dense, groups given": ("dense", DENSE, {"groups_given": True}),
    "experts": ("moe", MOE, {}),
    "experts, ZeRO-1": ("moe", MOE, {"use_distributed_optimizer": True}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_divided_model_is_resumed_on_its_own_and_on_other_layouts(case: str, tmp_path: Path) -> None:
    kind, layouts, options = CASES[case]
    pairs = {saved: [saved, *((layouts[i:] + layouts)[1:3])] for i, saved in enumerate(layouts)}
    per_rank = run_processes(4, save_and_resume_all, kind, pairs, str(tmp_path), options)
    expected = truth(kind)
    rounding = {"rtol": 2e-2, "atol": 2e-2} if options.get("bf16") else {"rtol": 1e-5, "atol": 1e-6}
    for saved, layout in per_rank[0]:
        seen = set()
        for rank, results in enumerate(per_rank):
            for name, part in parts(layout, layout.place(rank), kind).items():
                got, want = results[saved, layout][name].double(), cut(expected[name], part)
                torch.testing.assert_close(got, want, msg=f"{name}, saved on {saved}, loaded on {layout}", **rounding)
                seen.add(name)
        assert seen == expected.keys()
