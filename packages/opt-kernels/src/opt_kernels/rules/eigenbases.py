"""Base class of SOAP and SOAP-Muon: rules that transform gradients in Shampoo's eigenbases."""

from abc import abstractmethod
from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from opt_kernels.backends.elements import skipped
from opt_kernels.matrices.parts import PartStates, parts_of, states_by_part
from opt_kernels.matrices.shampoo import Shampoo
from opt_kernels.matrices.stacks import MatrixError, check_shape, join, matrix_dim, split
from opt_kernels.precision import MatmulPrecision, fp32_products
from opt_kernels.rules.whole_matrices import WholeMatrices
from opt_kernels.works import NOT_SPLIT, Hyper, MatrixSpec, StateSpec, Task, Work


class EigenbasisRule(WholeMatrices):
    """A rule that transforms gradients in the eigenbases of a Shampoo preconditioner.

    A final class has `name`, `moments` (the names of its states in the parameter's shape), `shampoo` and `direct_`.
    Rows that `MatrixSpec.split_rows` splits into separate matrices have states of their own.
    """

    __slots__ = ()

    @property
    @abstractmethod
    def moments(self) -> tuple[str, ...]: ...

    @property
    @abstractmethod
    def shampoo(self) -> Shampoo: ...

    @abstractmethod
    def direct_(self, states: PartStates, grads: Tensor, hyper: Hyper) -> Tensor:
        """The directions of gradients (batch, m, n) of one part. Updates moments, factors and bases."""

    def finished(self, directions: Tensor) -> Tensor:
        """The updates for directions (batch, m, n) of one part."""
        return directions

    @property
    def state_specs(self) -> tuple[StateSpec, ...]:
        return tuple(StateSpec(name=name, whole=True) for name in self.moments) + self.shampoo.state_specs

    def init_state(self, main: Tensor, matrix: MatrixSpec = NOT_SPLIT) -> dict[str, Tensor]:
        """Zero moments and factors, first bases and eigenvalues, for each part of a split parameter.

        Raises MatrixError for a parameter that is not a matrix.
        """
        check_shape(main.shape)
        moments = {name: torch.zeros_like(main, dtype=torch.float32) for name in self.moments}
        return moments | self.shampoo.init_state(main, matrix)

    def transform_(self, tasks: Sequence[Task], inputs: Tensor, skip: Tensor | None) -> Tensor:
        """The updates for gradients. Writes the states; none if `skip`, where the updates are zeros."""
        hyper, work = tasks[0]
        self._check_whole(work)
        if skipped(skip):
            return torch.zeros_like(inputs)
        shapes: list[Mapping[str, tuple[int, ...]]] = [
            self.shampoo.shapes(part.shape) for part in parts_of(work.matrix, inputs.shape)
        ]
        states = states_by_part(tasks, elements=self.moments, shapes=shapes, dtype=inputs.dtype)
        # In TF32 the bases would lose four digits of orthogonality, and every later step uses them.
        with fp32_products(MatmulPrecision.HIGHEST):
            grads = split(inputs, work.matrix)
            directions = [self.direct_(of_part, grad, hyper) for of_part, grad in zip(states, grads, strict=True)]
        return join(list(map(self.finished, directions)), work.matrix, inputs.shape)

    def _check_whole(self, work: Work) -> None:
        group = work.matrix.tensor_parallel
        if matrix_dim(work) is not None and group is not None and group.size > 1:
            raise MatrixError(
                f"{self.name} needs whole matrices, but dim {work.matrix.partition_dim} of this one is cut over "
                f"{group.size} tensor-parallel ranks; gather it before the rule, or use Muon with tp_mode 'distributed'"
            )
