"""Trains a character-level GPT: the shortest complete example of the stack.

    python examples/train_gpt.py --steps 150 --dir runs/alone
    torchrun --nproc-per-node 2 examples/train_gpt.py --steps 150 --dir runs/demo
    torchrun --nproc-per-node 3 examples/train_gpt.py --stop-at 200 --dir runs/demo --resume

Shows the plan and the parameter groups; bf16 weights with fp32 mains, sharded over the ranks (ZeRO-1, or whole matrices
for Muon and SOAP); gradients reduced during backward and parameters gathered during forward; clipping; a
warmup-stable-decay schedule; checkpoints in the background; and resuming on any number of ranks that divides the batch.
"""

import argparse
import json
import math
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist
from char_gpt import CONTEXT, CharGPT, batch_at, bigram_bits, compute_dtype, stdlib_text
from progress import Progress
from ranks import join_ranks
from torch import Tensor

from opt_checkpoint import CheckpointManager, sharded_model
from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_paramgroups import as_text, group_rows
from opt_scheduler import OptimizerParamScheduler
from opt_stack import DistributedDataParallel, Optimizer, get_optimizer

NEWEST = -1  # --resume without a step
HELD_OUT = 200_000  # characters at the end of the text that are never trained on
MODEL = {"dim": 128, "depth": 2, "num_heads": 4}
COMPUTE = compute_dtype()  # of activations and products; weights are bf16 and main values fp32 on every machine

FLAT_SHARDS = {"use_distributed_optimizer": True}
WHOLE_MATRICES = {
    "use_layer_wise_distributed_optimizer": True,
    # Newton-Schulz in bf16, the default, is as slow as the model in bf16 would be.
    "muon_fp32_matmul_prec": "medium" if COMPUTE is torch.bfloat16 else "highest",
}
RULES = {  # fields of OptimizerConfig
    "adam": {"lr": 5e-3, **FLAT_SHARDS},
    "lion": {"lr": 1e-3, **FLAT_SHARDS},
    "muon": {"lr": 2e-2, "muon_nesterov": True, "muon_extra_scale_factor": 0.2, **WHOLE_MATRICES},
    "soap": {"lr": 1e-2, **WHOLE_MATRICES},
}


def main(argv: list[str] | None = None) -> None:
    args = parse(argv)
    join_ranks()
    rank = dist.get_rank()
    world = dist.get_world_size()
    if args.batch % world:
        sys.exit(f"--batch {args.batch} is not a multiple of the {world} ranks")
    torch.manual_seed(0)  # the same model on every rank

    text = stdlib_text()
    train = text[:-HELD_OUT]
    held_out = text[-HELD_OUT:]
    model, optimizer = build(args.rule)
    scheduler = wsd(optimizer, optimizer.config, num_samples=args.steps * args.batch)
    checkpoints = CheckpointManager(args.dir / "checkpoints", keep=2)
    start = resume(checkpoints, model, optimizer, scheduler, step=args.resume) if args.resume else 0

    if rank == 0 and not (args.resume or args.brief):
        print(optimizer.plan, as_text(group_rows(optimizer.param_groups)), sep="\n\n", end="\n\n")
    begun = bits(model, held_out)
    log = []
    seconds = []
    stop = args.stop_at or args.steps
    progress = Progress(start, stop)
    for step in range(start, stop):
        began = time.perf_counter()
        model.zero_grad_buffer()
        loss = model(batch_at(step, train, size=args.batch, context=CONTEXT).chunk(world)[rank])
        optimizer.scale_loss(loss).backward()
        result = optimizer.step()
        if result.success:
            scheduler.step(args.batch)
        log.append({"step": step, "loss": mean(loss), "grad_norm": result.grad_norm, **rates(optimizer)})
        seconds.append(time.perf_counter() - began)
        if rank == 0:
            progress.show(step, "loss {loss:.3f}  lr {lr:.1e}  grad norm {grad_norm:.2f}".format(**log[-1]))

    checkpoints.save(stop, state_of(model, optimizer, scheduler))
    found = {
        "rule": args.rule,
        "steps": args.steps,
        "compute": str(COMPUTE).removeprefix("torch."),
        "log": log,
        "seconds": seconds,
        "bytes": memory(model, optimizer),
        "num_parameters": sum(param.numel() for param in model.parameters()),
        "begun_bits": begun,
        "bits": bits(model, held_out),
        "bigram_bits": bigram_bits(train, held_out),
    }
    checkpoints.close()
    if rank == 0:
        (args.dir / f"{args.name}.json").write_text(json.dumps(found))
        print(f"held-out, bits per character: {begun:.3f} before, {found['bits']:.3f} after")
    dist.barrier()  # no rank exits while another may still communicate with it
    dist.destroy_process_group()


def build(rule: str) -> tuple[DistributedDataParallel, Optimizer]:
    wrapping = DistributedDataParallelConfig(
        use_distributed_optimizer=True,
        overlap_grad_reduce=True,
        overlap_param_gather=True,
        grad_reduce_in_fp32=True,
        bucket_size=200_000,
    )
    options = RULES[rule]
    gpt = CharGPT(**MODEL, compute=COMPUTE).bfloat16()
    gpt.head.weight.is_embedding_or_output_parameter = True  # Muon and SOAP leave it to Adam
    config = OptimizerConfig(
        optimizer=rule,
        min_lr=options["lr"] / 10,
        weight_decay=0.1,
        adam_beta2=0.95,
        clip_grad=1.0,
        bf16=True,
        overlap_param_gather=True,
        **options,
    )
    model = DistributedDataParallel(wrapping, gpt, optimizer_config=config)
    return model, get_optimizer(config, [model])


def memory(model: DistributedDataParallel, optimizer: Optimizer) -> dict[str, int]:
    """Bytes on the rank with the most. Weights and gradients are measured; the bytes of state are the plan's."""
    return {
        "weights": sum(param.nbytes for param in model.parameters()),
        "gradients": sum(param.main_grad.nbytes for param in model.parameters()),
        "state": max(optimizer.plan.state_bytes(rank) for rank in range(dist.get_world_size())),
    }


def state_of(model: DistributedDataParallel, optimizer: Optimizer, scheduler: OptimizerParamScheduler) -> dict:
    """The complete sharded state of a run, used for both saving and loading, on any number of ranks."""
    weights = sharded_model(model)
    return {
        "model": weights,
        "optimizer": optimizer.sharded_state_dict(weights),
        "scheduler": scheduler.state_dict(),
    }


def resume(checkpoints: CheckpointManager, model, optimizer, scheduler, *, step: int) -> int:
    """Load a step, by default the newest, in place. Values that are not tensors are in the report."""
    if step == NEWEST and (step := checkpoints.latest_good()) is None:
        sys.exit(f"there is no checkpoint in {checkpoints.directory}: train without --resume first")
    loaded = checkpoints.load(state_of(model, optimizer, scheduler), step=step).state
    optimizer.load_state_dict(loaded["optimizer"])
    scheduler.load_state_dict(loaded["scheduler"])
    return step


def wsd(optimizer, config: OptimizerConfig, *, num_samples: int) -> OptimizerParamScheduler:
    """Schedules in samples: learning rate with warmup, plateau and decay over the last fifth; growing weight decay."""
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


def parse(argv: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dir", type=Path, default=Path("runs/demo"), help="folder of the checkpoints and the log")
    parser.add_argument("--name", default="run", help="of the log")
    parser.add_argument("--rule", choices=RULES, default="adam")
    parser.add_argument("--steps", type=int, default=150)
    parser.add_argument("--batch", type=int, default=24, help="sequences in a step, over all ranks")
    parser.add_argument("--stop-at", type=int, help="save and stop after this many steps; the schedule ends at --steps")
    newest = {"nargs": "?", "const": NEWEST, "metavar": "STEP"}
    parser.add_argument("--resume", **newest, type=int, help="go on from this checkpoint in --dir, or the newest one")
    parser.add_argument("--brief", action="store_true", help="do not print the plan and the parameter groups")
    return parser.parse_args(argv)


if __name__ == "__main__":
    main()
