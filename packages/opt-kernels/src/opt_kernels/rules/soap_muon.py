"""SOAP-Muon: SOAP's direction, orthogonalised as Muon does."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from opt_kernels.matrices.newton_schulz.coefficients import Coefficients, CoefficientType, schedule
from opt_kernels.matrices.newton_schulz.reference import EPS
from opt_kernels.matrices.orthogonalization import MatmulPrecision, Orthogonalization, ScaleMode, scale_factor
from opt_kernels.rules.soap import SOAPRule
from opt_kernels.rules.whole_matrices import WholeMatrices
from opt_kernels.works import NOT_SPLIT, MatrixSpec, StateSpec, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class SOAPMuonRule(WholeMatrices):
    """SOAP (arXiv 2409.11321) whose direction is orthogonalised by Muon's Newton-Schulz iteration.

    The name comes without a paper, so this equation is our interpretation. Let Q_L A Q_Rᵀ be the direction of `SOAP`,
    where A is Adam's bias-corrected update of the gradient in Shampoo's eigenbasis. For each matrix (m, n):

        O <- Newton-Schulz(Q_L A Q_Rᵀ)
        p <- p - lr wd p - lr s e O

    where s is the factor of `scale_mode` for (m, n), and e `extra_scale_factor`. States, factors, bases, the order of a
    step and the numbers read from `Hyper` are those of SOAP.

    Split rows are separate matrices, as for SOAP, with their own scales. The host reads the step and the skip flag.
    Raises ValueError for options out of range; `update_` raises MatrixError for parts of a matrix.
    """

    soap: SOAPRule = field(default_factory=SOAPRule)
    scale_mode: ScaleMode = ScaleMode.SPECTRAL
    extra_scale_factor: float = 1.0
    coefficient_type: CoefficientType = CoefficientType.QUINTIC
    custom_coefficients: tuple[Coefficients, ...] = ()  # with CoefficientType.CUSTOM, repeated in a cycle
    num_ns_steps: int = 5
    fp32_matmul_prec: MatmulPrecision = MatmulPrecision.MEDIUM  # of Newton-Schulz; SOAP's products are float32
    use_syrk: bool = True

    def __post_init__(self) -> None:
        schedule(self.coefficient_type, num_steps=self.num_ns_steps, custom=self.custom_coefficients)

    @property
    def name(self) -> str:
        return "soap_muon"

    @property
    def backend(self) -> str | None:
        """As in `SOAPRule`."""
        return self.soap.backend

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return self.soap.state_specs

    @property
    def orthogonalization(self) -> Orthogonalization:
        return Orthogonalization(
            schedule=schedule(self.coefficient_type, num_steps=self.num_ns_steps, custom=self.custom_coefficients),
            eps=EPS,
            precision=self.fp32_matmul_prec,
            use_syrk=self.use_syrk,
            rescale_rows=self.coefficient_type is CoefficientType.AOL,
            backend=self.backend,
        )

    def init_state(self, main: Tensor, matrix: MatrixSpec = NOT_SPLIT) -> dict[str, Tensor]:
        """As in `SOAPRule`."""
        return self.soap.init_state(main, matrix)

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Tensor | None) -> Tensor:
        """s e O of gradients; zeros in a first step that only computes the bases. Updates moments and bases."""
        return self.soap.transform_parts_(tasks, inputs, skip, self._orthogonal)

    def _orthogonal(self, directions: Tensor) -> Tensor:
        """s e O of directions (matrices, rows, cols)."""
        rows, cols = directions.shape[-2:]
        scale = scale_factor(self.scale_mode, rows=rows, cols=cols) * self.extra_scale_factor
        return self.orthogonalization(directions).to(directions.dtype) * scale

    def apply_(self, task: Task, update: Tensor, skip: Tensor | None) -> None:
        """As in `SOAPRule`."""
        self.soap.apply_(task, update, skip)
