"""QK-clip: factors against a float64 formula in every precision and layout, equal weights on all ranks, refusals."""

import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from grids import LateComm
from stack_models import assert_equal, over, weights
from torch import Tensor, nn

from opt_config import ConfigError, DistributedDataParallelConfig, OptimizerConfig
from opt_distributed import run_threads
from opt_distributed.comm import Alone, Comm, Roles
from opt_distributed.comm.threads import ThreadComm, World
from opt_kernels.quantized import quantize_linears_, quantized
from opt_stack import DistributedDataParallel, Optimizer, QKClip, get_optimizer
from opt_stack.qk_clip import Attention, fused_qkv, latent_attention, separate_qk

IN = 5
HEADS = 4
GROUPS = 2
DIM = 3
VALUE = 2
NOPE = 3
ROPE = 2
LOGITS = torch.tensor([400.0, 25.0, 99.0, 250.0])
SGD = {"optimizer": "sgd", "sgd_momentum": 0.0, "lr": 0.5, "weight_decay": 0.0, "clip_grad": 0.0}


class Model(nn.Module):
    """Weights of attention layers of every kind, and a matrix that is none."""

    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        fused = GROUPS * (HEADS // GROUPS * DIM + DIM + VALUE)
        shapes = {
            "qkv": (fused, IN),
            "qkv_bias": (fused,),
            "query": (HEADS * DIM, IN),
            "key": (GROUPS * DIM, IN),
            "key_bias": (GROUPS * DIM,),
            "query_up": (HEADS * (NOPE + ROPE), IN),
            "key_value_up": (HEADS * (NOPE + VALUE), IN),
            "mlp": (7, IN),
        }
        numbers = torch.Generator().manual_seed(5)
        for name, shape in shapes.items():
            self.register_parameter(name, nn.Parameter(torch.randn(shape, generator=numbers).to(dtype)))

    def forward(self, scale: float) -> Tensor:
        numbers = torch.Generator().manual_seed(6)
        parts = [(p * (torch.randn(p.shape, generator=numbers) * scale).to(p)).sum() for p in self.parameters()]
        return torch.stack(parts).sum().float()


def layers_of(model: Any) -> list[Attention]:
    return [
        fused_qkv(model.qkv, model.qkv_bias, num_heads=HEADS, num_query_groups=GROUPS, head_dim=DIM, value_dim=VALUE),
        separate_qk(
            model.query, model.key, key_bias=model.key_bias, num_heads=HEADS, num_query_groups=GROUPS, head_dim=DIM
        ),
        latent_attention(
            model.query_up, model.key_value_up, num_heads=HEADS, nope_dim=NOPE, rope_dim=ROPE, value_dim=VALUE
        ),
    ]


def build(
    model: nn.Module, roles: Roles, wrapper: dict[str, Any] | None = None, **fields: Any
) -> tuple[nn.Module, Optimizer]:
    chunk: nn.Module = model
    if wrapper is not None:
        chunk = DistributedDataParallel(DistributedDataParallelConfig(**wrapper), model, groups=roles)
    return chunk, get_optimizer(OptimizerConfig(**{**SGD, **fields}), [chunk], {}, pg_collection=roles)


BF16 = torch.bfloat16
BY_GROUP = [400.0, 250.0]


def factors(alpha: float, threshold: float = 100.0) -> dict[str, Tensor]:
    """What each row is multiplied by, in float64, written out head by head."""
    by_head = [min(1.0, threshold / logit) for logit in LOGITS.double().tolist()]
    by_group = [min(1.0, threshold / logit) for logit in BY_GROUP]
    fused = []
    query = []
    key = []
    query_up = []
    key_value_up = []
    for gamma in by_group:
        fused += [gamma**alpha] * (HEADS // GROUPS * DIM) + [gamma ** (1 - alpha)] * DIM + [1.0] * VALUE
        query += [gamma**alpha] * (HEADS // GROUPS * DIM)
        key += [gamma ** (1 - alpha)] * DIM
    for gamma in by_head:
        query_up += [gamma**alpha] * NOPE + [gamma] * ROPE
        key_value_up += [gamma ** (1 - alpha)] * NOPE + [1.0] * VALUE
    rows = {"qkv": fused, "qkv_bias": fused, "query": query, "key": key, "key_bias": key}
    rows |= {"query_up": query_up, "key_value_up": key_value_up, "mlp": [1.0] * 7}
    return {name: torch.tensor(values, dtype=torch.float64) for name, values in rows.items()}


def scaled_by(rows: Tensor, value: Tensor) -> Tensor:
    return value.double() * rows.view(-1, *[1] * (value.dim() - 1))


def step(chunk: nn.Module, optimizer: Optimizer, scale: float) -> None:
    chunk(scale).backward()
    assert optimizer.step().success
    optimizer.zero_grad()


def check_close(found: Tensor, expected: Tensor, what: str) -> None:
    """Three roundings: of the factor, of the product, and of a 16-bit parameter."""
    torch.testing.assert_close(
        found.double(), expected, rtol=3 * torch.finfo(found.dtype).eps, atol=0.0, msg=lambda text: f"{what}: {text}"
    )


def logits_here(comm: Comm) -> list[Tensor]:
    """Each rank has seen the largest logits of some heads only."""
    seen = torch.arange(HEADS) % comm.size == comm.rank
    return [torch.where(seen, LOGITS, torch.tensor(-3.0))] * 3


HOST = {"optimizer_cpu_offload": True, "optimizer_offload_fraction": 1.0}
MODES: dict[str, tuple[torch.dtype, dict[str, Any]]] = {
    "fp32": (torch.float32, {}),
    "bf16 parameters with fp32 mains": (BF16, {"bf16": True}),
    "fp16": (torch.float16, {"fp16": True, "loss_scale": 8.0}),
    "remainders": (BF16, {"bf16": True, "use_precision_aware_optimizer": True, "use_distributed_optimizer": True}),
}


@pytest.mark.parametrize("alpha", [0.5, 0.25, 0.0, 1.0])
@pytest.mark.parametrize("mode", MODES)
def test_rows_of_each_head_are_scaled_as_the_formula_says(mode: str, alpha: float) -> None:
    """Then a step without gradients: main values were scaled too, so nothing springs back."""
    dtype, fields = MODES[mode]
    model = Model(dtype)
    chunk, optimizer = build(model, over(Alone()), **fields)
    clip = QKClip(optimizer, layers_of(model), alpha=alpha)
    step(chunk, optimizer, 1.0)
    before = [main.double().clone() for main in optimizer.get_parameters()]
    assert clip(logits_here(Alone())) == 400.0
    scaled = zip(model.named_parameters(), before, optimizer.get_parameters(), strict=True)
    for (name, param), was, main in scaled:
        expected = scaled_by(factors(alpha)[name], was)
        check_close(main, expected, f"main values of {name}")
        assert torch.equal(param, main.to(dtype)) or mode == "remainders"
        check_close(param.detach(), expected, name)
    after = weights(model)
    step(chunk, optimizer, 0.0)
    assert_equal(weights(model), after)


FLAT = {"use_distributed_optimizer": True}
GATHERS = {**FLAT, "overlap_param_gather": True}
NARROW = {"bf16": True, "use_precision_aware_optimizer": True}
LAYOUTS: dict[str, tuple[dict[str, Any] | None, dict[str, Any]]] = {
    "replicated": (None, {}),
    "ZeRO-1": (None, FLAT),
    "ZeRO-1, bf16": (None, {**FLAT, "bf16": True}),
    "ZeRO-1, remainders": (None, {**FLAT, **NARROW}),
    "ZeRO-1, scaled fp16 mains": (None, {**FLAT, **NARROW, "main_params_dtype": torch.float16}),
    "ZeRO-1, state on the host": (None, {**FLAT, "bf16": True, **HOST}),
    "wrapped": (FLAT, FLAT),
    "wrapped, gathers overlap": ({**GATHERS, "bucket_size": 30}, GATHERS),
    "layer-wise": (None, {"optimizer": "muon", "use_layer_wise_distributed_optimizer": True, "muon_momentum": 0.0}),
}


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_has_the_weights_of_one_process(name: str) -> None:
    """Element by element the same arithmetic, so the same bits; and the next step starts from them on every rank."""
    wrapper, fields = LAYOUTS[name]
    dtype = BF16 if fields.get("bf16") else torch.float32

    def rank_main(comm: Comm) -> list[dict[str, Tensor]]:
        if isinstance(comm, ThreadComm) and "overlap" in name:
            comm = LateComm(comm)  # a gather under way must not bring back what was clipped
        model = Model(dtype)
        chunk, optimizer = build(model, over(comm), wrapper, **fields)
        clip = QKClip(optimizer, layers_of(model), alpha=0.25)
        found = []
        for scale in (1.0, 0.5):
            step(chunk, optimizer, scale)
            assert clip(logits_here(comm)) == 400.0
            if isinstance(chunk, DistributedDataParallel):
                chunk.finish_param_sync()
            found.append(weights(model))
        return found

    expected = rank_main(Alone())
    assert not torch.equal(expected[0]["qkv"], Model(dtype).qkv)
    assert_equal(run_threads(2, rank_main), [expected] * 2)


@pytest.mark.parametrize("recipe", ["tensorwise", "mxfp8"])
@pytest.mark.parametrize("sharded", [False, True], ids=["replicated", "ZeRO-1"])
def test_fp8_weights_are_requantised_from_scaled_main_values(recipe: str, sharded: bool) -> None:
    """With the codes and scales of one process."""

    def rank_main(comm: Comm) -> list[Tensor]:
        model = nn.Sequential(nn.Linear(32, 3 * 32, bias=False, dtype=BF16))
        generator = torch.Generator().manual_seed(1)
        model[0].weight.data.copy_(torch.randn(96, 32, generator=generator))
        quantize_linears_(model, recipe)
        _, optimizer = build(model, over(comm), bf16=True, fp8_recipe=recipe, use_distributed_optimizer=sharded)
        weight = model[0].weight
        before = quantized(weight).values().double()  # type: ignore[union-attr]
        clip = QKClip(optimizer, [fused_qkv(weight, num_heads=4, head_dim=8)])
        clip([torch.full((4,), 1600.0)])
        stored = quantized(model[0].weight)
        assert stored is not None
        rows = torch.tensor(([0.25] * 16 + [1.0] * 8) * 4, dtype=torch.float64)[:, None]
        difference = (stored.values().double() - before * rows).abs()
        assert bool((difference <= before.abs().amax() / 8).all())
        assert not torch.equal(stored.values().double(), before)
        return [stored.codes.clone(), stored.scales.clone()]

    assert_equal(run_threads(2, rank_main), [rank_main(Alone())] * 2)


class TensorParallel(nn.Module):
    """One of two tensor-parallel ranks: fused and query weights are cut by heads, keys are held by both."""

    def __init__(self, rank: int) -> None:
        super().__init__()
        for name, value in weights(Model()).items():
            is_cut = name not in ("key", "key_bias", "mlp")
            self.register_parameter(name, nn.Parameter(value.chunk(2)[rank].clone() if is_cut else value))
            if is_cut:
                self.get_parameter(name).tensor_model_parallel = True  # type: ignore[attr-defined]
                self.get_parameter(name).partition_dim = 0  # type: ignore[attr-defined]


@pytest.mark.parametrize("gives_all", [False, True], ids=["own heads", "all heads"])
def test_tensor_parallel_ranks_scale_their_own_heads(gives_all: bool) -> None:
    """Keys that both ranks hold serve heads of both, and stay equal."""

    def rank_main(comm: ThreadComm) -> nn.Module:
        model = TensorParallel(comm.rank)
        _, optimizer = build(model, over(Alone(), comm, comm))
        own = logits_here(comm) if gives_all else [LOGITS.chunk(2)[comm.rank]] * 3
        assert QKClip(optimizer, layers_of(model))(own) == 400.0
        return model

    models = run_threads(2, rank_main)
    whole = Model()
    for name, rows in factors(0.5).items():
        expected = scaled_by(rows, whole.get_parameter(name).detach())
        found = [model.get_parameter(name).detach() for model in models]
        if name in ("key", "key_bias", "mlp"):
            assert torch.equal(*found)
            check_close(found[0], expected, name)
        else:
            check_close(torch.cat(found), expected, name)


INF = math.inf
NAN = math.nan


@pytest.mark.parametrize("given", [[100.0, -5.0, 0.0, 3.0], [NAN, 1.0, 1.0, 1.0], [INF, 1.0, 1.0, 1.0]])
def test_qk_clip_writes_nothing_below_its_threshold_or_on_nan(given: Sequence[float]) -> None:
    model = Model()
    _, optimizer = build(model, over(Alone()))
    versions = [param._version for param in model.parameters()]
    clip = QKClip(optimizer, layers_of(model))
    largest = clip([torch.tensor(given)] * 3)
    assert largest == (given[0] if given[0] == 100.0 else INF), "a NaN may not be dropped by a maximum over ranks"
    assert [param._version for param in model.parameters()] == versions
    clip([torch.tensor(given), LOGITS, torch.zeros(HEADS)])
    drawn = dict(Model().named_parameters())
    scaled = [name for name, param in model.named_parameters() if not torch.equal(param, drawn[name])]
    assert scaled == ["query", "key", "key_bias"], "only the second layer has finite logits above the threshold"


def of(model: Any, **numbers: int) -> list[Attention]:
    given = {"num_heads": HEADS, "num_query_groups": GROUPS, "head_dim": DIM} | numbers
    return [separate_qk(model.query, model.key, **given)]


REFUSED: list[tuple[Callable[[Any, Optimizer, int], object], str]] = [
    (lambda m, o, rank: QKClip(o, [], threshold=0.0), "threshold=0.0; it must be above 0"),
    (lambda m, o, rank: QKClip(o, [], alpha=1.5), "alpha=1.5; the query's share"),
    (lambda m, o, rank: QKClip(o, of(m, num_query_groups=3)), "4 heads do not divide into 3 query groups"),
    (lambda m, o, rank: QKClip(o, of(m, head_dim=4)), r"'query' has shape \(12, 5\), but 2 query groups of 8 rows"),
    (lambda m, o, rank: QKClip(o, of(Model())), r"does not train a parameter of shape \(12, 5\)"),
    (lambda m, o, rank: QKClip(o, [*of(m), *of(m)]), "'query' is in layers twice"),
    (lambda m, o, rank: QKClip(o, layers_of(m)[: 2 + rank]), "ranks differ in threshold, alpha or layers"),
]


def test_what_cannot_be_meant_is_refused_on_every_rank() -> None:
    def rank_main(comm: ThreadComm) -> None:
        model = Model()
        _, averaged = build(model, over(comm), optimizer="schedule_free", sgd_momentum=0.9)
        with pytest.raises(ConfigError, match="schedule_free"):
            QKClip(averaged, of(model))
        _, optimizer = build(model, over(comm))
        for make, message in REFUSED:
            with pytest.raises(ConfigError, match=message):
                make(model, optimizer, comm.rank)

    run_threads(2, rank_main)


WRONG: list[tuple[list[Any], str]] = [
    ([torch.zeros(HEADS + 1)], "pass one number for each of its 4 heads"),
    ([torch.zeros(HEADS, 1)], "pass one number for each of its 4 heads"),
    ([torch.zeros(())], "pass one number for each of its 4 heads"),
    ([], "has 0 entries; pass one for each of 1 layers"),
    ([[1.0] * HEADS], "max_logits of a layer is a list; pass a tensor"),
]


def test_unfit_logits_of_one_rank_are_refused_on_all_unclipped() -> None:
    """Two replicas of one stage, and a stage without layers."""
    stages = [World(2).comms(), World(1).comms()]

    def rank_main(comm: ThreadComm) -> None:
        model = Model()
        _, optimizer = build(model, over(stages[comm.rank // 2][comm.rank % 2], everyone=comm))
        clip = QKClip(optimizer, of(model) if comm.rank < 2 else [])
        before = weights(model)
        for given, message in WRONG:
            expected = message if comm.rank == 1 else "max_logits do not fit the layers of QKClip on another rank"
            with pytest.raises(ValueError, match=expected):
                clip([[LOGITS], given, []][comm.rank])
            assert_equal(weights(model), before)
        assert clip([[LOGITS], [LOGITS], []][comm.rank]) == 400.0
        assert (comm.rank < 2) == (not torch.equal(before["query"], model.query))

    run_threads(3, rank_main)
