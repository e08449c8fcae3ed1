"""The base class of rules that transform gradients of whole matrices."""

from collections.abc import Sequence
from typing import ClassVar

import torch
from torch import Tensor

from opt_kernels.backends.elements import skipped
from opt_kernels.codecs import StateCodec
from opt_kernels.formulas.formula import OF_HYPER
from opt_kernels.formulas.numbers import Number
from opt_kernels.matrices.muon import decay_of
from opt_kernels.matrices.stacks import check, check_shape, read_main, scaled_grads, stacks, write_main_
from opt_kernels.rules.base import MatrixRule, Needs, check_states
from opt_kernels.works import Batch, Task


class WholeMatrices(MatrixRule):
    """A rule that transforms gradients of whole matrices directly. The host reads the step and the skip flag.

    A final class has `name`, `state_specs` and `transform_`, and `init_state` if a state does not begin at zero.
    `numbers` are those of `Hyper` that it reads besides lr and weight_decay, with their defaults.
    """

    __slots__ = ()
    numbers: ClassVar[tuple[Number, ...]] = ()

    @property
    def hyper_names(self) -> tuple[str, ...]:
        """The numbers that it reads from `Hyper.own`."""
        return tuple(number.name for number in self.numbers if number.name not in OF_HYPER)

    @property
    def needs(self) -> Needs:
        return Needs.MATRICES

    @property
    def codecs(self) -> dict[str, StateCodec]:
        """Empty: states are stored without encoding."""
        return {}

    @property
    def tp_mode(self) -> None:
        """None: the rule needs whole matrices."""
        return None

    def init_state(self, main: Tensor) -> dict[str, Tensor]:
        """Zeros, in the shapes that `state_specs` declare. Raises MatrixError for a parameter that is not a matrix."""
        check_shape(main.shape)
        return {
            spec.name: torch.zeros(spec.shape_for(main.shape) or (), dtype=spec.dtype, device=main.device)
            for spec in self.state_specs
        }

    def update_(
        self, batches: Sequence[Batch], *, grad_scale: float | Tensor = 1.0, skip: Tensor | None = None
    ) -> None:
        if skipped(skip):
            return
        for batch in batches:
            for work in batch.works:
                check(work)
                wide = work.main is not None and work.main.dtype is torch.float64
                check_states(self, work.state, work.grad.shape, work.matrix, wide=wide)
            for tasks in stacks([batch]):
                inputs = scaled_grads(tasks, grad_scale)
                for grad, task in zip(inputs, tasks):
                    self.prepare_(task, grad, None)
                for update, task in zip(self.transform_(tasks, inputs, None), tasks):
                    self.apply_(task, update, None)

    def apply_(self, task: Task, update: Tensor, skip: Tensor | None) -> None:
        """p <- p - lr wd p - lr update."""
        hyper, work = task
        if not skipped(skip):
            main = read_main(work)
            write_main_(work, main - hyper.lr * (decay_of(main, hyper.weight_decay) + update), None)

    def prepare_(self, task: Task, grad: Tensor, skip: Tensor | None) -> None:
        """Do nothing: `transform_` takes gradients directly."""
