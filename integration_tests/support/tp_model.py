"""A small language model whose matrices tensor parallelism cuts, over any `Comm`: real losses, real gradients.

Column- and row-parallel matrices with biases, a fused gate, an embedding and a loss over a cut vocabulary, norms that
every rank has. Whole weights come from a seed and are cut afterwards, so that every grid begins at the same model.
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from opt_checkpoint import Segment, ShardedBase, ShardedTensor, ShardedTensorFactory
from opt_distributed import run_threads
from opt_distributed.comm import Axes, Comm, Op, Roles
from opt_distributed.comm.threads import ThreadComm, World
from opt_kernels.quantized import QuantizedTensor

DIM, HEADS, FFN, VOCAB, CONTEXT, LAYERS = 24, 12, 48, 36, 8, 1  # 1, 2, 3 and 4 ranks divide all that is cut


class Grid(NamedTuple):
    """One rank's communicators; rank = dp * tp.size + tp, as Megatron-Core orders them."""

    tp: Comm
    dp: Comm
    world: Comm

    @property
    def roles(self) -> Roles:
        dense = Axes(dp=self.dp, tp=self.tp)
        return Roles(dense=dense, expert=dense, everyone=self.world)


def run_grid(rank_main: Callable[[Grid], Any], *, tp: int = 2, dp: int = 2) -> list[Any]:
    """Run `rank_main(grid)` on every rank; ranks are threads."""
    tp_worlds, dp_worlds = [World(tp) for _ in range(dp)], [World(dp) for _ in range(tp)]

    def start(world: ThreadComm) -> Any:
        of_dp, of_tp = divmod(world.rank, tp)
        return rank_main(Grid(ThreadComm(tp_worlds[of_dp], of_tp), ThreadComm(dp_worlds[of_tp], of_dp), world))

    return run_threads(tp * dp, start)


class _Copied(torch.autograd.Function):
    """Identity in forward on a replicated tensor; all-reduces the gradient over tensor-parallel ranks in backward."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Comm) -> Tensor:
        ctx.tp = tp
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        grad = grad.clone(memory_format=torch.contiguous_format)
        ctx.tp.all_reduce_(grad)
        return grad, None


class _Summed(torch.autograd.Function):
    """The sum of every rank's part; the gradient of each is that of the sum."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, tp: Comm) -> Tensor:
        total = x.detach().clone(memory_format=torch.contiguous_format)
        tp.all_reduce_(total)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, None]:
        return grad, None


class Part(nn.Module):
    """This rank's part of one parameter. `dim`: what tensor parallelism cuts, None for nothing; `fused`: how many
    matrices lie one below the other, each cut by itself."""

    def __init__(self, whole: Tensor, tp: Comm, *, dim: int | None, fused: int = 1):
        super().__init__()
        self.dim, self.fused, self.tp = dim, fused, tp
        self.weight = nn.Parameter(cut(whole, tp.rank, tp.size, dim=dim, fused=fused))
        if dim is not None and tp.size > 1:
            self.weight.tensor_model_parallel, self.weight.partition_dim = True, dim

    def quantize_(self, recipe: str) -> None:
        """Keeps the weight in fp8."""
        weight = self.weight
        self.weight = nn.Parameter(QuantizedTensor.of(weight.detach(), recipe))
        vars(self.weight).update({name: value for name, value in vars(weight).items() if name != "_is_param"})

    def sharded(self, key: str, dp_rank: int) -> ShardedBase:
        """The parameter as Megatron-Core's model describes it."""
        param, tp = self.weight, self.tp
        if self.fused > 1:
            return self._fused_sharded(key, dp_rank)
        offsets = [] if self.dim is None else [(self.dim, tp.rank, tp.size)]
        replica = (0, tp.rank if self.dim is None else 0, dp_rank)
        return ShardedTensor.from_rank_offsets(key, param, *offsets, replica_id=replica)

    def _fused_sharded(self, key: str, dp_rank: int) -> ShardedTensorFactory:
        rows, columns = self.weight.shape
        each = rows // self.fused
        segments = tuple(
            Segment(
                row_start=number * each,
                row_stop=(number + 1) * each,
                global_shape=(rows * self.tp.size, columns),
                global_offset=((number * self.tp.size + self.tp.rank) * each, 0),
            )
            for number in range(self.fused)
        )
        return ShardedTensorFactory(
            key, self.weight, segments=segments, local_shape=(rows, columns), replica_id=(0, 0, dp_rank)
        )


def cut(whole: Tensor, rank: int, size: int, *, dim: int | None, fused: int = 1) -> Tensor:
    if dim is None:
        return whole.clone()
    return torch.cat([matrix.chunk(size, dim)[rank] for matrix in whole.chunk(fused)])


def joined(parts: list[Tensor], *, dim: int | None, fused: int = 1) -> Tensor:
    """The inverse of `cut`. Where nothing is cut, all parts must be equal."""
    if dim is None:
        assert all(torch.equal(part, parts[0]) for part in parts)
        return parts[0]
    return torch.cat([torch.cat([part.chunk(fused)[n] for part in parts], dim) for n in range(fused)])


class Block(nn.Module):
    def __init__(self, tp: Comm, make: Any):
        super().__init__()
        self.tp = tp
        self.norm1, self.norm2 = make((DIM,), None), make((DIM,), None)
        self.qkv, self.out = make((3 * DIM, DIM), 0), make((DIM, DIM), 1)  # rows of q, k, v by head
        self.up, self.up_bias = make((2 * FFN, DIM), 0, fused=2), make((FFN,), 0)
        self.down, self.down_bias = make((DIM, FFN), 1), make((DIM,), None)

    def forward(self, x: Tensor) -> Tensor:
        x = x + _Summed.apply(self._attention(_Copied.apply(_normed(x, self.norm1), self.tp)), self.tp)
        gate, value = (_Copied.apply(_normed(x, self.norm2), self.tp) @ self.up.weight.T).chunk(2, -1)
        hidden = nn.functional.silu(gate) * (value + self.up_bias.weight)
        return x + _Summed.apply(hidden @ self.down.weight.T, self.tp) + self.down_bias.weight

    def _attention(self, x: Tensor) -> Tensor:
        q, k, v = (x @ self.qkv.weight.T).unflatten(-1, (HEADS // self.tp.size, 3, -1)).transpose(1, 2).unbind(-2)
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        return mixed.transpose(1, 2).flatten(-2) @ self.out.weight.T


def _normed(x: Tensor, norm: Part) -> Tensor:
    return nn.functional.rms_norm(x, (DIM,), norm.weight, eps=1e-5)


class Lm(nn.Module):
    """This rank's part of the model. `forward(codes)` gives the mean loss of the sequences, the same on all of `tp`."""

    def __init__(self, tp: Comm, dtype: torch.dtype, *, seed: int = 0):
        super().__init__()
        self.tp = tp
        generator = torch.Generator().manual_seed(seed)

        def make(shape: tuple[int, ...], dim: int | None, *, fused: int = 1) -> Part:
            whole = torch.randn(shape, generator=generator)
            whole = whole / shape[-1] ** 0.5 if len(shape) > 1 else 1 + 0.1 * whole
            return Part(whole.to(dtype), tp, dim=dim, fused=fused)

        self.embedding = make((VOCAB, DIM), 0)
        self.blocks = nn.ModuleList(Block(tp, make) for _ in range(LAYERS))
        self.norm, self.head = make((DIM,), None), make((VOCAB, DIM), 0)
        for part in (self.embedding, self.head):
            part.weight.is_embedding_or_output_parameter = True

    def forward(self, codes: Tensor) -> Tensor:
        x = self._embedded(codes[:, :-1])
        for block in self.blocks:
            x = block(x)
        logits = _Copied.apply(_normed(x, self.norm), self.tp) @ self.head.weight.T
        return self._loss(logits.float(), codes[:, 1:])

    def _embedded(self, codes: Tensor) -> Tensor:
        local, is_mine = self._local(codes)
        return _Summed.apply(self.embedding.weight[local] * is_mine.unsqueeze(-1), self.tp)

    def _loss(self, logits: Tensor, wanted: Tensor) -> Tensor:
        top = logits.detach().amax(-1)
        self.tp.all_reduce_(top, op=Op.MAX)
        logits = logits - top.unsqueeze(-1)
        local, is_mine = self._local(wanted)
        of_wanted = _Summed.apply(logits.gather(-1, local.unsqueeze(-1)).squeeze(-1) * is_mine, self.tp)
        return (_Summed.apply(logits.exp().sum(-1), self.tp).log() - of_wanted).mean()

    def _local(self, codes: Tensor) -> tuple[Tensor, Tensor]:
        """Row indices in this rank's part of the vocabulary, and a mask of the valid ones."""
        rows = VOCAB // self.tp.size
        local = codes - self.tp.rank * rows
        is_mine = (local >= 0) & (local < rows)
        return local.where(is_mine, 0), is_mine

    def parts(self) -> dict[str, Part]:
        """By key."""
        return {name: part for name, part in self.named_modules() if isinstance(part, Part)}

    def sharded_state_dict(self, dp_rank: int) -> dict[str, ShardedBase]:
        return {name: part.sharded(name, dp_rank) for name, part in self.parts().items()}


def joined_batch(step: int, *, size: int = 12) -> Tensor:
    """What all ranks together see in a step: runs of codes that go up by a step of their own, so there is something to
    learn."""
    generator = torch.Generator().manual_seed(500 + step)
    start, rise = (torch.randint(low, high, (size, 1), generator=generator) for low, high in ((0, VOCAB), (1, 4)))
    return (start + rise * torch.arange(CONTEXT + 1)) % VOCAB


def comms_of(grid: list[list[int]]) -> dict[int, ThreadComm]:
    """Each rank's communicator in the groups of `grid`, which hold every rank once."""
    worlds = [(group, World(len(group)).comms()) for group in grid]
    return {rank: comm for group, comms in worlds for rank, comm in zip(group, comms, strict=True)}
