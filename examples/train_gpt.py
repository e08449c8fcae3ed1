"""Trains a character-level GPT on every rank of a `torchrun`: the shortest complete use of the stack.

    torchrun --nproc-per-node 2 examples/train_gpt.py --steps 150 --dir runs/demo

The plan and the parameter groups; bf16 with fp32 mains, sharded over the ranks (ZeRO-1), gradients reduced during
backward and parameters gathered during forward; clipping; a warmup-stable-decay schedule; checkpoints in the
background; and resuming on any number of ranks that divides the batch.
"""

import argparse
import json
import math
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from char_gpt import CONTEXT, CharGPT, batch_at, bigram_bits, stdlib_text
from torch import Tensor
from tqdm import tqdm

from opt_checkpoint import CheckpointManager, sharded_model
from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_paramgroups import as_text, group_rows
from opt_scheduler import OptimizerParamScheduler
from opt_stack import DistributedDataParallel, Optimizer, get_optimizer

HELD_OUT = 200_000  # characters at the end of the text that are never trained on


def main() -> None:
    args = parse()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same model on every rank

    text = stdlib_text()
    train, held_out = text[:-HELD_OUT], text[-HELD_OUT:]
    overlap = {"use_distributed_optimizer": True, "overlap_param_gather": True}
    model = DistributedDataParallel(
        DistributedDataParallelConfig(
            overlap_grad_reduce=True, grad_reduce_in_fp32=True, bucket_size=200_000, **overlap
        ),
        CharGPT().bfloat16(),
    )
    config = OptimizerConfig(
        lr=args.lr, min_lr=args.lr / 10, weight_decay=0.1, adam_beta2=0.95, clip_grad=1.0, bf16=True, **overlap
    )
    optimizer = get_optimizer(config, [model])
    scheduler = wsd(optimizer, config, num_samples=args.steps * args.batch)
    checkpoints = CheckpointManager(args.dir / "checkpoints", keep=2)
    start = resume(checkpoints, model, optimizer, scheduler, step=args.resume) if args.resume else 0

    if rank == 0 and not args.resume:
        print(optimizer.plan, as_text(group_rows(optimizer.param_groups)), sep="\n\n", end="\n\n")
    begun = bits(model, held_out)
    log = []
    stop = args.stop_at or args.steps
    bar = tqdm(range(start, stop), disable=rank > 0, initial=start, total=args.steps, mininterval=2)
    for step in bar:
        model.zero_grad_buffer()
        loss = model(batch_at(step, train, size=args.batch, context=CONTEXT).chunk(world)[rank])
        optimizer.scale_loss(loss).backward()
        result = optimizer.step()
        if result.success:
            scheduler.step(args.batch)
        log.append({"step": step, "loss": mean(loss), "grad_norm": result.grad_norm, **rates(optimizer)})
        bar.set_postfix(loss=f"{log[-1]['loss']:.3f}", lr=f"{log[-1]['lr']:.1e}", grad_norm=f"{result.grad_norm:.2f}")

    checkpoints.save(stop, state_of(model, optimizer, scheduler))
    found = {
        "log": log,
        "begun_bits": begun,
        "bits": bits(model, held_out),
        "bigram_bits": bigram_bits(train, held_out),
    }
    checkpoints.close()
    if rank == 0:
        (args.dir / f"{args.name}.json").write_text(json.dumps(found))
        print(f"held-out, bits per character: {begun:.3f} before, {found['bits']:.3f} after")
    dist.barrier()  # nobody leaves while another rank may still be talking to it
    dist.destroy_process_group()


def state_of(model: DistributedDataParallel, optimizer: Optimizer, scheduler: OptimizerParamScheduler) -> dict:
    """All that a run is, sharded: the same description saves and loads, on any number of ranks."""
    weights = sharded_model(model)
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights),
        "scheduler": scheduler.state_dict(),
    }


def resume(checkpoints: CheckpointManager, model, optimizer, scheduler, *, step: int) -> int:
    """Loads a step in place; what is no tensor comes back in the report."""
    loaded = checkpoints.load(state_of(model, optimizer, scheduler), step=step).state
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    return step


def wsd(optimizer, config: OptimizerConfig, *, num_samples: int) -> OptimizerParamScheduler:
    """Warm up, hold, decay over the last fifth; weight decay grows over the whole run. All counted in samples."""
    return OptimizerParamScheduler(
        optimizer,
        init_lr=0.0,
        max_lr=config.lr,
        min_lr=config.min_lr,
        lr_warmup_steps=num_samples // 15,
        lr_decay_steps=num_samples,
        lr_decay_style="WSD",
        wsd_decay_steps=num_samples // 5,
        lr_wsd_decay_style="minus_sqrt",
        start_wd=config.weight_decay / 2,
        end_wd=config.weight_decay,
        wd_incr_steps=num_samples,
        wd_incr_style="linear",
    )


@torch.no_grad()
def bits(model: DistributedDataParallel, text: Tensor, *, num_sequences: int = 64) -> float:
    """Bits per character on evenly spaced sequences of held-out text."""
    starts = torch.linspace(0, len(text) - CONTEXT - 2, num_sequences).long()
    return model(text[starts[:, None] + torch.arange(CONTEXT + 1)]).item() / math.log(2)


def mean(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def rates(optimizer) -> dict[str, float]:
    decayed = max(optimizer.param_groups, key=lambda group: group["weight_decay"])
    return {"lr": decayed["lr"], "weight_decay": decayed["weight_decay"]}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/demo"), help="where checkpoint and log go")
    parser.add_argument("--name", default="run", help="of the log")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=48, help="sequences in a step, over all ranks")
    parser.add_argument("--stop-at", type=int, help="save and stop after so many steps")
    parser.add_argument("--resume", type=int, metavar="STEP", help="go on from this step's checkpoint in --dir")
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
