"""Writes directories of a small GPT with Megatron-Core itself, on gloo ranks without a GPU.

    python write_megatron.py FOLDER RANKS TENSOR_PARALLEL KIND FORMAT ...
    python write_megatron.py FOLDER RANKS TENSOR_PARALLEL KIND load DIRECTORY

KIND is one of `KINDS`. FOLDER gets one directory per format, and from each rank `truth-<rank>.pt` (the optimizer's
states as they are in memory, by parameter) and `slots-<rank>.json` (where each parameter is in the buckets).
`load` loads a directory instead, in a strict mode, which parses all of `.metadata`. Megatron-Core asks for CUDA in a
few places that a CPU serves as well; `OnCpu` answers them.
"""

import argparse
import enum
import json
import random
import sys
import warnings
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from torch.overrides import TorchFunctionMode

warnings.filterwarnings("ignore")
STEPS = 3
LOSS_SCALE = 512.0


class Kind(NamedTuple):
    """A configuration of Megatron-Core: precision, sharding, buckets, experts, the form of its keys, rule."""

    dtype: torch.dtype = torch.bfloat16
    is_distributed: bool = True
    bucket_size: int | None = None  # of several buckets, which overlap with the backward pass
    experts: int | None = None  # one a rank: a second optimizer in the chain
    has_prefix: bool = False  # `chained_N.`, unless the metadata says otherwise as in Megatron's training script
    rule: str = "adam"
    is_layer_wise: bool = False


KINDS = {
    "zero": Kind(),
    "plain": Kind(is_distributed=False),
    "fp32": Kind(dtype=torch.float32, is_distributed=False),
    "fp16": Kind(dtype=torch.float16, is_distributed=False),
    "fp16-zero": Kind(dtype=torch.float16),
    "fp32-zero": Kind(dtype=torch.float32),
    "buckets": Kind(bucket_size=700),
    "experts": Kind(experts=2),
    "chain": Kind(experts=2, is_distributed=False, has_prefix=True),
    "muon": Kind(is_distributed=False, rule="muon"),
    "muon-experts": Kind(is_distributed=False, rule="muon", experts=2),
    "muon-layer-wise": Kind(is_distributed=False, rule="muon", is_layer_wise=True),
    "muon-layer-wise-zero": Kind(rule="muon", is_layer_wise=True),  # beside a distributed optimizer
    "lion-fp32": Kind(dtype=torch.float32, is_distributed=False, rule="lion"),
    "laprop": Kind(is_distributed=False, rule="laprop"),
}


class Attention(enum.Enum):
    """A class of the training script, as Megatron's arguments hold several."""

    FLASH = 1


class OnCpu(TorchFunctionMode):
    """Tensors asked for on a GPU are made on the CPU, and those on the CPU report the types of a GPU.

    Megatron-Core's layer-wise optimizer gathers different shapes, which gloo does not. No number is changed.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = dict(kwargs or {})
        if func is dist.all_gather and len({part.shape for part in args[0]}) > 1:
            group = kwargs["group"]
            for rank, part in enumerate(args[0]):
                if rank == dist.get_rank(group):
                    part.copy_(args[1])
                dist.broadcast(part, dist.get_global_rank(group, rank), group)
            return None
        if func is torch.Tensor.cuda:
            return args[0]
        if "cuda" in str(kwargs.get("device", "")):
            kwargs["device"] = "cpu"
        out = func(*args, **kwargs)
        return out.replace("torch.", "torch.cuda.", 1) if func is torch.Tensor.type and isinstance(out, str) else out


def write(rank: int, folder: Path, ranks: int, tensor_parallel: int, kind: Kind, formats: list[str]) -> None:
    """One rank: train three steps on random gradients, then save in every format."""
    start(rank, folder, ranks)
    with OnCpu():
        model, optimizer = train(tensor_parallel, kind)
        pieces = _pieces(model)
        if formats[0] == "load":
            _load(model, optimizer, Path(formats[1]))
            formats = []
        torch.save(_truth(model, optimizer, pieces), folder / f"truth-{rank}.pt")
        (folder / f"slots-{rank}.json").write_text(json.dumps(_slots(model, pieces)))
        for form in formats:
            _save(model, optimizer, folder / form, form, kind)
    dist.barrier()
    dist.destroy_process_group()


def start(rank: int, folder: Path, ranks: int) -> None:
    """Begin a world of `ranks` processes without a GPU."""
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/meeting", rank=rank, world_size=ranks)
    torch.cuda.current_device = lambda: "cpu"  # type: ignore[assignment, return-value]
    for name in ("set_device", "empty_cache", "synchronize"):
        setattr(torch.cuda, name, lambda *args: None)
    if not hasattr(np, "product"):
        np.product = np.prod  # type: ignore[attr-defined]  # Megatron-Core 0.12 was written for numpy 1


def train(tensor_parallel: int, kind: Kind, *, package: Any = None, steps: int = STEPS) -> tuple[Any, Any]:
    """A trained model and its optimizer; `package` has other classes of Megatron-Core's names."""
    from megatron.core import distributed, parallel_state
    from megatron.core import optimizer as optimizers
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_layer_local_spec
    from megatron.core.transformer import TransformerConfig

    torch.manual_seed(1)
    if not parallel_state.model_parallel_is_initialized():
        parallel_state.initialize_model_parallel(
            tensor_model_parallel_size=tensor_parallel, expert_model_parallel_size=kind.experts or 1
        )
    precision: dict[str, Any] = {"params_dtype": kind.dtype}
    if kind.dtype != torch.float32:
        precision["bf16" if kind.dtype == torch.bfloat16 else "fp16"] = True
    unfused = {
        f"{name}_fusion": False
        for name in ("bias_activation", "gradient_accumulation", "masked_softmax", "bias_dropout")
    }
    config = TransformerConfig(
        num_layers=2,
        hidden_size=16,
        num_attention_heads=2,
        ffn_hidden_size=32,
        gated_linear_unit=True,
        activation_func=torch.nn.functional.silu,
        add_bias_linear=False,
        use_cpu_initialization=True,
        tensor_model_parallel_size=tensor_parallel,
        pipeline_dtype=kind.dtype,
        apply_rope_fusion=False,
        num_moe_experts=kind.experts,
        expert_model_parallel_size=kind.experts or 1,
        moe_ffn_hidden_size=32 if kind.experts else None,
        **precision,
        **unfused,
    )
    gpt = GPTModel(
        config,
        get_gpt_layer_local_spec(num_experts=kind.experts),
        vocab_size=63 if kind.bucket_size else 64,
        max_sequence_length=8,
    )
    wrappers = package or distributed
    optimizers = package or optimizers
    ddp_config = wrappers.DistributedDataParallelConfig(
        use_distributed_optimizer=kind.is_distributed,
        bucket_size=kind.bucket_size or 5000,
        grad_reduce_in_fp32=True,
        overlap_grad_reduce=kind.bucket_size is not None,
    )
    gpt = gpt.to(kind.dtype)
    layout: dict[str, Any] = {}
    if kind.is_layer_wise and kind.is_distributed:  # as Megatron-LM's script wraps
        layer_wise = import_module(f"{optimizers.__name__}.layer_wise_optimizer")
        layer_wise.tag_params_for_buffer_routing([gpt])
        compute = layer_wise.LayerWiseDistributedOptimizer.compute_full_param_layout
        replicas = parallel_state.get_data_parallel_world_size()
        layout["full_param_layout"] = compute(list(gpt.parameters()), ddp_config.bucket_size, replicas, ddp_config)
    model = wrappers.DistributedDataParallel(config, ddp_config, gpt, **layout)
    more: dict[str, Any] = {"initial_loss_scale": LOSS_SCALE} if kind.dtype == torch.float16 else {}
    if kind.is_layer_wise:
        more["use_layer_wise_distributed_optimizer"] = True
    options = optimizers.OptimizerConfig(
        optimizer=kind.rule,
        lr=0.01,
        use_distributed_optimizer=kind.is_distributed and not kind.is_layer_wise,
        clip_grad=0.0,
        **precision,
        **more,
    )
    optimizer = optimizers.get_megatron_optimizer(options, [model])
    for step in range(steps):
        model.zero_grad_buffer()
        for number, param in enumerate(model.parameters()):
            seed = torch.Generator().manual_seed(100 * step + number)
            param.main_grad.copy_(torch.randn(param.shape, generator=seed))
        try:
            optimizer.step()
        except RuntimeError as error:  # 0.12 publishes the weights by Transformer Engine; the state is complete by then
            if "Transformer Engine" not in str(error):
                raise
    return model, optimizer


class _Piece(NamedTuple):
    """A run of rows of a parameter that is a block of a stored tensor; SwiGLU's have two."""

    key: str
    global_shape: tuple[int, ...]
    offset: tuple[int, ...]
    shape: tuple[int, ...]
    first: int


def _pieces(model: Any) -> dict[int, list[_Piece]]:
    """The pieces of every parameter, by its id, from Megatron-Core's own sharded state."""
    from megatron.core.dist_checkpointing import ShardedTensor
    from megatron.core.dist_checkpointing.dict_utils import nested_values
    from megatron.core.dist_checkpointing.mapping import ShardedTensorFactory

    pieces: dict[int, list[_Piece]] = {}
    for value in nested_values(model.module.sharded_state_dict()):
        if isinstance(value, ShardedTensorFactory):
            blocks = list(nested_values(value.build()))
        elif isinstance(value, ShardedTensor):
            blocks = [value]
        else:
            continue
        first = 0
        own = []
        for block in blocks:
            shape = (1,) * block.prepend_axis_num + tuple(block.local_shape)
            own.append(_Piece(block.key, tuple(block.global_shape), tuple(block.global_offset), shape, first))
            first += block.data.numel()
        pieces[id(value.data)] = own
    return pieces


def _truth(model: Any, optimizer: Any, pieces: dict[int, list[_Piece]]) -> list[dict[str, Any]]:
    """The elements of each parameter that this rank's optimizer holds, with its states."""
    rows = []
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        for param in model.parameters():
            start = 0
            if hasattr(part, "model_param_gbuf_map"):
                if param not in part.model_param_gbuf_map:
                    continue
                start = part._get_model_param_range_map(param)["param"].start
                tensors = part._get_main_param_and_optimizer_states(param)
            else:
                main = getattr(param, "main_param", param)
                if main not in part.optimizer.state:
                    continue
                tensors = {"param": main.detach(), **part.optimizer.state[main]}
            states = {name: tensors[name].flatten().clone() for name in ("exp_avg", "exp_avg_sq")}
            states["fp32_param"] = tensors.get("param", tensors.get("fp32_param")).flatten().clone()
            rows.append({"pieces": [p._asdict() for p in pieces[id(param)]], "start": start, "states": states})
    return rows


def _slots(model: Any, pieces: dict[int, list[_Piece]]) -> list[dict[str, Any]]:
    from megatron.core import parallel_state

    slots = []
    groups = parallel_state.get_tensor_model_parallel_rank(), parallel_state.get_expert_model_parallel_rank()
    for chained, buffers in enumerate((model.buffers, model.expert_parallel_buffers)):
        for number, buffer in enumerate(buffers):
            for param, (start, _, bucket) in buffer.param_index_map.items():
                for piece in pieces[id(param)]:
                    in_bucket = start - buffer.buckets[bucket].offset + piece.first
                    slots.append(
                        {
                            "name": piece.key,
                            "shape": piece.shape,
                            "start": in_bucket,
                            "bucket": bucket,
                            "buffer": number,
                            "group": groups[chained],
                            "optimizer": chained,
                            "global_shape": piece.global_shape,
                            "global_offset": piece.offset,
                        }
                    )
    return slots


def _save(model: Any, optimizer: Any, path: Path, form: str, kind: Kind) -> None:
    from megatron.core import dist_checkpointing, parallel_state

    sharded = model.module.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": form, "chained_optim_avoid_prefix": not kind.has_prefix}
    try:
        state = optimizer.sharded_state_dict(sharded, metadata=metadata, is_loading=False)
    except TypeError:  # 0.12 takes the format as an argument
        state = optimizer.sharded_state_dict(sharded, sharding_type=form, is_loading=False)
    ranks = parallel_state.get_tensor_model_parallel_world_size()
    generators = [{"python": random.getstate(), "numpy": np.random.get_state(), "torch": torch.get_rng_state()}]
    rng = dist_checkpointing.ShardedObject(
        "rng_state",
        generators,
        (ranks,),
        (parallel_state.get_tensor_model_parallel_rank(),),
        replica_id=parallel_state.get_data_parallel_rank(),
    )
    path.mkdir(exist_ok=True)
    dist.barrier()
    arguments = argparse.Namespace(lr=0.01, attention=Attention.FLASH, dtype=torch.bfloat16)
    content = {"model": sharded, "optimizer": state, "rng_state": rng, "iteration": STEPS, "args": arguments}
    dist_checkpointing.save(content, str(path), validate_access_integrity=False)


def _load(model: Any, optimizer: Any, path: Path) -> None:
    from megatron.core import dist_checkpointing
    from megatron.core.optimizer import distrib_optimizer

    set_states = distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states

    def set_without_step(self: Any, param: Any, tensors: dict[str, Any]) -> None:
        """As with a fused optimizer, which it is written for: the step is in groups, not a state of parameters."""
        kept = [(state, state.pop("step")) for state in self.optimizer.state.values()]
        set_states(self, param, tensors)
        for state, step in kept:
            state["step"] = step

    distrib_optimizer.DistributedOptimizer._set_main_param_and_optimizer_states = set_without_step
    parts = getattr(optimizer, "chained_optimizers", [optimizer])
    for main in (main for part in parts for group in part.param_groups for main in group["params"]):
        main.data.zero_()
    sharded = model.module.sharded_state_dict()
    metadata = {"distrib_optim_sharding_type": "fully_reshardable", "chained_optim_avoid_prefix": True}
    state = optimizer.sharded_state_dict(sharded, metadata=metadata, is_loading=True)
    wanted = {"model": sharded, "optimizer": state}
    loaded = dist_checkpointing.load(wanted, str(path), strict="log_all", validate_access_integrity=False)
    assert loaded["iteration"] == STEPS
    model.module.load_state_dict(loaded["model"])
    optimizer.load_state_dict(loaded["optimizer"])
    for part in parts:
        places = [*part.optimizer.state.values(), *part.param_groups]
        assert {int(place["step"]) for place in places if "step" in place} == {7}


def _serve_old_writers() -> None:
    """Megatron-Core 0.12 calls a function of torch 2.6's DCP, which has got another argument since."""
    import inspect

    from torch.distributed.checkpoint import filesystem

    current = filesystem._write_item
    if "serialization_format" in inspect.signature(current).parameters:
        form = filesystem.SerializationFormat.TORCH_SAVE
        filesystem._write_item = lambda *args, **options: current(*args, **{"serialization_format": form, **options})


if __name__ == "__main__":
    import megatron.core

    target = Path(sys.argv[1])
    if megatron.core.__version__ < "0.13":
        _serve_old_writers()
    size = int(sys.argv[2])
    work = (target, size, int(sys.argv[3]), KINDS[sys.argv[4]], sys.argv[5:])
    mp.start_processes(write, work, nprocs=size, start_method="fork" if megatron.core.__version__ < "0.13" else "spawn")
