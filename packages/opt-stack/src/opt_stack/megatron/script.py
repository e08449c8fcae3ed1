"""Functions and methods that Megatron-LM's training script calls in addition to training itself."""

import math
import re
from collections.abc import Callable, Iterator, Mapping
from os import PathLike
from typing import Any

import torch

from opt_config import ConfigError
from opt_distributed.buffers import DistributedDataParallel
from opt_distributed.comm import agreed
from opt_stack.optimizer import Optimizer
from opt_stack.planning.design import ModelChunks
from opt_stack.qk_clip import Attention, QKClip, fused_qkv, latent_attention
from opt_stack.state import AnyState

param_group_identifier_keys = (
    "optimizer", "max_lr", "min_lr", "start_wd", "end_wd", "wd_mult", "lr_mult", "is_expert_parallel",
    "is_decoupled_lr",
)  # fmt: skip
"""Entries by which Megatron-LM's script sorts saved groups."""


class ScriptOptimizer(Optimizer):
    """An `Optimizer` that Megatron-LM's script saves in its formats `torch_dist` and `torch`.

    With `torch`, the script saves the `state_dict` of the first data-parallel rank, which all ranks load, and sharded
    state by `save_parameter_state`. A step between the two loads is refused.
    """

    _lacks_parameter_state = False

    def save_parameter_state(self, filename: str) -> None:
        """Write the state of this rank to `filename`, with the number of the replica appended from the second on."""
        self.save_state_dict_to_file(self._own(filename))

    def load_parameter_state(self, filename: str, *, update_legacy_format: bool = False) -> None:
        """Load what `save_parameter_state` wrote on the same layout. Collective. `update_legacy_format` is ignored."""
        self.load_state_dict_from_file(self._own(filename))

    def save_state_dict_to_file(self, filename: str) -> None:
        """Write the state of this rank. The script gives each data-parallel rank a file."""
        torch.save(self.state_dict(), filename)

    def load_state_dict_from_file(self, filename: str | PathLike[str]) -> None:
        """Load what `save_state_dict_to_file` wrote on the same rank of the same layout. Collective."""
        # A file may be missing on one rank only, and the others would wait for it in `load_state_dict`.
        self.load_state_dict(agreed(self._everyone, lambda: torch.load(filename, weights_only=True)))

    def load_state_dict(self, state_dict: AnyState, **options: Any) -> None:
        """Call `Optimizer.load_state_dict`. Of another rank's part, only groups and loss scale are loaded: the state
        follows by `load_parameter_state`."""
        layouts = state_dict.get("layout", ()) if self.has_rank_local_state and isinstance(state_dict, Mapping) else ()
        is_of_this_layout = any(_without_rank(text) == _without_rank(self._layout_id) for text in layouts)
        is_of_other = is_of_this_layout and self._layout_id not in layouts
        if is_of_other:
            state_dict = {**state_dict, "state": {}, "layout": {self._layout_id: True}}
        super().load_state_dict(state_dict, **options)
        if layouts:  # then loading is collective
            self._lacks_parameter_state = any(self._everyone.gather_objects(is_of_other))

    def check_ready(self, what: str, *, reads: bool = True) -> None:
        """Call `Optimizer.check_ready`; raise RuntimeError too if the state has not been loaded, on all ranks."""
        super().check_ready(what, reads=reads)
        if self._lacks_parameter_state and what != "load_state_dict()":
            raise RuntimeError(
                f"{what}: load_state_dict was given the part of another rank, and loaded groups and loss scale only; "
                "call load_parameter_state with the file of save_parameter_state"
            )

    def _own(self, filename: str) -> str:
        axes = self.roles.dense
        replica = axes.inter.rank * axes.dp.size + axes.dp.rank
        return f"{filename}.{replica}" if replica else filename


def _without_rank(layout: str) -> str:
    return re.sub(r"rank \d+ of", "", layout)


def OptimizerCudaGraphWrapper(step: Callable[..., Any], **options: Any) -> Callable[..., Any]:
    """Return `step`: with `optimizer_cuda_graph=True` of its configuration, an optimizer captures graphs itself."""
    return step


def tag_params_for_buffer_routing(model_chunks: ModelChunks) -> None:
    """Do nothing: the wrapper decides by the shapes of parameters which of them layer-wise sharding keeps whole."""


def clip_qk(model: ModelChunks, log_max_only: bool = False) -> float:
    """Return the largest attention logit since the last call, and clip queries and keys by it (`QKClip`). Collective.

    Reads and resets `current_max_attn_logits` of Megatron-Core's layers; threshold and alpha are those of their
    configuration. With `log_max_only`, weights stay.

    Raises:
        ConfigError: the chunks are not wrapped, or not trained by one optimizer.
    """
    wrapped = [chunk for chunk in model if isinstance(chunk, DistributedDataParallel)]
    optimizers = {id(one): one for chunk in wrapped for one in chunk.optimizers if isinstance(one, Optimizer)}
    if len(wrapped) != len(model) or len(optimizers) != 1:
        raise ConfigError(
            "clip_qk needs chunks in opt_stack.megatron.DistributedDataParallel that one optimizer trains; for others "
            "call opt_stack.QKClip(optimizer, layers)"
        )
    (optimizer,) = optimizers.values()
    layers = list(_attention_layers(model))
    logits = [layer.core_attention.current_max_attn_logits for layer in layers]
    for layer in layers:
        layer.core_attention.current_max_attn_logits = None
    config: Any = wrapped[0].config  # equal on all stages, also those without layers
    threshold = math.inf if log_max_only else float(config.qk_clip_threshold)
    alpha = float(config.qk_clip_alpha)
    largest = QKClip(optimizer, list(map(_attention, layers)), threshold=threshold, alpha=alpha)(logits)
    return max(largest, 0.0)


def _attention_layers(model: ModelChunks) -> Iterator[Any]:
    """Yield the attention modules of Megatron-Core that have recorded logits."""
    for module in (module for chunk in model for module in chunk.modules()):
        core = getattr(module, "core_attention", None)
        if getattr(core, "current_max_attn_logits", None) is not None:
            yield module


def _attention(layer: Any) -> Attention:
    config = layer.config
    if hasattr(layer, "linear_qkv"):
        return fused_qkv(
            layer.linear_qkv.weight,
            num_heads=config.num_attention_heads,
            num_query_groups=config.num_query_groups,
            head_dim=config.kv_channels,
            gate_dim=config.kv_channels if getattr(config, "attention_output_gate", False) else 0,
        )
    query_up = layer.linear_q_proj if config.q_lora_rank is None else layer.linear_q_up_proj
    return latent_attention(
        query_up.weight,
        layer.linear_kv_up_proj.weight,
        num_heads=config.num_attention_heads,
        nope_dim=config.qk_head_dim,
        rope_dim=config.qk_pos_emb_head_dim,
        value_dim=config.v_head_dim,
    )
