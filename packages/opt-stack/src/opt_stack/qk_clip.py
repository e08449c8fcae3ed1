"""QK-clip: after a step, rescale the query and key weights of heads whose attention logits have grown too large.

Kimi K2 (https://arxiv.org/abs/2507.20534, section 2.1). Per head, with the largest logit S of the step's batch,

    gamma = min(1, threshold / S)
    query rows *= gamma^alpha        key rows *= gamma^(1 - alpha)

so that the same input would give logits of at most the threshold. In multi-head latent attention all heads share the
rotary key, which is not scaled; rotary query rows are scaled by gamma. With grouped queries, a key serves several
heads, and the largest of their logits determines gamma, as in Megatron-Core's `clip_qk`.

The clip multiplies parameters and their main values, wherever these live. It excludes rules that keep lengths of rows,
or other weights.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opt_checkpoint import sharded_like
from opt_config import ConfigError
from opt_distributed.comm import Op, agree, agreed
from opt_distributed.pieces import HostMain, OwnedPiece, local
from opt_kernels.hooks import bare
from opt_kernels.precision import without_autocast
from opt_kernels.rules import MuownRule
from opt_paramgroups import is_dtensor
from opt_stack.optimizer import Optimizer

Role = tuple[float, float]  # what the output of a row is used for: (a, b) if it is scaled by gamma^(a * alpha + b)
QUERY = (1.0, 0.0)
KEY = (-1.0, 1.0)
ROTARY_QUERY = (0.0, 1.0)  # multiplied by a key that all heads share
OTHER = (0.0, 0.0)  # values, gates


class HeadRows(NamedTuple):
    """The rows of a weight (rows, in) or a bias (rows,): those of `roles`, repeated for each query group."""

    param: nn.Parameter
    roles: tuple[Role, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Attention:
    """One attention layer. All numbers are those of the whole layer, also under tensor parallelism."""

    num_heads: int
    num_query_groups: int
    rows: tuple[HeadRows, ...]


def fused_qkv(
    weight: nn.Parameter,  # (rows, in); query, key and value of the first query group, then of the second, ...
    bias: nn.Parameter | None = None,  # (rows,)
    *,
    num_heads: int,
    num_query_groups: int | None = None,  # None: `num_heads`
    head_dim: int,
    value_dim: int | None = None,  # None: `head_dim`
    gate_dim: int = 0,  # rows per head, between query and key, of a gate on the attention output
) -> Attention:
    """Describe attention with one fused projection, in Megatron-Core's order of rows."""
    groups = num_query_groups or num_heads
    heads_per_group = num_heads // groups
    roles = heads_per_group * head_dim * (QUERY,) + heads_per_group * gate_dim * (OTHER,) + head_dim * (KEY,)
    roles += (head_dim if value_dim is None else value_dim) * (OTHER,)
    return Attention(num_heads=num_heads, num_query_groups=groups, rows=_alike(roles, weight, bias))


def separate_qk(
    query: nn.Parameter,  # (num_heads * head_dim, in)
    key: nn.Parameter,  # (num_query_groups * head_dim, in)
    query_bias: nn.Parameter | None = None,
    key_bias: nn.Parameter | None = None,
    *,
    num_heads: int,
    num_query_groups: int | None = None,  # None: `num_heads`
    head_dim: int,
) -> Attention:
    """Describe attention with separate projections for queries and keys."""
    groups = num_query_groups or num_heads
    queries = num_heads // groups * head_dim * (QUERY,)
    rows = (*_alike(queries, query, query_bias), *_alike(head_dim * (KEY,), key, key_bias))
    return Attention(num_heads=num_heads, num_query_groups=groups, rows=rows)


def latent_attention(
    query_up: nn.Parameter,  # (num_heads * (nope_dim + rope_dim), in)
    key_value_up: nn.Parameter,  # (num_heads * (nope_dim + value_dim), in)
    *,
    num_heads: int,
    nope_dim: int,
    rope_dim: int,
    value_dim: int,
) -> Attention:
    """Describe multi-head latent attention by the up-projections of queries, and of non-rotary keys and values."""
    queries = nope_dim * (QUERY,) + rope_dim * (ROTARY_QUERY,)
    keys = nope_dim * (KEY,) + value_dim * (OTHER,)
    rows = (*_alike(queries, query_up), *_alike(keys, key_value_up))
    return Attention(num_heads=num_heads, num_query_groups=num_heads, rows=rows)


def _alike(roles: tuple[Role, ...], *params: nn.Parameter | None) -> tuple[HeadRows, ...]:
    return tuple(HeadRows(param, roles) for param in params if param is not None)


__all__ = ["Attention", "QKClip", "fused_qkv", "latent_attention", "separate_qk"]


class QKClip:
    """Rescales query and key weights after a step: `qk_clip([layer.max_logits for layer in layers])`.

    Layers that normalise queries and keys (qk-layernorm) need no clip; the norm would undo the scaling. Construction
    and every call are collective. Call it after each step.

    Args:
        optimizer: the optimizer that trains the parameters of `layers`. Main values may have any precision, and
            parameters any layout.
        layers: the attention layers of this rank, in the order of their logits; the same on all data-parallel and
            tensor-parallel ranks of a pipeline stage. A stage may have none.
        threshold: the largest logit that is not clipped.
        alpha: the query's share of the correction, from 0 to 1.

    Raises:
        ConfigError: on every rank, if a number is out of range, heads do not divide into query groups, rows do not fit
            the heads, a parameter is not trained by the optimizer or appears twice in `layers`, or a rule keeps other
            weights than the parameters hold (schedule_free).
    """

    def __init__(
        self, optimizer: Optimizer, layers: Sequence[Attention], *, threshold: float = 100.0, alpha: float = 0.5
    ):
        self.optimizer = optimizer
        self.layers = tuple(layers)
        self.threshold = threshold
        self.alpha = alpha
        self._roles = optimizer.roles
        self._names = {  # by identity of the parameter: a tensor compares its elements
            id(param): str(param_id)
            for group in optimizer.param_groups
            for param_id, param in zip(group["param_ids"], group["params"], strict=True)
        }
        everyone = self._roles.everyone

        def refuse() -> None:
            problem = next(self._problems(), "")
            if problem:
                raise ConfigError(f"QKClip: {problem}")

        agreed(everyone, refuse)
        agree(everyone, self._difference())
        # Likewise. A rank has at most one piece of a parameter.
        self._pieces = {id(piece.param): piece for unit in optimizer.stepper.units for piece in unit.pieces}

    @torch.no_grad()
    @without_autocast()
    def __call__(self, max_logits: Sequence[Tensor]) -> float:
        """Rescale the heads whose logits exceed the threshold, and return the largest logit of the whole model.

        Writes parameters and main values, but not the optimizer state. If any head is clipped, sharded parameters are
        gathered again. Logits that are not finite clip nothing: their step has overflowed.

        Args:
            max_logits: for each layer, the largest logit of each head over this rank's part of the batch, of shape
                (num_heads,), or under tensor parallelism (num_heads / ranks,) for this rank's consecutive heads. Logits
                are taken before softmax, after scaling by 1 / sqrt(head_dim). With several microbatches, pass the
                largest over all of them.

        Raises:
            ValueError: on every rank, if the number of layers or heads is wrong on any. No rank has clipped anything.
            RuntimeError: the optimizer is in evaluation mode.
        """
        self.optimizer.check_ready("QKClip()")
        num_heads = [layer.num_heads for layer in self.layers]
        logits = torch.full((sum(num_heads),), -torch.inf, dtype=torch.float64, device=self.optimizer.stepper.device)
        error: ValueError | None = None
        try:
            self._fill_(torch.split(logits, num_heads), max_logits)
        except ValueError as refusal:
            error = refusal
            logits.fill_(-torch.inf)
        # The largest logits over the ranks of this pipeline stage; then that of the model, and whether a rank refuses.
        for comm in self._roles.dense.comms if len(logits) else ():
            comm.all_reduce_(logits, op=Op.MAX)
        largest = logits.max() if len(logits) else logits.new_tensor(-torch.inf)
        of_model = torch.stack([largest, logits.new_tensor(float(error is not None))])
        self._roles.everyone.all_reduce_(of_model, op=Op.MAX)
        clips = ((logits > self.threshold) & logits.isfinite()).any().to(logits.dtype)
        exceeds, highest, is_refused = torch.stack([clips, *of_model]).tolist()  # the host waits here
        if error is not None:
            raise error
        if is_refused:
            raise ValueError("max_logits do not fit the layers of QKClip on another rank; no rank clipped anything")
        if exceeds:
            for chunk in self.optimizer.wrapped:
                chunk.finish_param_sync()  # a gather under way would send what is written now
            with self.optimizer.loaded_weights.writing_without_step():  # with ZeRO-1, those of one replica only
                for layer, of_layer in zip(self.layers, torch.split(logits, num_heads)):
                    self._clip_(layer, of_layer)
            for unit in self.optimizer.stepper.units:
                for source in unit.completes:
                    source.publish_()
        return float(highest)

    def _fill_(self, of_layers: Sequence[Tensor], max_logits: Sequence[Any]) -> None:
        """Write this rank's logits to `of_layers`, (heads,) of -inf. Raises ValueError if they do not fit."""
        if len(max_logits) != len(self.layers):
            raise ValueError(
                f"max_logits has {len(max_logits)} entries; pass one for each of {len(self.layers)} layers"
            )
        tp = self._roles.dense.tp
        for layer, given, heads in zip(self.layers, max_logits, of_layers, strict=True):
            if not isinstance(given, Tensor):
                raise ValueError(f"max_logits of a layer is a {type(given).__name__}; pass a tensor")
            if given.dim() != 1 or given.numel() not in (layer.num_heads, layer.num_heads / tp.size):
                raise ValueError(
                    f"max_logits of a layer has shape {tuple(given.shape)}; pass one number for each of its "
                    f"{layer.num_heads} heads, or for each head of one of {tp.size} tensor-parallel ranks"
                )
            first = 0 if given.numel() == layer.num_heads else tp.rank * given.numel()
            values = given.detach().to(heads)
            # A maximum over ranks may drop a NaN.
            heads[first : first + len(values)] = torch.where(values.isnan(), torch.inf, values)

    def _clip_(self, layer: Attention, logits: Tensor) -> None:
        largest = logits.view(layer.num_query_groups, -1).amax(1)
        clips = (largest > self.threshold) & largest.isfinite()
        gamma = torch.where(clips, self.threshold / largest, torch.ones_like(largest))
        for param, roles in layer.rows:
            piece = self._pieces.get(id(param))
            if piece is None:
                continue
            exponents = [a * self.alpha + b for a, b in roles]
            factors = gamma[:, None].pow(gamma.new_tensor(exponents)).view(-1)  # of the rows of the whole layer
            num_rows = param.shape[0]
            first = 0 if num_rows == factors.numel() else self._roles.dense.tp.rank * num_rows
            of_piece = _of_piece(factors[first : first + num_rows], piece)
            # Main values are multiplied where they are, and the parameter with them, on the device.
            main = piece.main
            value = main.value()
            if isinstance(main, HostMain) and value is not main.target:
                here = main.device.to_host(of_piece)
                with main.memory():
                    scaled = value.float() * here.float()
            else:
                scaled = value.float() * of_piece.float()
            main.set_(scaled)

    def _difference(self) -> ConfigError | None:
        """Return an error if ranks that share layers have different settings; else None. Collective."""
        layers = [[self._names[id(r.param)] for r in layer.rows] for layer in self.layers]
        own = (self.threshold, self.alpha, layers, [(one.num_heads, one.num_query_groups) for one in self.layers])
        for per_rank in [comm.gather_objects(own) for comm in self._roles.dense.comms]:
            if any(other != per_rank[0] for other in per_rank):
                return ConfigError(
                    f"QKClip: ranks differ in threshold, alpha or layers: {per_rank}; pass the same on all"
                )
        return None

    def _problems(self) -> Iterator[str]:
        """Yield why the optimizer, the layers or the numbers do not allow a clip."""
        if not self.threshold > 0:
            yield f"threshold={self.threshold}; it must be above 0"
        if not 0 <= self.alpha <= 1:
            yield f"alpha={self.alpha}; the query's share of the correction must be from 0 to 1"
        seen = set[int]()
        tp = self._roles.dense.tp.size
        for layer in self.layers:
            if layer.num_query_groups < 1 or layer.num_heads % layer.num_query_groups:
                yield f"{layer.num_heads} heads do not divide into {layer.num_query_groups} query groups"
            for rows in layer.rows:
                shape = tuple(rows.param.shape)
                name = self._names.get(id(rows.param), "")
                if not name:
                    yield f"the optimizer does not train a parameter of shape {shape}; leave its layer out"
                if id(rows.param) in seen:
                    yield f"{name!r} is in layers twice and would be scaled twice; pass it once"
                seen.add(id(rows.param))
                expected = layer.num_query_groups * len(rows.roles)
                if not shape or shape[0] not in (expected, expected / tp):
                    yield (
                        f"{name!r} has shape {shape}, but {layer.num_query_groups} query groups of "
                        f"{len(rows.roles)} rows make {expected}, over {tp} tensor-parallel rank(s); pass the "
                        "sizes of the whole layer"
                    )
        for unit in self.optimizer.stepper.units:
            clipped = [piece.id for piece in unit.pieces if id(piece.param) in seen]
            has_others = unit.name in self.optimizer.evaluation.formulas or unit.averages.looks_ahead
            if clipped and has_others:
                yield (
                    f"the state of {str(clipped[0])!r} has other weights than its main values (of schedule_free or "
                    "ema_nesterov_beta); clip only layers without them"
                )
            if clipped and isinstance(bare(unit.rule), MuownRule):
                yield (
                    f"the rule of {str(clipped[0])!r}, muown, keeps the lengths of rows, and would undo small factors; "
                    "clip only layers of other rules"
                )


def _of_piece(factors: Tensor, piece: OwnedPiece) -> Tensor:
    """Return the factors of a piece's rows in a shape that broadcasts to its main values."""
    shape = local(piece.param).shape
    if is_dtensor(piece.param):
        first = sharded_like("", piece.param.detach()).global_offset[0]
        factors = factors[first : first + shape[0]]
    if piece.is_whole:
        return factors.view(-1, *[1] * (len(shape) - 1))
    width = shape[1:].numel()
    first = piece.of_param.start // width
    last = -(-piece.of_param.stop // width)
    flat = factors[first:last].repeat_interleave(width)
    return flat[piece.of_param.start - first * width :][: piece.of_param.stop - piece.of_param.start]
