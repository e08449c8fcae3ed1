"""Models divided over tensor, expert and pipeline ranks come back on the ranks they belong to, at other sizes too."""

from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from processes import once_a_world, run_processes
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from opt_checkpoint import load, save, sharded_model
from opt_stack import OptimizerConfig, ProcessGroups, get_optimizer

LAYERS, EXPERTS, LR, STEPS = 4, 4, 0.05, 3


class Layout(NamedTuple):
    """How many ranks along each axis; rank = (pp, dp, tp), the last one changes first."""

    tp: int = 1
    dp: int = 1
    pp: int = 1
    ep: int = 1
    etp: int = 1

    @property
    def world(self) -> int:
        return self.tp * self.dp * self.pp


class At(NamedTuple):
    tp: int
    dp: int
    pp: int
    ep: int
    etp: int


def place(layout: Layout, rank: int) -> At:
    in_stage = rank % (layout.tp * layout.dp)
    etp, ep = in_stage % layout.etp, in_stage // layout.etp % layout.ep
    return At(rank % layout.tp, rank // layout.tp % layout.dp, rank // (layout.tp * layout.dp), ep, etp)


@once_a_world
def groups_of(layout: Layout) -> ProcessGroups:
    """Process groups by role. Collective."""
    everyone = [place(layout, rank) for rank in range(layout.world)]
    me = everyone[dist.get_rank()]
    same = {
        "tp": lambda at: (at.dp, at.pp),
        "dp": lambda at: (at.tp, at.pp),
        "mp": lambda at: at.dp,
        "pp": lambda at: (at.dp, at.tp),
        "expt_tp": lambda at: (at.pp, at.ep, edp(layout, at)),
        "ep": lambda at: (at.pp, at.etp, edp(layout, at)),
        "expt_dp": lambda at: (at.pp, at.etp, at.ep),
        "tp_ep_pp": lambda at: edp(layout, at),
    }
    found: dict[str, Any] = {"intra_dist_opt": dist.group.WORLD}
    for role, key in same.items():
        for value in dict.fromkeys(map(key, everyone)):
            ranks = [rank for rank, at in enumerate(everyone) if key(at) == value]
            group = dist.new_group(ranks) if len(ranks) > 1 else None
            if key(me) == value:
                found[role] = group
    return ProcessGroups(**found)


def edp(layout: Layout, at: At) -> int:
    return (at.dp * layout.tp + at.tp) // (layout.etp * layout.ep)


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


def parts(layout: Layout, at: At, kind: str) -> dict[str, Part]:
    """This rank's part of each whole tensor that it has, by global name."""
    found = {}
    each, experts = LAYERS // layout.pp, EXPERTS // layout.ep
    for name in whole(kind):
        words = name.split(".")
        if words[0] != "layers":
            stage = 0 if name == "embed" else layout.pp - 1
            if at.pp != stage:
                continue
        else:
            stage, words[1] = int(words[1]) // each, str(int(words[1]) % each)
            if at.pp != stage:
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


def make(layout: Layout, at: At, kind: str, dtype: torch.dtype, *, fill: float | None = None) -> nn.Module:
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


def build(layout: Layout, kind: str, *, bf16: bool = False, fill: float | None = None, **fields: Any) -> Any:
    at = place(layout, dist.get_rank())
    model = make(layout, at, kind, torch.bfloat16 if bf16 else torch.float32, fill=fill)
    groups = groups_of(layout)
    config = OptimizerConfig(lr=LR, weight_decay=0.1, clip_grad=0.0, bf16=bf16, **fields)
    return at, model, groups, get_optimizer(config, [model], {}, pg_collection=groups)


def step(layout: Layout, at: At, kind: str, model: nn.Module, optimizer: Any, number: int) -> None:
    grads, named = whole(kind, number), dict(model.named_parameters())
    for name, part in parts(layout, at, kind).items():
        if part.local in named:
            param = named[part.local]
            param.grad = cut(grads[name], part).to(param.dtype)
            if not getattr(param, "allreduce", True):
                param.grad *= expert_share(layout)
    assert optimizer.step().success
    optimizer.zero_grad()


def expert_share(layout: Layout) -> float:
    """Gradients of experts are divided by the dense replicas, but summed over their own."""
    own = layout.dp * layout.tp // (layout.etp * layout.ep)
    return layout.dp / own


def described(model: nn.Module, groups: ProcessGroups, optimizer: Any, *, groups_given: bool) -> dict[str, Any]:
    weights = sharded_model(model, groups=groups) if groups_given else sharded_model(model)
    return {"model": weights, "optimizer": optimizer.sharded_state_dict(weights)}


def train_and_save(layout: Layout, kind: str, path: str, *, groups_given: bool = False, **fields: Any) -> None:
    at, model, groups, optimizer = build(layout, kind, **fields)
    for number in (1, 2):
        step(layout, at, kind, model, optimizer, number)
    for buffer in model.buffers():
        buffer.add_(1)
    save(described(model, groups, optimizer, groups_given=groups_given), path)


def resume(layout: Layout, kind: str, path: str, *, groups_given: bool = False, **fields: Any) -> dict[str, Tensor]:
    """This rank's tensors after the load and one step, by global name."""
    at, model, groups, optimizer = build(layout, kind, fill=0.5, **fields)
    loaded = load(described(model, groups, optimizer, groups_given=groups_given), path).state
    model.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    step(layout, at, kind, model, optimizer, 3)
    state = model.state_dict()
    return {name: state[part.local].clone() for name, part in parts(layout, at, kind).items()}


def save_and_resume_all(kind: str, pairs: dict[Layout, list[Layout]], folder: str, options: dict[str, Any]) -> Any:
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


def load_under_fsdp2(path: str) -> str:
    """As docs/first_hour.md writes it; the rows are uneven."""
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    models = [torch.nn.Sequential(torch.nn.Linear(3, 5), torch.nn.BatchNorm1d(5)) for _ in range(2)]
    for value, model in enumerate(models, start=1):
        for tensor in (*model.parameters(), *model.buffers()):
            tensor.data.fill_(value)
        fully_shard(model, mesh=mesh)
    save({"model": sharded_model(models[0])}, path)
    state = load({"model": sharded_model(models[1])}, path).state
    assert all(isinstance(state["model"][name], DTensor) for name, _ in models[1].named_parameters())
    for param in models[1].parameters():
        param.data.zero_()
    models[1].load_state_dict(load({"model": sharded_model(models[1])}, path).state["model"])
    for name, value in models[1].state_dict().items():
        value = value.full_tensor() if isinstance(value, DTensor) else value
        assert torch.equal(value, torch.ones_like(value)), name
    return "loaded"


# --- tests ---

DENSE = [Layout(tp=2, dp=2), Layout(dp=4), Layout(tp=4), Layout(pp=2, dp=2), Layout(pp=2, tp=2), Layout(pp=4)]
MOE = [
    Layout(dp=4, ep=2),
    Layout(dp=4, ep=4),
    Layout(dp=4),
    Layout(tp=2, dp=2, ep=2, etp=2),
    Layout(tp=2, dp=2, ep=4),
    Layout(pp=2, dp=2, ep=2),
]
CASES: dict[str, tuple[str, list[Layout], dict[str, Any]]] = {
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
            for name, part in parts(layout, place(layout, rank), kind).items():
                got, want = results[saved, layout][name].double(), cut(expected[name], part)
                torch.testing.assert_close(got, want, msg=f"{name}, saved on {saved}, loaded on {layout}", **rounding)
                seen.add(name)
        assert seen == expected.keys()


def test_the_loaded_state_of_a_model_under_fsdp2_fits_the_model(tmp_path: Path) -> None:
    for rank in run_processes(2, load_under_fsdp2, str(tmp_path / "x")):
        assert rank == "loaded", rank
