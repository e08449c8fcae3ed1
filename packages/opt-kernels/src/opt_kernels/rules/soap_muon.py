"""SOAP-Muon: momentum, divided by its second moment in Shampoo's eigenbasis, then orthogonalised as Muon does."""

from dataclasses import dataclass

from torch import Tensor

from opt_kernels.matrices.access import PartStates
from opt_kernels.matrices.muon import MOMENTUM, ScaleMode
from opt_kernels.rules.eigenbases import EigenbasisRule, into_basis, out_of_basis, reordered
from opt_kernels.rules.muon import NewtonSchulzRule
from opt_kernels.works import Hyper

_SECOND_MOMENT = "exp_avg_sq"  # in the bases


@dataclass(frozen=True, slots=True, kw_only=True)
class SOAPMuonRule(EigenbasisRule, NewtonSchulzRule):
    """SOAP-Muon (N. Vyas, nikhilvyas.github.io/SOAP_Muon.pdf), as in the records of modded-nanogpt's track 3.

    Of `Hyper`: lr, weight_decay, step, momentum mu, eps. For a gradient G (m, n) of each matrix, with b `shampoo_beta`:

        m <- mu m + (1 - mu) G;   U = (1 - mu) G + mu m                              momentum_buffer
        P = Q_Lᵀ U Q_R;   V <- b V + (1 - b) P²;   P <- P / sqrt(max(V, eps²))        exp_avg_sq
        O = Newton-Schulz(Q_L P Q_Rᵀ);   p <- p - lr wd p - lr s e O
        L <- b L + (1 - b) G Gᵀ, R likewise with Gᵀ G; then Q_L and Q_R, see `EigenbasisRule`

    where s is the factor of `scale_mode` for (m, n), and e `extra_scale_factor`. Without bases, in the first step,
    O = Newton-Schulz(U), as in Muon. Then bases are found by eigh, in later steps by sorting them and one QR.

    The records scale Q_L P Q_Rᵀ to the Schatten-4 norm of U before Newton-Schulz, which divides by the norm: that
    factor cancels and is left out. Their gate for attn.proj, which blends with U, is not part of the rule.

    The largest gradients are those of SOAP with plain factors. Split rows are separate matrices, as for SOAP, with
    their own scales. The host reads the step and the skip flag. Raises ValueError for options out of range; `update_`
    raises MatrixError for parts of a matrix.
    """

    shampoo_beta: float = 0.9  # of V and of the factors
    scale_mode: ScaleMode = ScaleMode.SHAPE_SCALING

    def __post_init__(self) -> None:
        EigenbasisRule.__post_init__(self)
        NewtonSchulzRule.__post_init__(self)

    name = "soap_muon"
    # The momentum, in the shape of the parameter, and its second moment, in the bases.
    moments = (MOMENTUM, _SECOND_MOMENT)

    def direct_(self, states: PartStates, grads: Tensor, hyper: Hyper) -> Tensor:
        """Q_L P Q_Rᵀ; U in the first step."""
        step = int(hyper.step)
        mu = float(hyper.momentum)
        eps = float(hyper.eps)
        factors = self.factors(states, grads, hyper)  # raises before any write
        momentum = states.load(MOMENTUM).lerp_(grads, 1.0 - mu)
        states.store_(MOMENTUM, momentum)
        direction = grads.lerp(momentum, mu)
        if step > 1:
            sides = tuple(factors)
            projected = into_basis(states, direction, sides)
            second = states.load(_SECOND_MOMENT).lerp_(projected.square(), 1.0 - self.shampoo_beta)
            states.store_(_SECOND_MOMENT, second)
            direction = out_of_basis(states, projected / second.clamp_min(eps**2).sqrt(), sides)
        for side, factor in factors.items():
            states.store_(side, factor)
        turned = self.turn_(states, factors, first=step == 1)
        states.store_(_SECOND_MOMENT, reordered(states.load(_SECOND_MOMENT), turned))
        return direction

    def finished(self, directions: Tensor) -> Tensor:
        """s e O of directions (matrices, rows, cols)."""
        rows, cols = directions.shape[-2:]
        return self.orthogonalization(directions).to(directions.dtype) * self.scale(rows=rows, cols=cols)
