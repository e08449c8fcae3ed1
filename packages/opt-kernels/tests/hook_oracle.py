"""Steps with hooks in float64, written from the papers' equations: it shares no code with the package."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

LR, WD, BETAS, EPS, MOMENTUM, MAX_LR = 0.02, 0.1, (0.9, 0.95), 1e-8, 0.8, 0.05


def adam(state: dict[str, Tensor], g: Tensor, t: int) -> Tensor:
    b1, b2 = BETAS
    state["m"] = b1 * state.get("m", 0) + (1 - b1) * g
    state["v"] = b2 * state.get("v", 0) + (1 - b2) * g**2
    return (state["m"] / (1 - b1**t)) / ((state["v"] / (1 - b2**t)).sqrt() + EPS)


def lion(state: dict[str, Tensor], g: Tensor, t: int) -> Tensor:
    b1, b2 = BETAS
    m = state.get("m", torch.zeros_like(g))
    state["m"] = b2 * m + (1 - b2) * g
    return torch.sign(b1 * m + (1 - b1) * g)


def nesterov(state: dict[str, Tensor], g: Tensor, t: int) -> Tensor:
    state["b"] = g.clone() if t == 1 else MOMENTUM * state["b"] + g
    return g + MOMENTUM * state["b"]


Direction = Callable[[dict[str, Tensor], Tensor, int], Tensor]
DIRECTIONS: dict[str, tuple[Direction, bool]] = {  # with whether the rule's own decay is in the gradient
    "adamw": (adam, False),
    "adam-l2": (adam, True),
    "lion": (lion, False),
    "sgd": (nesterov, True),
}


@dataclass
class Oracle:
    """One parameter under the rule of this name and hooks, by the hooks' names and options."""

    rule: str
    hooks: dict[str, dict[str, Any]]
    p: Tensor  # float64
    state: dict[str, Tensor] = field(default_factory=dict)
    t: int = 0

    def step(self, g: Tensor) -> None:
        """One step with the scaled gradient `g` (float64)."""
        self.t += 1
        direction, coupled = DIRECTIONS[self.rule]
        hooks, p = self.hooks, self.p
        decay = next((h for h in hooks if h.endswith("Decay") or h == "Hyperball"), "L2" if coupled else "plain")
        if "CentralizeGradient" in hooks and g.dim() > 1:
            g = g - g.mean(dim=tuple(range(1, g.dim())), keepdim=True)
        if decay in ("CoupledDecay", "L2"):
            g = g + WD * p
        u = direction(self.state, g, self.t)
        if "CautiousUpdate" in hooks:
            mask = (u * g > 0).double()
            u = u * mask * (mask.numel() / (mask.sum() + 1))
        for name, options in hooks.items():
            if name == "RowFloor":
                floor = lambda row: max(float(row.norm()), 1e-8)
                u = torch.stack([r * max(1.0, options["ratio"] * floor(w) / floor(r)) for r, w in zip(u, p)])
            if name == "ClipUpdateRms":
                u = u / max(1.0, float(u.square().mean().sqrt()) / options["threshold"])
            if name == "RelativeUpdate":
                u = u * p.norm() / u.norm()
        if decay == "Hyperball":
            radius = p.norm() if hooks["Hyperball"].get("radius") is None else hooks["Hyperball"]["radius"]
            moved = p - LR * radius * u / u.norm()
            self.p = radius * moved / moved.norm()
            return
        amount = {"plain": LR * WD, "LrDecoupledDecay": LR / MAX_LR * WD}.get(decay, 0.0) * torch.ones_like(p)
        if decay == "CautiousDecay":
            amount = LR * WD * (u * p >= 0).double()
        self.p = p - amount * p - LR * u
