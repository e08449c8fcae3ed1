"""The adapters inside real trainers: Accelerate's FSDP2 replaces parameters, the HF Trainer calls a factory; and on two
ranks the run of one process with the joined batch, their clipping included; and a resumed run."""

from pathlib import Path
from typing import Any

import pytest
import torch
from processes import FSDP2_RUNS, run_processes

for trainer in ("accelerate", "lightning", "transformers"):
    pytest.importorskip(trainer)  # an optional session installs the trainers

import trainer_ranks  # noqa: E402
import transformers  # noqa: E402

from opt_config import OptimizerConfig  # noqa: E402
from opt_scheduler import as_lr_scheduler, cosine  # noqa: E402
from opt_stack.adapters import DeferredOptimizer, StackFactory  # noqa: E402

needs_fsdp2 = pytest.mark.skipif(not FSDP2_RUNS, reason="this torch runs FSDP2 on GPUs only")


@needs_fsdp2
def test_attributes_of_parameters_that_accelerate_replaced_still_choose_their_rule() -> None:
    assert run_processes(2, trainer_ranks.rules_after_fsdp2) == [["muon", "adam", "adam", "adam"]] * 2


def hf_run(folder: Path, *, resume: bool = False, with_schedule: bool = False) -> Any:
    """A small GPT-2 trained by the Trainer for 6 steps with Muon on its hidden matrices."""
    torch.manual_seed(0)
    shape = {"vocab_size": 32, "n_positions": 8, "n_embd": 16, "n_layer": 1, "n_head": 2}
    dropouts = dict.fromkeys(("resid_pdrop", "embd_pdrop", "attn_pdrop"), 0.0)
    model = transformers.GPT2LMHeadModel(transformers.GPT2Config(**shape, **dropouts))
    rows = [{"input_ids": row, "labels": row} for row in torch.randint(32, (24, 8))]
    arguments = transformers.TrainingArguments(
        output_dir=str(folder),
        max_steps=6,
        per_device_train_batch_size=4,
        lr_scheduler_type="linear",
        report_to=[],
        save_steps=3,
        disable_tqdm=True,
        use_cpu=True,
    )
    config = OptimizerConfig(optimizer="muon", lr=1e-2, clip_grad=0.0)
    built: dict[str, Any]
    if with_schedule:
        optimizer = DeferredOptimizer(config, model)
        schedule = as_lr_scheduler(optimizer, cosine(1.0, 0.1, steps=6), relative=True)
        built = {"optimizers": (optimizer, schedule)}
    else:
        built = {"optimizer_cls_and_kwargs": (StackFactory, {"config": config})}
    trainer = transformers.Trainer(model=model, args=arguments, train_dataset=rows, **built)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-3") if resume else None)
    return trainer


@pytest.mark.parametrize("with_schedule", [False, True], ids=["the Trainer's schedule", "as_lr_scheduler"])
def test_the_trainer_trains_gpt2_with_muon_and_resumes_bit_for_bit(tmp_path: Path, with_schedule: bool) -> None:
    unbroken = hf_run(tmp_path, with_schedule=with_schedule)
    resumed = hf_run(tmp_path, resume=True, with_schedule=with_schedule)
    for (name, weight), other in zip(unbroken.model.named_parameters(), resumed.model.parameters(), strict=True):
        assert torch.equal(weight, other), name
    groups = unbroken.optimizer.optimizer.param_groups
    names = {name for group in groups for name in map(str, group["param_ids"]) if group["optimizer"] == "muon"}
    assert "transformer.h.0.mlp.c_fc.weight" in names
    assert "transformer.wte.weight" not in names
    assert [group["lr"] for group in groups] == pytest.approx([1e-3 if with_schedule else 0.0] * len(groups))


# Two halves of a batch are summed in another order than its rows at once: a few roundings a step.
CLOSE = {"rtol": 1e-5, "atol": 1e-6}
FSDP2: dict[str, Any] = {"fsdp2": True}
ON_TWO_RANKS: dict[str, tuple[Any, dict[str, Any]]] = {
    "accelerate, ddp": (trainer_ranks.with_accelerate, {}),
    "accelerate, fsdp2": (trainer_ranks.with_accelerate, FSDP2),
    "accelerate, fsdp2, rank 0 loads": (trainer_ranks.with_accelerate, {**FSDP2, "rank_0_loads": True}),
    "accelerate, fsdp2, saved before the first step": (trainer_ranks.with_accelerate, {**FSDP2, "saved_at": 0}),
    "accelerate, with our wrapper": (trainer_ranks.accelerate_with_our_wrapper, {}),
    "lightning, ddp": (trainer_ranks.with_lightning, {"fsdp2": False}),
    "lightning, fsdp2": (trainer_ranks.with_lightning, FSDP2),
    "HF Trainer, ddp": (trainer_ranks.with_hf_trainer, {"uses_factory": False}),
    "HF Trainer, factory": (trainer_ranks.with_hf_trainer, {"uses_factory": True}),
}


@pytest.mark.parametrize("name", ON_TWO_RANKS)
def test_two_ranks_are_one_process_with_the_joined_batch(name: str, tmp_path: Path) -> None:
    rank_main, options = ON_TWO_RANKS[name]
    if not FSDP2_RUNS and "accelerate, fsdp2" in name:
        pytest.skip("this torch runs FSDP2 on GPUs only")
    alone = trainer_ranks.train_alone()
    assert min(alone.norms) > 2 * trainer_ranks.MAX_NORM  # so that clipping matters at every step
    for unbroken, resumed in run_processes(2, trainer_ranks.with_options, rank_main.__name__, tmp_path, options):
        if unbroken.norms:
            torch.testing.assert_close(torch.tensor(unbroken.norms), torch.tensor(alone.norms), **CLOSE)
        for name, weight in alone.weights.items():
            torch.testing.assert_close(unbroken.weights[name], weight, **CLOSE, msg=name)
            assert torch.equal(resumed.weights[name], unbroken.weights[name]), name
