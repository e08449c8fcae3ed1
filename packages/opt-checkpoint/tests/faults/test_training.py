"""F20: training goes on as if it had not been interrupted, on the same grid and on another.

A small network trained by `torch.optim.AdamW` over flat shards, as ZeRO-1 does it: element-wise, so that the numbers do
not depend on how the parameters are cut, and every comparison is of bits.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from checkpoint_ranks import load_as_ranks, save_as_ranks
from torch import Tensor

from opt_checkpoint import PerParam, ShardedTensor, make_sharded_optimizer_tensor, make_sharded_state

SHAPES = {"a": (6, 4), "b": (6,), "c": (2, 6)}
GRIDS = [1, 2, 3, 4]


class ShardedRun:
    """A model whose parameters, and their AdamW, are cut into `size` flat shards."""

    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(0)
        self.weights = {k: torch.randn(s, generator=generator) for k, s in SHAPES.items()}
        self.pieces = [list(self._pieces_of(rank, size)) for rank in range(size)]
        self.mains = [[self._flat(k)[a:b].clone().requires_grad_() for k, a, b in own] for own in self.pieces]
        self.optimizers = [torch.optim.AdamW(own, lr=0.05, weight_decay=0.1, foreach=False) for own in self.mains]
        self.losses: list[float] = []
        for own, optimizer in zip(self.mains, self.optimizers):
            for main in own:
                zeros = torch.zeros_like(main)
                optimizer.state[main] = {"step": torch.tensor(0.0), "exp_avg": zeros, "exp_avg_sq": zeros.clone()}

    def _flat(self, key: str) -> Tensor:
        return self.weights[key].view(-1)

    def _pieces_of(self, rank: int, size: int) -> list[tuple[str, int, int]]:
        """Cuts at fractions that fall inside rows."""
        cuts = ((k, w.numel() * rank // size, w.numel() * (rank + 1) // size) for k, w in self.weights.items())
        return [(k, a, b) for k, a, b in cuts if a < b]

    def train(self, start: int, stop: int) -> None:
        for step in range(start, stop):
            data = torch.randn(8, 4, generator=torch.Generator().manual_seed(step))
            leaves = {k: w.clone().requires_grad_() for k, w in self.weights.items()}
            hidden = torch.tanh(data @ leaves["a"].t() + leaves["b"])
            loss = ((hidden @ leaves["c"].t()) ** 2).mean()
            loss.backward()
            self.losses.append(loss.item())
            for own, mains, optimizer in zip(self.pieces, self.mains, self.optimizers):
                for (key, a, b), main in zip(own, mains):
                    main.grad = leaves[key].grad.view(-1)[a:b].clone()
                optimizer.step()
            self.publish()

    def publish(self) -> None:
        for own, mains in zip(self.pieces, self.mains):
            for (key, a, b), main in zip(own, mains):
                self._flat(key)[a:b] = main.detach()

    def states(self) -> list[dict[str, object]]:
        return [self._state(rank) for rank in range(len(self.pieces))]

    def _state(self, rank: int) -> dict[str, object]:
        state: dict[str, object] = {}
        for (key, a, b), main in zip(self.pieces[rank], self.mains[rank]):
            shape = SHAPES[key]
            model = ShardedTensor(
                key, None, torch.float32, shape, shape, (0,) * len(shape), None, flattened_range=slice(a, b)
            )
            own = self.optimizers[rank].state[main]
            state[key] = {
                "fp32_param": make_sharded_optimizer_tensor(model, main.detach(), "optimizer.state.fp32_param"),
                "exp_avg": make_sharded_optimizer_tensor(model, own["exp_avg"], "optimizer.state.exp_avg"),
                "exp_avg_sq": make_sharded_optimizer_tensor(model, own["exp_avg_sq"], "optimizer.state.exp_avg_sq"),
                "step": make_sharded_state(model, own["step"], "step", PerParam()),
            }
        return state


@pytest.mark.parametrize(("before", "after"), [(a, b) for a in GRIDS for b in GRIDS])
def test_training_interrupted_and_resharded_gives_the_same_losses(tmp_path: Path, before: int, after: int) -> None:
    whole = ShardedRun(before)
    whole.train(0, 30)
    first = ShardedRun(before)
    first.train(0, 10)
    save_as_ranks(first.states(), tmp_path / "x")
    second = ShardedRun(after)
    load_as_ranks(second.states(), tmp_path / "x")
    second.publish()
    second.train(10, 30)
    assert first.losses + second.losses == whole.losses
    assert all(torch.equal(second.weights[k], whole.weights[k]) for k in SHAPES)
