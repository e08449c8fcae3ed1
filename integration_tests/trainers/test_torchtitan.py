"""torchtitan 0.3.0: its checkpoints of `StackOptimizers` on two ranks load on one, for every rule that it accepts."""

import itertools
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import Job, refusal, run_jobs
from torch import Tensor, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

for package in ("torchtitan", "triton", "tyro", "spmd_types"):  # it imports triton and does not require it
    pytest.importorskip(package)

from torchtitan.components.checkpointer.dcp import CheckpointManager  # noqa: E402
from torchtitan.components.optimizer import LRSchedulersContainer  # noqa: E402
from torchtitan.distributed import parallel_dims, utils  # noqa: E402

from opt_config import ConfigError, OptimizerConfig  # noqa: E402
from opt_stack import list_optimizers  # noqa: E402
from opt_stack.adapters.torchtitan import StackOptimizers  # noqa: E402


def container(config: OptimizerConfig, *parts: nn.Module, **options: Any) -> StackOptimizers:
    return StackOptimizers.Config(stack=config, **options).build(model_parts=list(parts))


# --- what a rank does, with torchtitan's meshes, clipping, schedules and checkpoints ----------------------------------

STEPS = 5
SAVED_AT = 3
NO_OTHER_AXES = {"cp": 1, "tp": 1, "pp": 1, "ep": 1}
BASE: dict[str, Any] = {"lr": 0.02, "weight_decay": 0.1, "clip_grad": 0.0}
CONFIGS = {
    "adamw": OptimizerConfig(**BASE),
    "muon": OptimizerConfig(optimizer="muon", muon_fp32_matmul_prec="highest", **BASE),
    "bf16": OptimizerConfig(bf16=True, **BASE),
    "remainders": OptimizerConfig(bf16=True, use_precision_aware_optimizer=True, store_param_remainders=True, **BASE),
    "bf16 moments": OptimizerConfig(
        bf16=True, use_precision_aware_optimizer=True, exp_avg_dtype=torch.bfloat16, **BASE
    ),
}


class Net(nn.Module):
    """Matrices whose rows two ranks cannot share equally, and vectors."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.layers = nn.ModuleDict({"0": nn.Linear(6, 5), "1": nn.Linear(5, 7, bias=False)})
        for param in self.parameters():
            nn.init.normal_(param, generator=generator)


def sharded(model: nn.Module) -> nn.Module:
    """By FSDP2 over torchtitan's own mesh, where there are ranks: shards on two of them, and replicas of these."""
    if dist.is_initialized():
        parallel_dims.device_type = "cpu"
        replicas = dist.get_world_size() // 2
        axes = ["dp_replicate", "dp_shard"]
        dims = parallel_dims.ParallelDims(dp_replicate=replicas, dp_shard=2, world_size=2 * replicas, **NO_OTHER_AXES)
        fully_shard(model, mesh=dims.get_mesh(axes[-dims.dp_replicate_enabled - 1 :]))
    return model


class Run:
    """The objects that torchtitan's trainer builds, with a model whose gradients are known."""

    def __init__(self, config: OptimizerConfig, folder: str = "", *, seed: int = 0) -> None:
        self.dtype = torch.bfloat16 if config.bf16 else torch.float32
        self.model = sharded(Net(seed).to(self.dtype))
        self.optimizers = StackOptimizers.Config(stack=config).build(model_parts=[self.model])
        self.schedulers = LRSchedulersContainer.Config(warmup_steps=2).build(
            optimizers=self.optimizers, training_steps=STEPS
        )
        self.checkpointer = CheckpointManager.Config(
            enable=bool(folder), interval=1, initial_load_model_only=False, keep_latest_k=0
        ).build(
            dataloader=None,
            model_parts=[self.model],
            optimizers=self.optimizers,
            lr_schedulers=self.schedulers,
            states={},
            sd_adapter=None,
            base_folder=folder,
        )

    def train(self, steps: range) -> "Run":
        for step in steps:
            grads = dict(sharded(Net(100 + step).to(self.dtype)).named_parameters())
            for name, param in self.model.named_parameters():
                param.grad = grads[name].detach()
            utils.clip_grad_norm_(list(self.model.parameters()), 1.0, foreach=True)
            self.optimizers.step()
            self.schedulers.step()
            self.optimizers.zero_grad()
        return self

    def weights(self) -> dict[str, Tensor]:
        return {name: whole(param) for name, param in self.model.named_parameters()}


def whole(tensor: Tensor) -> Tensor:
    found = tensor.detach()
    return found.full_tensor() if isinstance(found, DTensor) else found.clone()


def finished(config: OptimizerConfig) -> dict[str, Tensor]:
    return Run(config).train(range(STEPS)).weights()


def saved(config: OptimizerConfig, folder: str) -> list[str]:
    """Save a checkpoint, and return the keys of state in it that is neither a DTensor nor a scalar."""
    run = Run(config, folder).train(range(SAVED_AT))
    run.checkpointer.save(SAVED_AT)
    state = run.optimizers.state_dict()
    return [k for k, v in state.items() if isinstance(v, Tensor) and v.dim() and not isinstance(v, DTensor)]


def resumed(config: OptimizerConfig, folder: str) -> dict[str, Tensor]:
    """The weights of another model that loaded the checkpoint."""
    run = Run(config, folder, seed=50)
    assert run.checkpointer.load(SAVED_AT)
    return run.train(range(SAVED_AT, STEPS)).weights()


def saved_or_refused(config: OptimizerConfig, folder: str) -> list[str] | str:
    """As `saved`, or the message of the error that the container meets when it is built."""
    message = refusal(lambda: Run(config))
    return saved(config, folder) if message == "built" else message


def refusals() -> tuple[str, str]:
    """The messages where plain parameters have flat shards of state, and where each rank is a pipeline stage."""
    flat = OptimizerConfig(use_distributed_optimizer=True, **BASE)
    stage = nn.ModuleDict({str(dist.get_rank()): nn.Linear(4, 4)})
    return refusal(lambda: container(flat, Net(0))), refusal(lambda: container(CONFIGS["adamw"], stage))


# --- tests ------------------------------------------------------------------------------------------------------------

RULES = {name: OptimizerConfig(optimizer=name, muon_fp32_matmul_prec="highest", **BASE) for name in list_optimizers()}
HYBRID = ("adamw", "muon")


@pytest.fixture(scope="module")
def worlds(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """Two ranks save and load; one process saves what two load, and loads what two and four saved."""
    folder = tmp_path_factory.mktemp("titan")
    for kind, config in CONFIGS.items():
        saved(config, str(folder / f"alone {kind}"))
    two = {f"save {kind}": Job(saved, (config, str(folder / kind))) for kind, config in CONFIGS.items()}
    for kind, config in CONFIGS.items():
        two[f"resumed {kind}"] = Job(resumed, (config, str(folder / kind)))
        two[f"from alone {kind}"] = Job(resumed, (config, str(folder / f"alone {kind}")))
    two |= {f"save {name}": Job(saved_or_refused, (RULES[name], str(folder / name))) for name in RULES}
    two["refusals"] = Job(refusals)
    results = run_jobs(2, two)
    hybrid = {f"hybrid {kind}": Job(saved, (CONFIGS[kind], str(folder / f"hybrid {kind}"))) for kind in HYBRID}
    results |= run_jobs(4, hybrid)
    results |= {f"alone {kind}": [resumed(config, str(folder / kind))] for kind, config in CONFIGS.items()}
    results |= {f"hybrid {kind}": [resumed(CONFIGS[kind], str(folder / f"hybrid {kind}"))] for kind in HYBRID}
    for name in RULES:
        if not isinstance(results[f"save {name}"][0], str):
            results[f"alone {name}"] = [resumed(RULES[name], str(folder / name))]
    return results


def assert_close(found: list[dict[str, torch.Tensor]], config: OptimizerConfig, *, units: float) -> None:
    """Norms and products of gathered matrices are summed in another order on other ranks: some units of rounding."""
    tolerance = units * torch.finfo(torch.bfloat16 if config.bf16 else torch.float32).eps
    expected = finished(config)
    for weights in found:
        for name, weight in expected.items():
            torch.testing.assert_close(weights[name], weight, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize(
    ("where", "kind"), [*itertools.product(("alone", "resumed", "from alone"), CONFIGS), *zip(["hybrid"] * 2, HYBRID)]
)
def test_torchtitan_resumes_on_other_ranks_as_if_never_stopped(
    worlds: dict[str, list[Any]], where: str, kind: str
) -> None:
    """`hybrid`: replicas of shards save what one process loads."""
    assert_close(worlds[f"{where} {kind}"], CONFIGS[kind], units=4)


@pytest.mark.parametrize("name", RULES)
def test_each_rules_save_resumes_in_one_process_or_is_refused(worlds: dict[str, list[Any]], name: str) -> None:
    on_ranks = worlds[f"save {name}"]
    assert isinstance(on_ranks[0], str) == (name in ("soap", "soap_muon"))
    if isinstance(on_ranks[0], str):
        assert on_ranks == [on_ranks[0]] * 2
        assert "each rank keeps a different part of the state" in on_ranks[0]
        return
    assert on_ranks == [[], []]  # nothing that DCP would take one rank's part of
    assert_close(worlds[f"alone {name}"], RULES[name], units=64)


def test_flat_shards_and_pipeline_stages_are_refused_on_all(
    worlds: dict[str, list[Any]],
) -> None:
    first, second = worlds["refusals"]
    assert first == second
    assert "each rank keeps a different part of the state" in first[0]
    assert "is trained on rank 0 only" in first[1]


@pytest.mark.parametrize(
    ("config", "options", "sentence"),
    [
        (OptimizerConfig(lr=1e-3), {}, r"clip_grad=1.0: torchtitan clips to training.max_norm"),
        (OptimizerConfig(lr=1e-3, clip_grad=0.0, fp16=True), {}, "fp16=True needs a scaled loss"),
        (CONFIGS["adamw"], {"implementation": "foreach"}, "implementation"),
        (CONFIGS["adamw"], {"param_groups": [object()]}, "set StackOptimizers.Config"),
    ],
    ids=["clipping", "fp16", "implementation", "param_groups"],
)
def test_what_torchtitan_does_itself_is_refused(
    config: OptimizerConfig, options: dict[str, Any], sentence: str
) -> None:
    with pytest.raises(ConfigError, match=sentence):
        container(config, nn.Linear(2, 2), **options)


def test_parts_of_a_pipeline_rank_are_saved_under_own_names() -> None:
    parts = [nn.ModuleDict({name: nn.Linear(3, 3, bias=False)}) for name in ("first", "second")]
    state = container(CONFIGS["adamw"], *parts).state_dict()
    assert {"state.first.weight.exp_avg", "state.second.weight.exp_avg"} <= state.keys()
    with pytest.raises(ConfigError, match="two model parts have a parameter 'weight'"):
        container(CONFIGS["adamw"], nn.Linear(3, 3, bias=False), nn.Linear(3, 3, bias=False))


def test_weights_loaded_after_the_build_are_saved_and_trained() -> None:
    model, loaded = (Net(seed).bfloat16() for seed in (0, 1))
    optimizers = container(CONFIGS["bf16"], model)
    model.load_state_dict(loaded.state_dict())
    state = optimizers.state_dict()
    for name, param in loaded.named_parameters():
        torch.testing.assert_close(state[f"state.{name}.fp32_param"], param.float(), rtol=0, atol=0)
    optimizers = container(CONFIGS["bf16"], model := Net(0).bfloat16())
    model.load_state_dict(loaded.state_dict())
    for param in model.parameters():
        param.grad = torch.zeros_like(param)
    optimizers.step()
    for name, param in model.named_parameters():
        torch.testing.assert_close(param, loaded.get_parameter(name), rtol=0.01, atol=0)  # one step of weight decay


def test_checkpoints_of_other_groups_or_rules_change_nothing() -> None:
    model = Net(0)
    optimizers = container(CONFIGS["adamw"], model)
    state = optimizers.state_dict()
    before = {key: value.clone() if isinstance(value, torch.Tensor) else value for key, value in state.items()}
    changed = {
        "lr was saved as 0.02 for .* and as 0.5": {"param_groups.layers.1.weight.lr": 0.5},
        "was saved by optimizer='lion'": {f"param_groups.layers.{i}.weight.optimizer": "lion" for i in (0, 1)},
    }
    for sentence, values in changed.items():
        with pytest.raises(ValueError, match=sentence):
            optimizers.load_state_dict({**state, **values})
    with pytest.raises(ValueError, match=r"the loaded state has no 'state.layers.0.bias.exp_avg'"):
        optimizers.load_state_dict({key: value for key, value in state.items() if key != "state.layers.0.bias.exp_avg"})
    for key, value in optimizers.state_dict().items():
        torch.testing.assert_close(value, before[key], rtol=0, atol=0) if isinstance(value, torch.Tensor) else None
        assert isinstance(value, torch.Tensor) or value == before[key], key


def test_the_command_line_sets_fields_of_the_configuration(monkeypatch: pytest.MonkeyPatch) -> None:
    from torchtitan.config import ConfigManager
    from torchtitan.models.llama3 import config_registry

    def with_muon() -> Any:
        config = config_registry.llama3_debugmodel()
        config.optimizer = StackOptimizers.Config(stack=OptimizerConfig(optimizer="muon", lr=1e-3, clip_grad=0.0))
        return config

    monkeypatch.setattr(config_registry, "with_muon", with_muon, raising=False)
    arguments = ["--module", "llama3", "--config", "with_muon", "--optimizer.stack.lr", "0.5"]
    config = ConfigManager().parse_args(arguments)
    assert isinstance(config.optimizer, StackOptimizers.Config)
    assert (config.optimizer.stack.optimizer, config.optimizer.stack.lr) == ("muon", 0.5)
