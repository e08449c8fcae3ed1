"""From an optimizer of ours to a directory of Megatron-Core and back, on other numbers of ranks, with the same bits."""

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from processes import run_processes
from torch import Tensor, nn

from opt_checkpoint import CheckpointValueError, load, read_common, read_index, save, sharded_model, verify_checkpoint
from opt_checkpoint.__main__ import main
from opt_checkpoint.convert.to_megatron import checkpoint_to_megatron
from opt_stack.megatron import OptimizerConfig, get_megatron_optimizer

STEPS = 3


def train(settings: dict[str, Any], source: Path | None, target: Path | None) -> dict[str, Tensor]:
    """Some steps on data that all ranks share, after loading `source`, before saving to `target`."""
    torch.manual_seed(0 if source is None else 1)
    model = nn.Sequential(nn.Linear(5, 7), nn.Tanh(), nn.Linear(7, 3))
    model = model.half() if "fp16" in settings else model.bfloat16() if "bf16" in settings else model
    config = OptimizerConfig(optimizer="adam", lr=0.01, clip_grad=0.0, **settings)
    optimizer = get_megatron_optimizer(config, [model])
    if source is not None:
        described = sharded_model(model)
        load(described, source)
        state = {"optimizer": optimizer.sharded_state_dict(described)}
        optimizer.load_state_dict(load(state, source).state["optimizer"])
    for step in range(STEPS):
        data = torch.randn(16, 5, generator=torch.Generator().manual_seed(step))
        optimizer.scale_loss(model(data.to(model[0].weight.dtype)).float().square().mean()).backward()
        optimizer.step()
        optimizer.zero_grad()
    if target is not None:
        described = sharded_model(model)
        save({**described, "optimizer": optimizer.sharded_state_dict(described), "iteration": STEPS}, target)
    return {**model.state_dict(), "scale": optimizer.get_loss_scale()}


SETTINGS: dict[str, dict[str, Any]] = {
    "bf16, sharded": {"bf16": True, "use_distributed_optimizer": True},
    "fp16": {"fp16": True, "initial_loss_scale": 64.0},
    "fp32": {},
    "fp32, sharded": {"use_distributed_optimizer": True},
}


@pytest.mark.parametrize("name", SETTINGS)
def test_a_run_resumes_from_a_megatron_directory(tmp_path: Path, name: str) -> None:
    settings = SETTINGS[name]
    ours, theirs, converted = (tmp_path / folder for folder in ("ours", "theirs", "converted"))
    run_processes(2, train, settings, None, ours)
    is_sharded = "use_distributed_optimizer" in settings
    command = ["convert", str(ours), str(theirs), "--to", "megatron"]
    assert main([*command, *([] if is_sharded else ["--replicated"])]) == 0
    assert verify_checkpoint(theirs) == []
    index = read_index(theirs)
    assert all("/shard_" in key for key in index.objects)  # which its strict modes parse
    mains = "param" if is_sharded else "fp32_param"
    has_mains = f"optimizer.state.{mains}.0.weight" in index.tensors
    assert has_mains == (is_sharded or bool(settings))
    of_optimizer = read_common(index)["optimizer"]
    group, *_ = of_optimizer.get("optimizer", of_optimizer)["param_groups"]
    assert group["step" if is_sharded else "lr_mult"] == (STEPS if is_sharded else 1.0)
    assert main(["convert", str(theirs), str(converted), "--from", "megatron"]) == 0
    expected, *_ = run_processes(2, train, settings, ours, None)
    for ranks in (1, 2):
        for found in run_processes(ranks, train, settings, converted, None):
            for key, value in expected.items():
                assert torch.equal(found[key], value), key


def test_rules_that_megatrons_adam_does_not_have_are_refused(tmp_path: Path) -> None:
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        model = nn.Linear(3, 3)
        optimizer = get_megatron_optimizer(OptimizerConfig(optimizer="lion", lr=0.01), [model])
        described = sharded_model(model)
        save({"model": described, "optimizer": optimizer.sharded_state_dict(described)}, tmp_path / "ours")
    finally:
        dist.destroy_process_group()
    with pytest.raises(CheckpointValueError, match=r"holds groups of lion; only the states of adam .*--moments new"):
        checkpoint_to_megatron(tmp_path / "ours", tmp_path / "theirs")
    assert not (tmp_path / "theirs").exists()
    command = ["convert", str(tmp_path / "ours"), str(tmp_path / "theirs"), "--to", "megatron", "--moments", "new"]
    assert main(command) == 0
    index = read_index(tmp_path / "theirs")
    assert sorted(index.tensors) == ["bias", "weight"]
    assert "optimizer" not in read_common(index)
