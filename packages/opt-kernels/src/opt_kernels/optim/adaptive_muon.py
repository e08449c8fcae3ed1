"""Drop-in AdaptiveMuon (Muon with a second moment) and its presets NorMuon and NAMO."""

from collections.abc import Mapping
from typing import Any, ClassVar

from opt_kernels.optim.matrices import MatrixOptimizer, made
from opt_kernels.optim.muon import MUON_OPTIONS
from opt_kernels.rules.adaptive_muon import AdaptiveMuonRule, Lines, SecondMoment
from opt_kernels.rules.base import Rule
from opt_kernels.rules.muon import MuonRule

_NUMBERS = {"lr": 3e-4, "momentum": 0.95, "weight_decay": 0.01, "nesterov": False, "betas": (0.9, 0.95), "eps": 1e-8}
_MUON = {"scale_mode": "spectral", "num_ns_steps": 5, "coefficient_type": "quintic", **MUON_OPTIONS}


class AdaptiveMuon(MatrixOptimizer):
    """Muon with a second moment: per element of the orthogonalised update ("adamuon", Megatron-Core's variant, whose
    step is about 100 times as long as Muon's at the same lr; "adamuon_paper", arXiv 2507.11005, for which
    `scale_mode="match_rms_adamw"` is the paper's scale), per row or column of it
    ("normuon"), or of the gradient's norm ("namo").

    `betas[1]` and `eps` belong to the second moment; groups that `scalar_optimizer` updates have their own. The `lines`
    of NorMuon are "rows", "cols" or "longer" (rows unless cols > rows). The other options are those of `Muon`. Raises
    ValueError for an option that is not allowed.
    """

    fixed = ("nesterov",)
    numbers: ClassVar[Mapping[str, Any]] = _NUMBERS
    options: ClassVar[Mapping[str, Any]] = {"moment2_method": "adamuon", "lines": "rows", **_MUON}
    method: ClassVar[str | None] = None  # None: an argument

    @classmethod
    def rule_with(cls, given: Mapping[str, Any]) -> Rule:
        muon = made(MuonRule, {name: given[name] for name in (*_MUON, "nesterov", "backend")})
        method = cls.method or given["moment2_method"]
        lines = Lines(given.get("lines", Lines.ROWS))
        return AdaptiveMuonRule(muon=muon, second_moment=SecondMoment(method), lines=lines)


class NorMuon(AdaptiveMuon):
    """NorMuon (arXiv 2510.05491): `AdaptiveMuon` with "normuon" and the paper's scale, 0.2 sqrt(max(rows, cols)).

    AdamW's lr and weight decay are suitable.
    """

    numbers: ClassVar[Mapping[str, Any]] = {**_NUMBERS, "weight_decay": 0.1}
    options: ClassVar[Mapping[str, Any]] = {"lines": "rows", **_MUON, "scale_mode": "match_rms_adamw"}
    method: ClassVar[str | None] = "normuon"


class NAMO(AdaptiveMuon):
    """NAMO (arXiv 2602.17080): Muon with one adaptive scale per matrix; `AdaptiveMuon` with "namo"."""

    options: ClassVar[Mapping[str, Any]] = _MUON
    method: ClassVar[str | None] = "namo"
