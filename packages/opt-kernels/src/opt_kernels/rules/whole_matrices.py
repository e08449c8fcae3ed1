"""`WholeMatrices`, the base class of rules that transform gradients of whole matrices; the phases of a matrix rule."""

from collections.abc import Sequence
from dataclasses import replace
from typing import ClassVar

import torch
from torch import Tensor

from opt_kernels.backends.elements import read_main, skipped
from opt_kernels.codecs import Codecs
from opt_kernels.matrices.access import MatrixError, check, check_shape, cut_of, scaled_grads, stacks, write_main_
from opt_kernels.matrices.muon import decay_of
from opt_kernels.rules.base import WEIGHTS, MatrixRule, Needs, check_states, reads_weights
from opt_kernels.works import HYPER_FIELDS, Batch, Number, Scalar, Skip, States, Task, Work


def in_phases_(batches: Sequence[Batch], rule: MatrixRule, *, grad_scale: Scalar = 1.0, skip: Skip = None) -> None:
    """Update all works by the three phases of `rule`: one matrix at a time in the first and the last, so that it stays
    in the cache, and stacks of one layout in the second."""
    for tasks in stacks(batches):
        if reads_weights(rule):
            for index, (hyper, work) in enumerate(tasks):
                tasks[index] = Task(hyper, replace(work, state={**work.state, WEIGHTS: read_main(work)}))
        inputs = scaled_grads(tasks, grad_scale)
        for grad, task in zip(inputs, tasks):
            rule.prepare_(task, grad, skip)
        for update, task in zip(rule.transform_(tasks, inputs, skip), tasks):
            rule.apply_(task, update, skip)


class WholeMatrices(MatrixRule):
    """A rule that transforms gradients of whole matrices directly. The host reads the step and the skip flag, unless
    it is `capturable`.

    A final class has `name`, `state_specs` and `transform_`, and `init_state` if a state does not begin at zero.
    `numbers` are those of `Hyper` that it reads besides lr and weight_decay, with their defaults.
    """

    __slots__ = ()
    numbers: ClassVar[tuple[Number, ...]] = ()
    capturable: ClassVar[bool] = False
    needs = Needs.MATRICES
    tp_mode = None  # it needs whole matrices

    @property
    def hyper_names(self) -> tuple[str, ...]:
        """The numbers that it reads from `Hyper.own`."""
        return tuple(number.name for number in self.numbers if number.name not in HYPER_FIELDS)

    @property
    def codecs(self) -> Codecs:
        """Return no codecs: states are stored unencoded."""
        return {}

    def init_state(self, main: Tensor) -> States:
        """Return zeros in the shapes of `state_specs`. Raises MatrixError for a parameter that is not a matrix."""
        check_shape(main.shape)
        states = {}
        for spec in self.state_specs:
            shape = spec.shape_for(main.shape) or ()
            states[spec.name] = torch.zeros(shape, dtype=spec.dtype, device=main.device)
        return states

    def update_(self, batches: Sequence[Batch], *, grad_scale: Scalar = 1.0, skip: Skip = None) -> None:
        if not self.capturable:
            if skipped(skip):
                return
            skip = None
        for hyper, works in batches:
            for work in works:
                check(work)
                wide = work.main is not None and work.main.dtype is torch.float64
                check_states(self, work.state, work.grad.shape, work.matrix, wide=wide)
            in_phases_([Batch(hyper, works)], self, grad_scale=grad_scale, skip=skip)

    def apply_(self, task: Task, update: Tensor, skip: Skip) -> None:
        """Update in place: p <- p - lr wd p - lr update."""
        hyper, work = task
        if not skipped(skip):
            main = read_main(work)
            write_main_(work, main - hyper.lr * (decay_of(main, hyper.weight_decay) + update), None)

    def prepare_(self, task: Task, grad: Tensor, skip: Skip) -> None:
        """Do nothing: `transform_` takes gradients directly."""

    def check_whole(self, work: Work) -> None:
        """Raise MatrixError for a matrix that is cut over tensor-parallel ranks."""
        cut = cut_of(work)
        size = 1 if cut is None else cut.ranks.size
        if size > 1:
            raise MatrixError(
                f"{self.name} needs whole matrices, but dim {work.matrix.partition_dim} of this one is cut over "
                f"{size} tensor-parallel ranks; gather it before the rule, or use Muon with tp_mode 'distributed'"
            )
