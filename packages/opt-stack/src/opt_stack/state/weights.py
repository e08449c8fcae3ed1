"""Weights of the model other than those of the last step: written by other code, or shown for evaluation.

Main values in fp32 or fp16 are copies: the next update would overwrite weights from elsewhere by the old ones. Whether
weights agree with main values, and with the copies on other ranks, is only checked after a load, or after another write
that torch counted (`_version`). Other steps only compare counts, and whether the model still has the parameters.
Every rank refuses a step if weights would be lost on one, and the later steps as well, until `reload_model_params` or a
load of state. In the order of a step:

    `SharedCopies.check_first_step`   the copies of ranks, after a load before the first step      ReplicaError
    `WrittenReplicas.at_start`        the same after a later write, in the next step, on devices   ReplicaError
    `OptimizerStateGuard`             main values with parameters, of the pieces of this rank      UnusableGradientError
    `WrittenReplicas`                 the copies of ranks after a later write, on a CPU            ReplicaError

After a load of the optimizer's own state, main values and parameters agree: it has written both
(`opt_distributed.saving`).

Rules such as schedule_free keep weights of their own in their state, which cannot be compared with the parameters, and
so do averages of weights. After a write without a load of state, a step warns about these.
"""

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from operator import attrgetter, is_
from typing import Any
from weakref import ref

import torch
from torch import Tensor, nn

from opt_distributed.buffers import DistributedDataParallel, UnusableGradientError
from opt_distributed.comm import Comm, Roles, agree
from opt_distributed.finalize import unfinalized
from opt_distributed.pieces import OwnedPiece, QuantizedMain, local
from opt_distributed.saving import decoded, kept_states
from opt_distributed.step import NOTHING_WRITTEN, Refusal, Unit, Written
from opt_kernels.formulas import Formula, RisingRates
from opt_kernels.params import Writes, has_foreign_write, read_hyper
from opt_kernels.precision import without_autocast
from opt_paramgroups import ParamId, is_dtensor
from opt_stack.rules.entries import ParamGroups, evaluation_of
from opt_stack.wording import and_more

_REQUIRES_GRAD = attrgetter("requires_grad")


def refuse_on_all(everyone: Comm, error: UnusableGradientError | None) -> None:
    """Raise UnusableGradientError on every rank if one has an `error`. Collective."""
    try:
        agree(everyone, error)
    except ValueError as of_another:
        raise UnusableGradientError(str(of_another)) from None


class LoadedWeights:
    """Finds weights that the next update would lose, after any write, not only loads: other values than the main
    values, or replaced parameters."""

    def __init__(
        self,
        pieces: Sequence[OwnedPiece],
        groups: ParamGroups,
        chunks: Iterable[nn.Module],
        *,
        averaged: Sequence[OwnedPiece],  # those of which other weights are kept in the state
        copied: Collection[ParamId],  # parameters of which other ranks hold copies
    ):
        """Notes from now on every load of the modules of `chunks`, and the parameters that they have."""
        self._copied = [piece for piece in pieces if piece.main.is_copy]
        self._averaged = averaged
        self._ids: dict[nn.Parameter, ParamId] = {  # of all parameters of the optimizer
            param: id for group in groups for param, id in zip(group["params"], group["param_ids"], strict=True)
        }
        has_copies = {piece.param for piece in (*self._copied, *averaged)}
        self._compared = {param: id for param, id in self._ids.items() if param in has_copies or id in copied}
        self._watch_writes()
        self._needs_check = False  # whether others wrote weights since the last check that found them equal
        self._has_state = False  # whether state was loaded since the last check
        self._written = NOTHING_WRITTEN  # by others since the last step that was made
        self._modules = []  # and those of their parameters
        for module in dict.fromkeys(below for chunk in chunks for below in chunk.modules()):
            params = {name: param for name, param in module._parameters.items() if param in self._ids}
            if params:
                module.register_load_state_dict_post_hook(_Note(self, params))  # type: ignore[no-untyped-call]
                self._modules.append((ref(module), params))
        self._registered = self._present()  # all parameters of these modules, in order

    def _watch_writes(self) -> None:
        """Count the writes to the present tensors of the parameters from now on."""
        # Of the tensors of parameters that are compared after a write.
        self._id_of = {tensor: id for param, id in self._compared.items() for tensor in _counted(param)}
        others = [param for param in self._ids if param not in self._compared]
        self._writes = Writes(list(self._id_of))
        self._uncompared = Writes([tensor for param in others for tensor in _counted(param)])

    def note_moved(self, ids: Collection[ParamId]) -> None:
        """Note that other code moved these parameters, and so may have written them."""
        self._find_writes()
        self._needs_check = True
        self._note_written(set(ids).intersection(self._compared.values()))
        self._watch_writes()

    def note_module_load(self, params: Mapping[str, nn.Parameter]) -> None:
        """Note that a module was loaded; `params` are those that it had when the optimizer was built."""
        self._needs_check = True
        self._note_written({self._ids[param] for param in params.values()})

    def _note_written(self, ids: Collection[ParamId]) -> None:
        self._written = self._written._replace(ids=self._written.ids.union(ids))

    def _present(self) -> list[object]:
        """Return all parameters that the watched modules have now; does not wait for gathers."""
        modules = [module for found, _ in self._modules if (module := found()) is not None]
        return [param for module in modules for param in dict.values(module._parameters)]

    def note_state_load(self) -> None:
        """Note that the optimizer's state was set together with the weights."""
        self._has_state = True
        self._written = self._written._replace(has_state=True)

    def note_step(self) -> None:
        """Note the end of a step, which counts as a write even if it was skipped. Later writes are those of others.

        Kernels write memory that autograd does not watch, so the writes are counted here: a backward pass through a
        graph of before the step then raises, as with torch's optimizers, and other optimizers notice them.
        """
        self._writes.count_step()
        self._uncompared.count_step()
        self._has_state = False
        self._written = NOTHING_WRITTEN

    def written(self) -> Written:
        """Return what other code wrote since the last step that was made."""
        self._find_writes()
        return self._written

    def has_loaded(self) -> bool:
        """Return whether weights or state were loaded or written since the build; call it before the first step."""
        return any(self.written()) or self._uncompared.has_foreign()

    def accept_equal(self) -> None:
        """Note that what was written is equal on all ranks. It is still compared with the main values."""
        self._find_writes()
        self._writes.set_baseline()
        self._written = NOTHING_WRITTEN

    def _find_writes(self) -> None:
        """Note the parameters that others wrote since the writes were last accepted."""
        if self._writes.has_foreign():
            self._needs_check = True
            self._note_written({self._id_of[tensor] for tensor in self._writes.foreign()})

    @contextmanager
    def writing_without_step(self) -> Iterator[None]:
        """Count writes of the parameters inside the context as the optimizer's, although it makes no step."""
        self._find_writes()
        yield
        self._writes.set_baseline()

    def replaced(self) -> UnusableGradientError | None:
        """Return the error for a parameter that the model no longer has; None if it has all."""
        present = self._present()
        if len(present) == len(self._registered) and all(map(is_, present, self._registered)):
            return None
        for found, params in self._modules:
            module = found()
            if module is None:
                continue
            missing = [param for name, param in params.items() if dict.get(module._parameters, name) is not param]
            # Pruning and some parametrizations register it under another name or below.
            kept = set(map(id, module.parameters())) if missing else set()
            for param in missing:
                if id(param) not in kept:
                    return UnusableGradientError(
                        f"{str(self._ids[param])!r} was replaced in the model after the optimizer was built, as by "
                        "fully_shard, an assignment, load_state_dict(assign=True) or a parametrization, so that the "
                        "optimizer would update a parameter that the model no longer has; build the optimizer after "
                        "that"
                    )
        return None

    def stale_pieces(self) -> Iterator[OwnedPiece]:
        """Yield those whose main values are not those of their parameter, which other code wrote.

        A parameter that `model.float()` made as wide as its main value has that value rounded, and was not written.
        """
        self._find_writes()
        for piece in self._copied if self._needs_check else ():
            if local(piece.param).dtype.itemsize < torch.float32.itemsize and has_foreign_write(piece.main):
                yield piece

    def stale(self) -> UnusableGradientError | None:
        """Return the error for the first of `stale_pieces`; None if there is none."""
        other = next(self.stale_pieces(), None)
        if other is None:
            return None
        return UnusableGradientError(
            f"weights were loaded into the model: {str(other.id)!r} has other values than its main values, which the "
            "next update, eval() or a resume would restore; call optimizer.reload_model_params() after a load or "
            "another write to the parameters, or load the optimizer's state of the same checkpoint; do not update a "
            "parameter by two optimizers"
        )

    def problem(self) -> UnusableGradientError | None:
        """Return the reason why an update, or `eval()`, would lose loaded weights; None if it would not."""
        if (replaced := self.replaced()) is not None:
            return replaced
        self._find_writes()
        if not self._needs_check:
            return None
        if (stale := self.stale()) is not None:
            return stale
        averaged = next((str(piece.id) for piece in self._averaged if piece.step), None)
        if averaged is not None and not self._has_state:
            warnings.warn(
                f"weights were loaded into the model, but the rule of {averaged!r}, or an average, keeps weights of "
                "its own in its state, towards which it moves the parameter, or which eval() shows; if values have "
                "changed, call optimizer.reload_model_params() after the load, or load the optimizer's state of the "
                "same checkpoint",
                stacklevel=3,
            )
        self._writes.set_baseline()
        self._needs_check = self._has_state = False
        return None

    def frozen(self) -> UnusableGradientError | None:
        """Return the error for parameters that were frozen after the model was wrapped; None if there are none."""
        if all(map(_REQUIRES_GRAD, self._ids)):
            return None
        frozen = [id for param, id in self._ids.items() if not param.requires_grad]
        return UnusableGradientError(
            f"{and_more(frozen)} was frozen after the model was wrapped, where a parameter "
            "without a gradient has zeros, so that momentum and weight decay would still change it; freeze "
            "parameters before DistributedDataParallel, and load the optimizer's state from a sharded_state_dict"
        )


class OptimizerStateGuard(Refusal):
    """A guard: parameters of a wrapped model were frozen, gradients are not finalized, or loaded weights would be lost.

    Keeps neither `loaded` nor the wrapped chunks alive.
    """

    def __init__(self, loaded: LoadedWeights, wrapped: Iterable[DistributedDataParallel], roles: Roles):
        self._loaded = ref(loaded)
        self._wrapped = [ref(chunk) for chunk in wrapped]
        self._roles = roles

    def find(self, groups: ParamGroups) -> UnusableGradientError | None:
        loaded = self._loaded()
        if loaded is None:
            return None
        wrapped = [chunk for found in self._wrapped if (chunk := found()) is not None]
        frozen = loaded.frozen() if wrapped else None
        return frozen or unfinalized(wrapped, self._roles) or loaded.problem()


class _Note:
    """A hook after the load of one module. Copies and pickles of it do nothing: a copied model is not trained."""

    def __init__(self, loaded: LoadedWeights | None = None, params: Mapping[str, nn.Parameter] | None = None):
        self._loaded = None if loaded is None else ref(loaded)
        self._params = params or {}

    def __call__(self, module: nn.Module, incompatible_keys: Any) -> None:
        if self._loaded is not None and (loaded := self._loaded()) is not None:
            loaded.note_module_load(self._params)

    def __reduce__(self) -> Any:
        return _Note, ()


@torch.no_grad()
def _counted(param: Tensor) -> list[Tensor]:
    """Return the tensors whose versions count writes to a parameter: itself, and the local part of a DTensor."""
    tensors = [param, param.to_local()] if is_dtensor(param) else [param]
    # Nothing counts the writes of a tensor that was made in torch.inference_mode().
    return [tensor for tensor in tensors if not tensor.is_inference()]


class Evaluation:
    """Switches parameters between training and evaluation weights; for most rules the two are the same, unless averages
    are kept."""

    def __init__(self, units: Sequence[Unit]) -> None:
        self._units = units
        self._shows_averages = any(unit.averages.specs for unit in units)
        self.formulas = {}  # of the units that evaluate other weights than they train, by their names
        for unit in units:
            if (formula := evaluation_of(unit.rule)) is not None:
                self.formulas[unit.name] = formula
        self.has_other_weights = bool(self.formulas or self._shows_averages)  # `build_stepper` asks all ranks
        self._trained: dict[Tensor, Tensor] | None = None  # copies of the trained weights, in evaluation mode
        self._shown = Writes([])  # to the weights for evaluation
        self._rates = RisingRates() if self.formulas else None

    def note_rates(self, groups: ParamGroups) -> None:
        """Warn if the learning rate of a schedule-free rule has risen, see `RisingRates`."""
        if self._rates is not None:
            numbered = enumerate(groups)  # that of a rank without parameters has no rule
            self._rates.note((number, group) for number, group in numbered if group.get("optimizer") == "schedule_free")

    def check_training(self, what: str) -> None:
        """Raise RuntimeError in evaluation mode; `what` names the call for the message."""
        if self.is_evaluating:
            raise RuntimeError(
                f"{what} in evaluation mode: the parameters hold averaged weights; call optimizer.train() first, and "
                "optimizer.eval() for evaluation"
            )

    @property
    def is_evaluating(self) -> bool:
        """Whether the parameters hold the evaluation weights."""
        return self._trained is not None

    def keeps_weights_of(self, unit: Unit) -> bool:
        """Return whether the state of `unit` has weights other than the main values: its rule's, or averages."""
        return bool(unit.averages.specs) or unit.name in self.formulas

    @contextmanager
    def with_trained_weights(self, only: Collection[Tensor] | None = None) -> Iterator[None]:
        """Show the trained weights in this rank's parameters, or `only` in some, inside the context; no
        communication."""
        trained = self._trained or {}
        if only is not None:
            trained = {param: trained[param] for param in only if param in trained}
        has_foreign = self._shown.has_foreign()
        shown = _copies(trained)
        try:
            _write_(trained)
            yield
        finally:
            _write_(shown)
            if not has_foreign:
                self._shown.set_baseline()

    @torch.no_grad()
    @without_autocast()
    def begin_(self, groups: ParamGroups, complete: Callable[[], None], *, was_loaded: bool = False) -> None:
        """Write the evaluation weights to the parameters of all ranks. Collective.

        `complete` waits for gathers of parameters. With `was_loaded`, a load has set only the main values of each
        rank's own pieces.
        """
        if self.is_evaluating or not self.has_other_weights:
            return
        for unit in self._units:
            for source in unit.completes if was_loaded and self.keeps_weights_of(unit) else ():
                source.publish_()
        optimizers = {name.partition("/")[0] for name in self.formulas}
        shown = [group for group in groups if self._shows_averages or group.get("optimizer") in optimizers]
        moved = [param for group in shown for param in group["params"]]
        self._trained = _copies(moved)
        for unit in self._units:
            for piece in unit.pieces if self.keeps_weights_of(unit) else ():
                assert not isinstance(piece.main, QuantizedMain)
                if unit.averages.specs:
                    piece.main.target.copy_(unit.averages.shown(piece))
                elif piece.step:
                    piece.main.target.copy_(_evaluated(self.formulas[unit.name], unit, piece, groups))
            for source in unit.completes:
                source.publish_()
        complete()
        self._shown = Writes([tensor for param in moved for tensor in _counted(param)])

    def end_(self) -> None:
        """Restore the trained weights in the parameters, bit for bit; no communication. Warn of a load since then."""
        if self._shown.has_foreign():
            warnings.warn(
                "weights were loaded into the model in evaluation mode; train() replaces them by the trained weights: "
                "call train() before the load",
                stacklevel=3,
            )
        _write_(self._trained or {})
        self._trained = None
        self._shown = Writes([])


@torch.no_grad()
@without_autocast()
def _write_(weights: Mapping[Tensor, Tensor]) -> None:
    """Copy values to the local part of each parameter."""
    for param, values in weights.items():
        local(param).copy_(values)


def _copies(params: Iterable[Tensor]) -> dict[Tensor, Tensor]:
    """Return a copy of the local part of each parameter."""
    return {param: local(param).detach().clone() for param in params}


def _evaluated(formula: Formula, unit: Unit, piece: OwnedPiece, groups: ParamGroups) -> Tensor:
    def evaluate(groups: ParamGroups, value: Tensor) -> Tensor:
        hyper = read_hyper(groups[piece.group], step=piece.step, own=formula.own_numbers)
        states = {spec.name: decoded(unit, piece, spec).float() for spec in kept_states(unit, piece)}
        return formula.evaluated(value.float(), states, hyper)

    value = piece.main.value()
    if unit.host is None:
        return evaluate(groups, value)
    here = unit.host.device.to_host(value)
    with unit.host.device.on_host():
        return evaluate(unit.host.numbers_of(groups), here)
