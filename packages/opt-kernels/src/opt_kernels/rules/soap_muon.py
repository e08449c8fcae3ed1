"""SOAP-Muon: SOAP's direction, orthogonalised as Muon does."""

from collections.abc import Sequence
from dataclasses import dataclass, field

from torch import Tensor

from opt_kernels.backends.elements import skipped
from opt_kernels.codecs import StateCodec
from opt_kernels.matrices.newton_schulz.coefficients import Coefficients, CoefficientType, schedule
from opt_kernels.matrices.newton_schulz.reference import EPS
from opt_kernels.matrices.orthogonalization import MatmulPrecision, Orthogonalization, ScaleMode, scale_factor
from opt_kernels.rules.base import Needs, update_in_phases_
from opt_kernels.rules.soap import SOAP
from opt_kernels.works import Batch, StateSpec, Task


@dataclass(frozen=True, slots=True, kw_only=True)
class SOAPMuon:
    """SOAP (arXiv 2409.11321) whose direction is orthogonalised by Muon's Newton-Schulz iteration.

    No paper was at hand: this is our reading of the name. With Q_L A Q_Rᵀ the direction of `SOAP`, where A is Adam's
    bias-corrected update of the gradient in Shampoo's eigenbasis, for each matrix (m, n):

        O <- Newton-Schulz(Q_L A Q_Rᵀ)
        p <- p - lr wd p - lr s e O

    where s is `scale_mode`'s factor for (m, n), and e `extra_scale_factor`. States, factors, bases and the order of a
    step are SOAP's, whose first step in the paper's order only finds the bases. Of `Hyper`: SOAP's.

    The host reads the step and the skip flag, as for SOAP. Fused rows are not split. Raises ValueError for options out
    of range; `update_` raises MatrixError for parts of a matrix.
    """

    soap: SOAP = field(default_factory=SOAP)
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
    def needs(self) -> Needs:
        return Needs.MATRICES

    @property
    def backend(self) -> str | None:
        """SOAP's."""
        return self.soap.backend

    @property
    def splits_rows(self) -> bool:
        """Heads and other rows are not matrices of their own."""
        return False

    @property
    def codecs(self) -> dict[str, StateCodec]:
        """All state is stored as it is."""
        return self.soap.codecs

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

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        """SOAP's."""
        return self.soap.init_state(main)

    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        if skipped(skip):
            return
        for batch in batches:
            update_in_phases_(self, [batch], grad_scale=grad_scale, skip=None)

    @property
    def tp_mode(self) -> None:
        """It needs whole matrices."""
        return None

    def prepare_(self, task: Task, grad: Tensor, skip: Tensor | None) -> None:
        """Nothing: gradients are transformed as they are."""

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Tensor | None) -> Tensor:
        """s e O of gradients; zeros at a first step that only finds the bases. Updates moments and bases."""
        directions = self.soap.transform_(tasks, inputs, skip)
        if skipped(skip) or self.soap.only_finds_bases(tasks[0].hyper):
            return directions
        rows, cols = directions.shape[-2:]
        orthogonal = self.orthogonalization(directions.reshape(-1, rows, cols)).view(directions.shape)
        scale = scale_factor(self.scale_mode, rows=rows, cols=cols) * self.extra_scale_factor
        return orthogonal.to(directions.dtype) * scale

    def apply_(self, task: Task, update: Tensor, skip: Tensor | None) -> None:
        """SOAP's."""
        self.soap.apply_(task, update, skip)
