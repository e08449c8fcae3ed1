"""Layer-wise Muon: whole matrices are assigned to ranks by cost, all other parameters are in flat shards.

python examples/train_muon.py --steps 60
torchrun --nproc-per-node 2 examples/train_muon.py --steps 60
"""

import argparse
import math

import torch
import torch.distributed as dist
from char_gpt import CONTEXT, CharGPT, batch_at, compute_dtype, stdlib_text
from ranks import join_ranks

from opt_config import DistributedDataParallelConfig, OptimizerConfig
from opt_stack import DistributedDataParallel, get_optimizer


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60)
    parser.add_argument("--batch", type=int, default=32, help="sequences in a step, over all ranks")
    args = parser.parse_args()

    join_ranks()
    rank = dist.get_rank()
    world = dist.get_world_size()
    torch.manual_seed(0)

    compute = compute_dtype()  # of activations and products; weights are bf16 on every machine
    gpt = CharGPT(compute=compute).bfloat16()
    # Embeddings and the head are recognised by their modules and updated by Adam. If that fails, set the attribute
    # is_embedding_or_output_parameter of the weight to True or False.
    ddp_config = DistributedDataParallelConfig(
        use_distributed_optimizer=True, overlap_grad_reduce=True, overlap_param_gather=True, grad_reduce_in_fp32=True
    )
    config = OptimizerConfig(
        optimizer="muon",
        use_layer_wise_distributed_optimizer=True,
        overlap_param_gather=True,
        lr=3e-3,
        muon_extra_scale_factor=0.2,  # updates as large as AdamW's, so that one lr suits both rules
        muon_nesterov=True,
        muon_fp32_matmul_prec="medium" if compute is torch.bfloat16 else "highest",  # medium: products in bf16
        weight_decay=0.1,
        bf16=True,
    )
    model = DistributedDataParallel(ddp_config, gpt, optimizer_config=config)
    optimizer = get_optimizer(config, [model])
    if rank == 0:
        print(optimizer.plan)

    text = stdlib_text()
    for step in range(args.steps):
        model.zero_grad_buffer()
        loss = model(batch_at(step, text, size=args.batch, context=CONTEXT).chunk(world)[rank])
        loss.backward()
        result = optimizer.step()
        if rank == 0 and step % 10 == 9:
            print(f"step {step + 1}: {loss.item() / math.log(2):.2f} bits per character, norm {result.grad_norm:.2f}")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
