"""What differs on one rank is refused on every rank, with its name; so are models that would not train, and a step to
which one pipeline stage objects: its gradient is sparse, or its groups were replaced."""

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import slow_tiger
import torch
from parity import LR, Net, roles_over
from processes import refusal
from torch import Tensor, nn

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.buffers import DistributedDataParallel, UnusableGradientError
from opt_distributed.buffers.main_grad import SparseGradientError
from opt_distributed.comm import Alone, Axes, Comm, Roles
from opt_distributed.comm.threads import ThreadComm, World
from opt_kernels.formulas import Formula
from opt_kernels.formulas.lion import LION
from opt_kernels.formulas.schedule_free import SCHEDULE_FREE
from opt_kernels.hooks import ClipUpdateRms
from opt_kernels.rules import MuonRule, Rule
from opt_stack import (
    Optimizer,
    Registry,
    RuleEntry,
    get_optimizer,
    get_optimizer_based_on_param_groups,
    release_gradients,
)

Options = dict[str, Any]


def rule(made: Rule, **hyper: Any) -> Options:
    entry = RuleEntry(name="own", summary="", make=lambda config: made, hyper=lambda config: hyper)
    return {"rules": Registry().with_rule(entry), "optimizer": "own"}


def formula(made: Formula) -> Options:
    return {"rules": Registry().with_formula(replace(made, name="own")), "optimizer": "own"}


def other_scalars(*, lr: float, weight_decay: float, beta1: float, beta2: float) -> dict[str, float]:
    return {"lr": lr, "decay": 1 - lr * weight_decay, "weight1": 1 - beta1, "weight2": 1 - beta2 * beta2}


def other_average(p: Any, z: Any, *, beta1: float) -> Any:
    return p + (1 - beta1) * (z - p)


# What rank 0 has, what the last rank has, and what the sentence shows.
CASES: dict[str, tuple[Options, Options, str]] = {
    "hooks": ({}, {"hooks": (ClipUpdateRms(2.0),)}, r"hooks=\[\].*hooks=\[ClipUpdateRms\(threshold=2.0\)\]"),
    "the dtype of a state": (
        rule(MuonRule()), rule(MuonRule(momentum_buffer_dtype=torch.bfloat16)),
        r"dtype=torch\.float32.*dtype=torch\.bfloat16",
    ),
    "a formula's source": (formula(LION), formula(replace(LION, scalars=other_scalars)), "source=.*source="),
    "a formula's evaluation": (
        formula(SCHEDULE_FREE), formula(replace(SCHEDULE_FREE, evaluation=(other_average, other_average))),
        "source=.*source=",
    ),
    "a formula's default": (
        formula(slow_tiger.RULE), formula(slow_tiger.RULE.with_defaults(period=4)), "period=3.*period=4",
    ),
    "a number of groups": (
        rule(MuonRule(), momentum=0.9), rule(MuonRule(), momentum=0.8),
        "momentum of w is 0.9 on rank 0 and 0.8 on rank",
    ),
}  # fmt: skip


def matrix(*, is_part: bool) -> nn.Module:
    model = nn.Module()
    model.register_parameter("w", nn.Parameter(torch.ones(6, 4)))
    if is_part:
        model.w.tensor_model_parallel = True
        model.w.partition_dim = 0
        model.w.partition_stride = 1
    return model


@pytest.mark.parametrize(("size", "parallel"), [(2, "data"), (3, "tensor")])
@pytest.mark.parametrize("case", CASES)
def test_another_option_of_one_rank_is_refused_on_every_rank(case: str, size: int, parallel: str) -> None:
    of_first, of_last, message = CASES[case]

    def rank_main(comm: Comm) -> str:
        options = dict(of_last if comm.rank == size - 1 else of_first)
        config = OptimizerConfig(lr=0.1, optimizer=options.pop("optimizer", "adam"))
        is_part = parallel == "tensor"
        roles = roles_over(tp=comm) if is_part else roles_over(comm)
        model = matrix(is_part=is_part)
        with pytest.raises(ValueError, match=message) as caught:
            get_optimizer(config, [model], {}, pg_collection=roles, **options)
        return str(caught.value)

    assert len(set(run_threads(size, rank_main))) == 1


def test_a_group_that_differs_on_one_replica_is_refused_on_all() -> None:
    """Ranks that had found the difference among their replicas did not compare with their tensor-parallel peers, which
    waited for them."""
    parts, replicas = ([World(2, timeout_s=30) for _ in range(2)] for _ in range(2))

    def rank_main(comm: Comm) -> None:
        replica, part = divmod(comm.rank, 2)
        axes = Axes(dp=ThreadComm(replicas[part], replica), tp=ThreadComm(parts[replica], part))
        roles = Roles(dense=axes, expert=axes, everyone=comm)
        model = matrix(is_part=True)
        groups = [{"params": [model.w], "weight_decay": 0.2 if comm.rank == 3 else 0.1}]
        with pytest.raises(ValueError, match=r"weight_decay of w is 0\.1 on rank 0 and 0\.2 on rank 1"):
            get_optimizer_based_on_param_groups(OptimizerConfig(lr=0.1), [model], groups, pg_collection=roles)

    run_threads(4, rank_main)


def test_a_mark_that_changes_no_group_may_differ() -> None:
    def rank_main(comm: Comm) -> int:
        model = matrix(is_part=False)
        if comm.rank == 1:
            model.w._no_weight_decay = True
        return len(get_optimizer(OptimizerConfig(lr=0.1), [model], {}, pg_collection=roles_over(comm)).param_groups)

    assert run_threads(2, rank_main) == [1, 1]


# --- fields, marks, wrappers, files -----------------------------------------------------------------------------------

FIELDS: Options = {
    "optimizer": "sgd",
    "use_distributed_optimizer": True,
    "decoupled_weight_decay": False,
    "lr": 2 * LR,
    "adam_beta2": 0.5,
    "clip_grad": 7.0,
    "loss_scale": 8.0,
    "grad_norm_skip_threshold": 3.0,
    "log_num_zeros_in_grad": True,
}
MARKS = {"grad_norm_group": "mtp", "shared": True, "tensor_model_parallel": True}
FLAT = {"use_distributed_optimizer": True}


def net_with(**marks: Any) -> Net:
    net = Net(torch.float32)
    for name, value in marks.items():
        setattr(net.second.weight, name, value)
    return net


def config(**fields: Any) -> OptimizerConfig:
    return OptimizerConfig(**{"lr": LR, "clip_grad": 0.0, **fields})


def built(comm: Comm, net: nn.Module | None = None, **fields: Any) -> object:
    return get_optimizer(config(**fields), [net or net_with()], {}, pg_collection=roles_over(comm))


def wrapped(net: nn.Module, groups: Any = None, *, per_token: bool = False, **fields: Any) -> DistributedDataParallel:
    ddp = DistributedDataParallelConfig(**fields)
    return DistributedDataParallel(ddp, net, groups=groups, calculate_per_token_loss=per_token)


def on_rank_1(comm: Comm, **given: Any) -> Options:
    return given if comm.rank == 1 else {}


# Only the plan was compared: another learning rate let weights diverge, another norm limit hung. Norms counted an
# element on one rank only, or in two groups' norms. With a wrapper over other ranks, each rank stepped with its own
# gradients, without an error.
DIFFERENT: dict[str, tuple[Callable[[Comm], object], tuple[str, ...]]] = {
    **{
        field: (
            lambda comm, field=field: built(comm, **on_rank_1(comm, **{field: FIELDS[field]})),
            (f"{field} is ", f"{FIELDS[field]!r} on ranks [1]"),
        )
        for field in FIELDS
    },
    **{
        mark: (
            lambda comm, mark=mark: built(comm, net_with(**on_rank_1(comm, **{mark: MARKS[mark]}))),
            ("of second.weight is", f"{MARKS[mark]!r} on rank 1"),
        )
        for mark in MARKS
    },
    "another schedule": (
        lambda comm: built(comm, ema_decay=(lambda step, decay=0.9 - comm.rank / 2: decay)),
        ("ema_decay is {1: 0.9, ", "{1: 0.4, "),
    ),
    "another loss": (
        lambda comm: wrapped(net_with(), roles_over(comm), per_token=comm.rank == 1),
        ("calculate_per_token_loss is False on rank 0 and True on rank 1",),
    ),
    "other ranks": (
        lambda comm: built(comm, wrapped(net_with(), roles_over(Alone()))),
        ("data-parallel groups of 1 x 1 ranks",),
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_ranks_that_differ_all_refuse_and_name_what_differs(what: str) -> None:
    attempt, words = DIFFERENT[what]
    for message in run_threads(2, lambda comm: refusal(lambda: attempt(comm))):
        assert all(word in message for word in words)


def test_ranks_may_log_elsewhere_and_write_maps_together_only(tmp_path: Path) -> None:
    """A rank that logged alone waited for the others in another collective than they were in."""

    def rank_main(comm: Comm, rank: int) -> str:
        log, path = (str(tmp_path / name) if comm.rank == rank else None for name in ("logs", "map"))
        built(comm, config_logger_dir=log or "")
        options = {"pg_collection": roles_over(comm), "dump_param_to_param_group_map": path}
        return refusal(lambda: get_optimizer(config(config_logger_dir=log or ""), [net_with()], {}, **options))

    for rank in (1, 0):
        for message in run_threads(2, lambda comm, rank=rank: rank_main(comm, rank)):
            assert "dump_param_to_param_group_map is " in message
        assert (tmp_path / "logs").exists() == (rank == 0)


# --- models that would not train --------------------------------------------------------------------------------------


TWICE = "gradients of 'embedding.weight' (and 7 more) accumulate in a buffer already"
UNTRAINED: tuple[tuple[Callable[[], object], str], ...] = (
    (lambda: built(Alone(), net_with(grad_norm_group="other")), "has grad_norm_group='other'; allowed are"),
    (lambda: built(Alone(), net_with(grad_norm_group="")), "has grad_norm_group=''; allowed are 'mtp'"),
    # Gradients went to the first wrapper: every step succeeded with a norm of zero and updated nothing.
    (lambda: built(Alone(), wrapped(net_with()).module), "model chunk 0 is a plain Net, but gradients of 'embedding"),
    (lambda: wrapped(wrapped(net_with()).module), TWICE),
    (lambda: wrapped(wrapped(net_with())), TWICE),
)


def test_models_that_would_not_train_are_refused() -> None:
    for attempt, message in UNTRAINED:
        assert message in refusal(attempt)


# --- objections of a pipeline stage in a step ------------------------------------------------------------------------

OTHER = "1 other rank(s) refused their gradients, parameter groups or weights"
REPLACED = "param_groups hold other parameters than those that this optimizer was built with"


class Stage(nn.Module):
    """The first has a lookup, which gives sparse gradients if it is asked to."""

    def __init__(self, number: int) -> None:
        super().__init__()
        self.add_module("linear" if number else "embedding", nn.Linear(4, 4) if number else nn.Embedding(8, 4))

    def forward(self, *, sparse: bool) -> Tensor:
        ((name, inner),) = self.named_children()
        inner.sparse = sparse
        out: Tensor = inner(torch.ones(2, 4).bfloat16() if name == "linear" else torch.tensor([1, 2]))
        return out


def set_groups(of_group: Callable[[Options], Options]) -> Callable[[nn.Module, Optimizer], None]:
    return lambda model, optimizer: setattr(optimizer, "param_groups", list(map(of_group, optimizer.param_groups)))


def load_zeros(model: nn.Module, optimizer: Optimizer) -> None:
    model.load_state_dict({name: torch.zeros_like(value) for name, value in model.state_dict().items()})


# What happens on the first stage, and the error there.
OBJECTIONS: dict[str, tuple[Callable[[nn.Module, Optimizer], object], str]] = {
    "sparse": (
        lambda model, optimizer: None,
        "gradient of 'embedding.weight' is torch.sparse_coo; dense (torch.strided) gradients are allowed",
    ),
    "other params": (
        set_groups(lambda group: group | {"params": [nn.Parameter(torch.zeros_like(p)) for p in group["params"]]}),
        REPLACED,
    ),
    "no groups": (lambda model, optimizer: setattr(optimizer, "param_groups", []), REPLACED),
    "no rate": (set_groups(lambda group: group | {"lr": None}), "lr of group"),
    "another rule": (
        set_groups(lambda group: group | {"optimizer": "lion"}),
        "group 'default': optimizer='lion' was set ",
    ),
    "loaded weights": (load_zeros, "weights were loaded into the model: 'embedding.weight' has other values"),
}


def stepped(optimizer: Optimizer, *, halves: bool) -> str:
    try:
        if not halves:
            optimizer.step()
        elif not optimizer.prepare_grads():
            optimizer.step_with_ready_grads()
    except (UnusableGradientError, ValueError) as caught:
        return str(caught)
    return ""


@pytest.mark.parametrize("halves", [False, True], ids=["whole step", "in halves"])
@pytest.mark.parametrize(
    ("name", "wrapped"), [*((name, False) for name in OBJECTIONS), ("sparse", True), ("loaded weights", True)]
)
def test_a_refusal_of_one_stage_refuses_that_step_on_all_ranks(name: str, wrapped: bool, halves: bool) -> None:
    """It raised on that stage alone, and the others waited for its statistics until the timeout."""
    change, message = OBJECTIONS[name]

    def rank_main(comm: Comm) -> list[tuple[str, bool]]:
        """Of each step the error, and whether a weight has moved."""
        roles = roles_over(everyone=comm)
        model = Stage(comm.rank).bfloat16()
        if wrapped:
            model = DistributedDataParallel(DistributedDataParallelConfig(), model, groups=roles)
        optimizer = get_optimizer(OptimizerConfig(lr=0.1, bf16=True), [model], {}, pg_collection=roles)
        found = []
        groups = optimizer.param_groups
        for number in range(3):
            model(sparse=number == 1 and name == "sparse").sum().backward()
            if comm.rank == 0 and number == 1:
                change(model, optimizer)
            before = [param.detach().clone() for param in model.parameters()]
            error = stepped(optimizer, halves=halves)
            optimizer.param_groups = groups
            optimizer.reload_model_params()
            optimizer.zero_grad()
            found.append((error, not all(map(torch.equal, before, model.parameters()))))
        return found

    for of_rank, start in zip(run_threads(2, rank_main), (message, OTHER), strict=True):
        assert of_rank[1][0].startswith(start)
        assert [(bool(error), moved) for error, moved in of_rank] == [(False, True), (True, False), (False, True)]


def test_a_sparse_released_gradient_is_refused_in_backward() -> None:
    model = Stage(0)
    release = release_gradients(get_optimizer(OptimizerConfig(lr=0.1, clip_grad=0.0), [model], {}))
    before = model.embedding.weight.detach().clone()
    with pytest.raises(SparseGradientError, match=r"is torch\.sparse_coo"):
        model(sparse=True).sum().backward()
    assert torch.equal(model.embedding.weight, before)
    assert release.optimizer.in_backward is release
