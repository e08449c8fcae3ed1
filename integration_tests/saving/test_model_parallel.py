"""Models divided over tensor, expert and pipeline ranks come back on the ranks they belong to, at other sizes too.

Parts that cannot be placed are refused with a sentence on every rank, never saved as the whole.
"""

import re
from collections.abc import Callable
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist
from fuzz.cases import Grid, Place
from fuzz.ranks import process_groups
from processes import Job, once_a_world, refusal, run_jobs, run_processes
from tiers import NIGHT
from torch import Tensor, nn

from opt_checkpoint import ShardedTensor, load, save, sharded_model, sharded_optimizer
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_stack import OptimizerConfig, ProcessGroups, get_optimizer, run_threads

LAYERS, EXPERTS, LR, STEPS = 4, 4, 0.05, 3
OF_LAYER = {"up": (8, 4), "up_bias": (8,), "down": (4, 8), "down_bias": (4,), "norm": (4,), "gate": (16, 4)}
CUT = {"up": 0, "up_bias": 0, "down": 1, "gate": 0, "embed": 0, "head": 0}
BUFFERS = ("scale",)


@once_a_world
def groups_of(layout: Grid) -> ProcessGroups:
    """Process groups by role. Collective."""
    return process_groups(layout, dist.get_rank())


def whole(kind: str, step: int = 0) -> dict[str, Tensor]:
    """Values of the whole model (step 0) or gradients of a step, by global name, in fp64."""
    generator = torch.Generator().manual_seed(1000 * step + 1)
    names: dict[str, tuple[int, ...]] = {"embed": (12, 4), "head": (12, 4)}
    for n in range(LAYERS):
        names |= {f"layers.{n}.{name}": shape for name, shape in OF_LAYER.items()}
        if kind == "moe":
            names |= {f"layers.{n}.experts.{e}.up": (4, 3) for e in range(EXPERTS)}
            names[f"layers.{n}.stack"] = (EXPERTS, 3, 4)
        names[f"layers.{n}.scale"] = (4,)
    return {name: torch.randn(shape, generator=generator, dtype=torch.float64) for name, shape in names.items()}


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
        stage = 0 if name == "embed" else layout.pp - 1
        if words[0] == "layers":
            stage, words[1] = int(words[1]) // each, str(int(words[1]) % each)
        if at.stage != stage or ("experts" in words and int(words[3]) // experts != at.ep):
            continue
        dim = CUT.get(words[-1])
        cuts = () if dim is None else ((dim, at.tp, layout.tp),)
        if "experts" in words:
            words[3], cuts = str(int(words[3]) % experts), ((0, at.etp, layout.etp),)
        elif words[-1] == "stack":
            cuts = ((0, at.ep, layout.ep), (2, at.etp, layout.etp))
        found[name] = Part(".".join(words), cuts, 2 if words[-1] == "gate" else 1)
    return found


def cut(value: Tensor, part: Part) -> Tensor:
    for dim, rank, size in part.cuts:
        value = torch.cat([run.chunk(size, dim)[rank] for run in value.chunk(part.stride, dim)], dim)
    return value.contiguous()


class Run:
    """This rank's part of the model, and its optimizer; `fill` replaces the first values."""

    def __init__(
        self, layout: Grid, kind: str, *, fill: float | None = None, groups_given: bool = False, **fields: Any
    ):
        self.layout, self.kind, self.at, self.groups = layout, kind, layout.place(dist.get_rank()), groups_of(layout)
        self.described_by = {"groups": self.groups} if groups_given else {}
        self.model, self.parts = nn.Module(), parts(layout, self.at, kind)
        for name, part in self.parts.items():
            value = cut(whole(kind)[name], part).to(torch.bfloat16 if "bf16" in fields else torch.float32)
            self.add(name, part, value if fill is None else torch.full_like(value, fill))
        config = OptimizerConfig(lr=LR, weight_decay=0.1, clip_grad=0.0, **fields)
        self.optimizer = get_optimizer(config, [self.model], {}, pg_collection=self.groups)

    def add(self, name: str, part: Part, value: Tensor) -> None:
        *outer, last = part.local.split(".")
        module = self.model
        for number, word in enumerate(outer):
            if word not in module._modules:
                is_list = number + 1 < len(outer) and outer[number + 1].isdigit()
                module.add_module(word, nn.ModuleList() if is_list else nn.Module())
            module = module._modules[word]
        if last in BUFFERS:
            module.register_buffer(last, value)
            return
        param: Any = nn.Parameter(value)
        is_expert = "experts" in name or last == "stack"
        param.allreduce = not is_expert
        if self.layout.etp > 1 if is_expert else part.cuts:
            param.tensor_model_parallel, param.partition_dim = True, part.cuts[-1][0]
            param.partition_stride = part.stride
        setattr(module, last, param)

    def step(self, number: int) -> None:
        grads, named = whole(self.kind, number), dict(self.model.named_parameters())
        for name, part in self.parts.items():
            if part.local in named:
                param: Any = named[part.local]
                param.grad = cut(grads[name], part).to(param.dtype)
                if not param.allreduce:
                    param.grad *= self.layout.dp / self.layout.expert_dp  # divided by the dense replicas, then summed
        assert self.optimizer.step().success
        self.optimizer.zero_grad()

    def described(self) -> dict[str, Any]:
        weights = sharded_model(self.model, **self.described_by)
        return {"model": weights, "optimizer": self.optimizer.sharded_state_dict(weights)}


def resume(layout: Grid, kind: str, path: str, options: dict[str, Any]) -> dict[str, Tensor]:
    """This rank's tensors after the load and one step, by global name."""
    run = Run(layout, kind, fill=0.5, **options)
    loaded = load(run.described(), path).state
    run.model.load_state_dict(loaded["model"])
    run.optimizer.load_state_dict(loaded["optimizer"])
    run.step(3)
    state = run.model.state_dict()
    return {name: state[part.local].clone() for name, part in run.parts.items()}


def save_and_resume_all(kind: str, pairs: dict[Grid, list[Grid]], folder: str, options: dict[str, Any]) -> Any:
    """Save on each layout, then resume on others; this rank's tensors by both."""
    found = {}
    for saved, others in pairs.items():
        run = Run(saved, kind, **options)
        for number in (1, 2):
            run.step(number)
        for buffer in run.model.buffers():
            buffer.add_(1)
        save(run.described(), f"{folder}/{saved}")
        found |= {(saved, other): resume(other, kind, f"{folder}/{saved}", options) for other in others}
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


DENSE = [Grid(tp=2, dp=2), Grid(dp=4), Grid(tp=4), Grid(pp=2, dp=2), Grid(pp=2, tp=2), Grid(pp=4)]
MOE = [Grid(dp=4, ep=2), Grid(dp=4, ep=4), Grid(dp=4), Grid(tp=2, dp=2, ep=2, etp=2), Grid(tp=2, dp=2, ep=4)]
MOE.append(Grid(pp=2, dp=2, ep=2))
FLAT = {"use_distributed_optimizer": True}
CASES: dict[str, tuple[str, list[Grid], dict[str, Any]]] = {
    "dense": ("dense", DENSE, {}),
    "dense, ZeRO-1": ("dense", DENSE, FLAT),
    "dense, bf16": ("dense", DENSE[:4], {**FLAT, "bf16": True}),
    "dense, groups given": ("dense", DENSE, {"groups_given": True}),
    "experts": ("moe", MOE, {}),
    "experts, ZeRO-1": ("moe", MOE, FLAT),
}


@pytest.fixture(scope="module")
def four(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The tensors of four ranks that saved on each layout and resumed on it and on others, by case."""
    jobs, others = {}, 2 if NIGHT else 1
    for case, (kind, layouts, options) in CASES.items():
        pairs = {saved: [saved, *((layouts[i:] + layouts)[1 : 1 + others])] for i, saved in enumerate(layouts)}
        folder = str(tmp_path_factory.mktemp("saved"))
        jobs[case] = Job(save_and_resume_all, (kind, pairs, folder, options))
    return run_jobs(4, jobs)


@pytest.mark.parametrize("case", CASES)
def test_a_divided_model_is_resumed_on_its_own_and_on_other_layouts(case: str, four: Any) -> None:
    (kind, _, options), per_rank = CASES[case], four[case]
    expected = truth(kind)
    rounding = {"rtol": 2e-2, "atol": 2e-2} if "bf16" in options else {"rtol": 1e-5, "atol": 1e-6}
    for saved, layout in per_rank[0]:
        seen = set()
        for rank, results in enumerate(per_rank):
            for name, part in parts(layout, layout.place(rank), kind).items():
                got, want = results[saved, layout][name].double(), cut(expected[name], part)
                torch.testing.assert_close(got, want, msg=f"{name}, saved on {saved}, loaded on {layout}", **rounding)
                seen.add(name)
        assert seen == expected.keys()


def marked(**marks: Any) -> nn.Module:
    model = nn.Module()
    model.w = nn.Parameter(torch.rand(4, 3, generator=torch.Generator().manual_seed(7 + dist.get_rank())))
    for name, value in marks.items():
        setattr(model.w, name, value)
    return model


TP = {"tensor_model_parallel": True, "partition_dim": 0}


def groups(*roles: str) -> ProcessGroups:
    """All roles that must be given are a rank alone, but these are the world."""
    alone = dict.fromkeys(("dp", "expt_dp", "mp", "tp_ep_pp"))
    return ProcessGroups(**{**alone, **dict.fromkeys(roles, dist.group.WORLD)})


def describe(*roles: str, **marks: Any) -> None:
    sharded_model(marked(**marks), groups=groups(*roles))


def save_model(path: str, model: nn.Module) -> None:
    save({"model": sharded_model(model)}, path)


def replicated(key: str, tensor: torch.Tensor) -> ShardedTensor:
    return ShardedTensor.from_rank_offsets(key, tensor, replica_id=dist.get_rank())


def load_without_groups(path: str) -> None:
    save({"model": {"w": replicated("model.w", torch.zeros(4, 3))}}, path)
    load({"model": sharded_model(marked(**TP))}, path)


def stage(layers: int, *, value: float = 0.0) -> nn.Module:
    model = nn.ModuleDict({"layers": nn.ModuleList(nn.Linear(2, 2, bias=False) for _ in range(layers))})
    for number, param in enumerate(model.parameters()):
        nn.init.constant_(param, value + number)
    return model


def load_stages_without_groups(path: str) -> None:
    """The same first layers on every rank are loaded if the groups say so; a model of all layers needs no groups."""
    of_stages = groups("mp", "pp", "tp_ep_pp", "intra_dist_opt")
    save({"model": sharded_model(stage(2, value=10.0 * dist.get_rank()), groups=of_stages)}, path)
    for layers, given, expected in ((4, None, [0, 1, 10, 11]), (2, ProcessGroups(dp=dist.group.WORLD), [0, 1])):
        model = stage(layers, value=99.0)
        load({"model": sharded_model(model, groups=given)}, path)
        assert [param[0, 0].item() for param in model.parameters()] == expected
    load({"model": sharded_model(stage(2))}, path)


def save_torch_states(path: str) -> None:
    model = marked(**TP)
    optimizer = torch.optim.AdamW(model.parameters())
    model.w.grad = torch.ones_like(model.w)
    optimizer.step()
    save({"optimizer": sharded_optimizer(model, optimizer)}, path)


def parts_as_wholes(path: str) -> None:
    model = marked(**TP)
    optimizer = get_optimizer(OptimizerConfig(lr=0.1), [model], pg_collection=groups(*OF_TP))
    optimizer.sharded_state_dict({"w": replicated("w", model.w)})


OF_TP = ("mp", "tp_ep_pp", "tp", "intra_dist_opt")
UNKNOWN = "w is tensor parallel .* unknown without process groups"
REFUSED: dict[str, tuple[Callable[[str], Any], str]] = {
    "tp saved": (lambda path: save_model(path, marked(**TP)), rf"{UNKNOWN}; pass sharded_model\(model, groups="),
    "experts saved": (
        lambda path: save_model(path, marked(allreduce=False)),
        r"w is an expert \(allreduce=False\), .* pass sharded_model\(model, groups=",
    ),
    "stages saved": (
        lambda path: save_model(path, marked()),
        r"values differ .* for parts of one model sharded_model\(model, groups=\.\.\.\)",
    ),
    "loaded": (load_without_groups, UNKNOWN),
    "stages loaded": (
        load_stages_without_groups,
        r"model\.layers has 2 layers, and .* more \(model\.layers\.2\.weight\): .*groups=",
    ),
    "states of torch": (save_torch_states, UNKNOWN),
    "dim too large": (
        lambda path: describe(*OF_TP, **TP | {"partition_dim": 2}),
        "tensor_model_parallel=True, but partition_dim=2; set param.partition_dim",
    ),
    "strided columns": (
        lambda path: describe(*OF_TP, **TP | {"partition_dim": 1}, partition_stride=3),
        "partition_stride=3 and partition_dim=1; a stride above 1 is supported along dim 0",
    ),
    "dim missing on one rank": (
        lambda path: describe(*OF_TP, **(TP if dist.get_rank() else {"tensor_model_parallel": True})),
        "but no partition_dim; set param.partition_dim",
    ),
    "groups without tp": (
        lambda path: sharded_model(marked(**TP), groups=ProcessGroups(dp=None, mp=dist.group.WORLD)),
        "account for 1 of 2 ranks with dense parameters .*pass every group of opt_stack.ProcessGroups",
    ),
    "experts without ep": (
        lambda path: describe("dp", "tp_ep_pp", allreduce=False),
        "account for 1 of 2 ranks with experts .*pass every group of opt_stack.ProcessGroups",
    ),
    "parts as wholes": (parts_as_wholes, "describes each part as the whole; pass opt_checkpoint.sharded_model"),
}


def ask_all(folder: str) -> dict[str, str]:
    return {name: refusal(lambda ask=ask, name=name: ask(f"{folder}/{name}")) for name, (ask, _) in REFUSED.items()}


def test_a_part_of_unknown_place_is_refused_on_every_rank(tmp_path_factory: pytest.TempPathFactory) -> None:
    for rank in run_processes(2, ask_all, str(tmp_path_factory.mktemp("refused"))):
        for name, (_, message) in REFUSED.items():
            assert re.search(message, rank[name]), f"{name}: {rank[name]}"


@pytest.mark.parametrize("is_expert", [False, True], ids=["stages", "experts"])
def test_the_local_state_of_another_stage_or_expert_rank_is_refused(is_expert: bool) -> None:
    states: dict[int, Any] = {}

    def rank_main(comm: Comm) -> str:
        alone = Axes(dp=Alone(), tp=Alone())
        roles = Roles(dense=Axes(dp=comm, tp=Alone()) if is_expert else alone, expert=alone, everyone=comm)
        model = nn.Linear(3, 2)
        for param in model.parameters():
            nn.init.constant_(param, comm.rank + 1)
            param.allreduce, param.grad = not is_expert, torch.ones_like(param)
        optimizer = get_optimizer(OptimizerConfig(lr=0.1), [model], pg_collection=roles)
        optimizer.step()
        assert optimizer.has_rank_local_state
        states[comm.rank] = optimizer.state_dict()
        comm.gather_objects("saved")
        optimizer.load_state_dict(states[comm.rank])
        return refusal(lambda: optimizer.load_state_dict(states[1 - comm.rank]))

    kind = "experts" if is_expert else "dense"
    for rank, message in enumerate(run_threads(2, rank_main)):
        assert f"was saved on layout replicated, {kind} part {1 - rank} of 2, but this optimizer has" in message
