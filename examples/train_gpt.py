"""Trains a character-level GPT on every rank of a `torchrun`: the shortest complete use of the stack.

    torchrun --nproc-per-node 2 examples/train_gpt.py --steps 150 --dir runs/demo

Plan, parameter groups, bf16 with fp32 mains, clipping, a warmup-stable-decay schedule, a checkpoint, and resuming from it.
"""

import argparse
import json
import math
from datetime import timedelta
from pathlib import Path

import torch
import torch.distributed as dist
from char_gpt import CharGPT, batch_at, bigram_bits, stdlib_text
from opt_config import OptimizerConfig
from opt_paramgroups import as_text, group_rows
from opt_scheduler import OptimizerParamScheduler
from opt_stack import get_optimizer
from torch import Tensor
from tqdm import tqdm

BATCH = 32  # sequences in a step, over all ranks
HELD_OUT = 200_000  # characters at the end of the text that are never trained on


def main() -> None:
    args = parse()
    dist.init_process_group("gloo", timeout=timedelta(seconds=60))
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.set_num_threads(1)
    torch.manual_seed(0)  # the same model on every rank

    text = stdlib_text()
    train, held_out = text[:-HELD_OUT], text[-HELD_OUT:]
    model = CharGPT().bfloat16()
    config = OptimizerConfig(
        lr=args.lr, min_lr=args.lr / 10, weight_decay=0.1, bf16=True, adam_beta2=0.95, clip_grad=1.0
    )
    optimizer = get_optimizer(config, [model])
    scheduler = wsd(optimizer, config, num_samples=args.steps * BATCH)
    start = load(args.dir, rank, model, optimizer, scheduler) if args.resume else 0

    if rank == 0 and not args.resume:
        print(optimizer.plan, as_text(group_rows(optimizer.param_groups)), sep="\n\n")
        print(
            f"\nheld-out, bits per character: bigram {bigram_bits(train, held_out):.3f}, untrained {bits(model, held_out):.3f}"
        )

    log = []
    bar = tqdm(range(start, args.stop_at or args.steps), disable=rank > 0, initial=start, total=args.steps)
    for step in bar:
        mine = batch_at(step, train, size=BATCH, context=model.context).chunk(world)[rank]
        loss = model(mine)
        optimizer.scale_loss(loss).backward()
        result = optimizer.step()
        optimizer.zero_grad()
        if result.success:
            scheduler.step(BATCH)
        log.append({"step": step, "loss": mean(loss), "grad_norm": result.grad_norm, **rates(optimizer)})
        bar.set_postfix(loss=f"{log[-1]['loss']:.3f}", lr=f"{log[-1]['lr']:.1e}", grad_norm=f"{result.grad_norm:.2f}")

    save(args.dir, rank, model, optimizer, scheduler)
    if rank == 0:
        found = {"log": log, "bits": bits(model, held_out), "bigram_bits": bigram_bits(train, held_out)}
        (args.dir / f"{args.name}.json").write_text(json.dumps(found))
        print(f"held-out, bits per character after step {log[-1]['step']}: {found['bits']:.3f}")
    dist.destroy_process_group()


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
def bits(model: CharGPT, text: Tensor, *, num_sequences: int = 64) -> float:
    """Bits per character on evenly spaced sequences of held-out text."""
    starts = torch.linspace(0, len(text) - model.context - 2, num_sequences).long()
    return model(text[starts[:, None] + torch.arange(model.context + 1)]).item() / math.log(2)


def mean(loss: Tensor) -> float:
    total = loss.detach().clone()
    dist.all_reduce(total)
    return total.item() / dist.get_world_size()


def rates(optimizer) -> dict[str, float]:
    decayed = max(optimizer.param_groups, key=lambda group: group["weight_decay"])
    return {"lr": decayed["lr"], "weight_decay": decayed["weight_decay"]}


def save(directory: Path, rank: int, model, optimizer, scheduler) -> None:
    directory.mkdir(parents=True, exist_ok=True)
    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save(state, directory / f"rank{rank}.pt")


def load(directory: Path, rank: int, model, optimizer, scheduler) -> int:
    state = torch.load(directory / f"rank{rank}.pt", weights_only=True)
    model.load_state_dict(state["model"])
    optimizer.load_state_dict(state["optimizer"])
    scheduler.load_state_dict(state["scheduler"])
    return scheduler.num_steps // BATCH


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/demo"), help="where checkpoint and log go")
    parser.add_argument("--name", default="run", help="of the log")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--stop-at", type=int, help="save and stop after so many steps")
    parser.add_argument("--resume", action="store_true", help="go on from the checkpoint in --dir")
    parser.add_argument("--lr", type=float, default=3e-3)
    return parser.parse_args()


if __name__ == "__main__":
    main()
