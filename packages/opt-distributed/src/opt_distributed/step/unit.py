"""`Unit`: one rule, and the pieces of parameters on this rank that it updates.

A *run* is the pieces that are updated with the same hyper-parameters, the same number of updates before, and gradients
of one scale: one `Batch` for the rule.
"""

from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import closing, contextmanager, nullcontext
from dataclasses import dataclass, replace
from itertools import chain, groupby
from operator import attrgetter

import torch
from torch import Tensor

from opt_distributed.buffers.gathered import GatheredParams
from opt_distributed.buffers.main_grad import SparseGradientError
from opt_distributed.buffers.stored import ParamTensors
from opt_distributed.pieces.averages import NO_AVERAGES, WeightAverages
from opt_distributed.pieces.exchange import ComputeStage, updating_
from opt_distributed.pieces.offload import HostSide, mains_on_host
from opt_distributed.pieces.piece import OwnedPiece, Ready, Update, kinds_of
from opt_distributed.pieces.quantized import QuantizedMain
from opt_distributed.pieces.sources import Publisher, ReadGrads, check_unfused, is_sparse
from opt_distributed.pieces.streamed import Streamed, kept_tensors, runs_of_ready
from opt_distributed.step.hooked import CutParams, CutRows, HookedStep, means_of_pieces, means_to_host
from opt_distributed.step.verdict import times
from opt_kernels.dtensor import first_number
from opt_kernels.hooks import NUM_SUMS, HookedUpdate
from opt_kernels.params import CodedMain, Count, read_hyper
from opt_kernels.rules import Needs, Rule
from opt_kernels.works import Batch, Works

DECODED_NUMEL = 1 << 25
"""Elements of coded mains (128 MiB decoded) after which the piece that exceeds them ends a call of the rule."""
_COUNT = attrgetter("count")
_LAYOUT = attrgetter("layout")
_SOURCE = attrgetter("source")


@dataclass(kw_only=True)
class Unit:
    """One rule, and the pieces on this rank that it updates. A rank that owns nothing has no pieces."""

    name: str
    rule: Rule
    pieces: Sequence[OwnedPiece]
    # Sources to which no later unit of the step writes, on any rank. The first may send buckets during the update.
    completes: Sequence[Publisher] = ()
    stages: Sequence[ComputeStage] = ()  # of pieces that are parts of matrices; in the same order on all ranks
    cut: Sequence[CutParams] = ()  # parameters of which other ranks own parts, if hooks read norms
    cut_rows: Sequence[CutRows] = ()  # parameters whose rows span ranks, if hooks read rows of gradients
    averages: WeightAverages = NO_AVERAGES  # of its weights
    host: HostSide | None = None  # if state is in host memory: copies gradients there, and parameters back

    def __post_init__(self) -> None:
        # The first: collectives have one order on all ranks, whatever they own. A look-ahead is written later.
        first = next(iter(self.completes), None)
        can_send = self.host is None and not self.averages.looks_ahead and any(piece.bucket for piece in self.pieces)
        self._sender = first if can_send and isinstance(first, GatheredParams) else None  # bucket by bucket
        self._kinds = kinds_of(self.pieces)
        self._runs: list[PieceRun] = []  # of all pieces
        self._counts: list[Count] = []  # of all pieces, when `_runs` were made
        self._decays: list[float] = []  # of the averages in the next step, by a schedule
        self._has_restarted = False  # whether an average has begun anew since the step was prepared
        self._readers: list[ReadGrads] = []  # of all pieces, in order
        for source, pieces in groupby(self.pieces, key=_SOURCE):
            self._readers.append(source.reader([(piece.id, piece.of_param) for piece in pieces]))

    # --- a step, part by part ---------------------------------------------------------------------------------------

    def ready(self, refuse: Callable[[Exception], None]) -> Ready:
        """Read the gradients: the pieces that have one. Zeros in place of a gradient that no rank has are included.

        Pieces with sparse gradients are left out, after a call of `refuse`. Averages that no step has written take the
        present weights before, also if the step is then skipped.

        Raises:
            UnusableGradientError: a gradient is in ``main_grad`` of a plain parameter.
            ConfigError: a schedule of averages gives a decay that is not allowed.
        """
        if self.averages.specs:
            self.averages.follow_(self.pieces)
            self._has_restarted = False
            self._decays = self.averages.scheduled(self.pieces)
        found = list(chain.from_iterable(read() for read in self._readers))
        grads = [grad for grad in found if grad is not None]
        if not set(map(_LAYOUT, grads)) <= {torch.strided}:
            for at, grad in enumerate(found):
                if is_sparse(grad):
                    refuse(SparseGradientError(self.pieces[at].id.name, grad.layout))
                    found[at] = None
            grads = [grad for grad in found if grad is not None]
        if len(grads) == len(found):
            return Ready(self.pieces, grads, self._kinds)
        for piece, grad in zip(self.pieces, found, strict=True):
            if grad is None:
                check_unfused(piece.id, piece.param)
        return Ready([piece for piece, grad in zip(self.pieces, found, strict=True) if grad is not None], grads)

    @torch.no_grad()
    def begin_(self, update: Update, row_means: ParamTensors) -> HookedStep | None:
        """Compute the directions of the ready pieces, if hooks read their norms; writes the rule's states.

        If the unit is in host memory, this queues the copies to it, and waits for them only if there are such hooks.
        `row_means` are those of parameters whose rows span ranks.
        """
        if self.host is not None and self.host.computes_on_host:
            self.host.fetch_(update)
        if not isinstance(self.rule, HookedUpdate):
            return None
        begun = []
        ids = []
        if self.host is not None:
            row_means = means_to_host(row_means, update.ready.pieces, self.host.device)
        with self._where_state_is(update) as here:
            for scale, runs in self._calls(here):
                pieces = [piece for run in runs for piece in run.pieces]
                means = means_of_pieces(self.cut_rows, pieces, row_means) if self.cut_rows else ()
                found = self.rule.begin(self._batches(runs, here), grad_scale=scale, row_means=means)
                directions = found.directions
                for _ in updating_(
                    self.rule.rule, directions, grad_scale=found.grad_scale, stages=self.stages, skip=here.skip
                ):
                    pass
                begun.append((found, self.rule.sums(found)))
                ids += [piece.id for piece in pieces]
            none = torch.empty(0, NUM_SUMS, dtype=torch.float64, device="cpu")
            sums = torch.cat([of_call for _, of_call in begun]) if begun else none
        if self.host is not None and self.cut:  # they are reduced on the device
            sums = self.host.device.upload(sums)
        return HookedStep(self.rule, [found for found, _ in begun], tuple(ids), sums)

    @property
    def starts_early(self) -> bool:
        """Whether `updating_` pauses while ranks exchange matrices, so that other units may be updated meanwhile."""
        return bool(self.stages) and self.host is None and not isinstance(self.rule, HookedUpdate)

    def updating_(self, update: Update, begun: HookedStep | None = None, *, sends: bool = False) -> Iterator[None]:
        """Update the ready pieces by one step of the rule: read its columns, update them, and count.

        Pauses if the unit `starts_early`. `begun` is the result of `begin_`, with the sums of cut parameters reduced.
        If it `sends`, matrices that are whole here are sent bucket by bucket; `publish_` of `completes` must follow.
        """
        if isinstance(self.host, Streamed):  # then there are no averages
            self._stream_(self.host, update)
            return
        if begun is not None and self.host is not None and self.cut:
            begun.sums = self.host.device.to_host(begun.sums)
        sender = self._sender if sends else None
        with (
            self._where_state_is(update) as here,
            nullcontext(()) if sender is None else sender.sending([piece.id for piece in here.ready.pieces]) as order,
        ):
            if begun is not None:
                begun.finish_(skip=here.skip)
            for scale, runs in self._calls(here, order):
                if begun is None:
                    batches = self._batches(runs, here)
                    yield from updating_(self.rule, batches, grad_scale=scale, stages=self.stages, skip=here.skip)
                for run in runs:
                    run.close_(skip=here.skip)
                if sender is not None and order:
                    sender.sync.updated([piece.id for run in runs for piece in run.pieces])
            if self.averages.specs and not here.is_skipped:  # all pieces, also those without a gradient in this step
                if self._has_restarted:
                    self._decays = self.averages.scheduled(self.pieces)
                self.averages.update_(self.pieces, here, self._decays)
                self.note_averaged()
        if self.host is not None and here.ready.pieces:
            self.host.return_(here.ready.pieces)

    def restart_averages_(self, piece: OwnedPiece, loaded: Collection[str] = ()) -> None:
        """Let the averages of a piece begin anew, except those `loaded` with its number of steps."""
        self.averages.restart_(piece, loaded)
        self._has_restarted = True

    def note_averaged(self) -> None:
        """Note that a step, which may be a replay of a graph, wrote the averages of all pieces."""
        for piece in self.pieces if self.averages.specs else ():
            piece.following.clear()

    def _stream_(self, host: Streamed, update: Update) -> None:
        """Update the ready pieces, whose state is fetched from host memory, on the device."""
        for scale, runs in self._calls(update):
            pieces = [piece for run in runs for piece in run.pieces]
            grads = [update.ready.grads[index] for run in runs for index in run.indices]
            parts = runs_of_ready(self.rule, Ready(pieces, grads), self.stages)
            with closing(host.streamed(parts)) as fetched:
                for ready in fetched:
                    self._update_fetched_(ready, update, scale)
            for run in runs:
                run.count.advance(update.skip)

    def _update_fetched_(self, ready: Ready, update: Update, scale: float | Tensor) -> None:
        runs = self._runs_of(ready.pieces)
        batches = self._batches(runs, update._replace(ready=ready))
        for _ in updating_(self.rule, batches, grad_scale=scale, stages=self.stages, skip=update.skip, is_one_run=True):
            pass
        for run in runs:
            run.close_(skip=update.skip)

    @contextmanager
    def _where_state_is(self, update: Update) -> Iterator[Update]:
        """Give the update on the device, or in host memory after a wait for the copies. Of no pieces if it is skipped
        there."""
        if self.host is None:
            yield update
        else:
            here = self.host.wait(update)
            with self.host.device.on_host():
                yield here

    def _calls(self, update: Update, order: Sequence[int] = ()) -> "Iterator[tuple[float | Tensor, list[PieceRun]]]":
        """The runs that each call of the rule updates, with the scale of their gradients. `order` is that of the
        sender's buckets.

        Coded mains are decoded during a call, so each of their runs has its own call to save memory. Not if ranks
        compute matrices together: their collectives must not depend on the coded mains of one rank.
        """
        by_scale: dict[tuple[int, int, float], list[PieceRun]] = {}
        places: dict[object, int] = {(self._sender, bucket): place for place, bucket in enumerate(order)}
        for run in self.runs(update.ready):
            place = places.get((run.first.source.place, run.first.bucket), len(order))
            by_scale.setdefault((place, run.first.norm_slot, run.first.source.grad_scale), []).append(run)
        for (_, slot, by), runs in sorted(by_scale.items(), key=lambda item: item[0][0]):
            scale = times(update.scale_of_slot[slot], by)
            if self.stages or not any(isinstance(main, CodedMain) for run in runs for main in run.opened):
                yield scale, runs
            else:
                yield from ((scale, [run]) for run in runs)

    def _batches(self, runs: "Sequence[PieceRun]", update: Update) -> list[Batch]:
        batches = []
        own = getattr(self.rule, "hyper_names", ())
        for run in runs:
            works = run.works(update.ready.grads)
            hyper = read_hyper(update.groups[run.first.group], step=run.count.next(), own=own)
            # Matrix rules iterate over works more than once; elementwise ones may never create a `Work`.
            batches.append(Batch(hyper, list(works) if self.rule.needs is Needs.MATRICES else works))
        return batches

    def runs(self, ready: Ready) -> "list[PieceRun]":
        """The runs of these pieces. Those of all pieces are kept until one gets another `Count`: by a load, or an
        update of some of them."""
        if ready.pieces is not self.pieces:
            return self._runs_of(ready.pieces)
        if list(map(_COUNT, self.pieces)) != self._counts:  # loaded, or updated without the others
            self._runs = self._runs_of(self.pieces)
            self._counts = list(map(_COUNT, self.pieces))
        return self._runs

    def _runs_of(self, pieces: Sequence[OwnedPiece]) -> "list[PieceRun]":
        """Group pieces in order: the same groups on every rank with the same pieces."""
        found: dict[tuple[object, ...], list[int]] = {}
        num_decoded = 0
        for index, piece in enumerate(pieces):
            step = piece.count if piece.count.known is None else piece.count.known  # only the device may know it
            num_decoded += piece.main.shape.numel() if isinstance(piece.main.updated, CodedMain) else 0
            key = (piece.source, piece.bucket, piece.norm_slot, piece.group, step, num_decoded // DECODED_NUMEL)
            found.setdefault(key, []).append(index)
        return [PieceRun(at, [pieces[index] for index in at], self.averages.names) for at in found.values()]

    def settle(self) -> None:
        """Wait until host memory has the state of the last step."""
        for main in mains_on_host(self.pieces):
            main.settle()

    # --- its memory -------------------------------------------------------------------------------------------------

    def state_bytes(self) -> int:
        """Bytes that this rank keeps for the unit in addition to parameters and gradients."""
        return sum(tensor.nbytes for tensor in kept_tensors(self.pieces))


class PieceRun:
    """Pieces with one row of hyper-parameters and one scale of their gradients, in order. Stored by columns, so that a
    step creates no object for each piece."""

    def __init__(self, indices: Sequence[int], pieces: Sequence[OwnedPiece], averages: Collection[str]):
        """`indices` are those of `pieces` among the pieces that are ready. A rule sees no `averages`."""
        self.indices = indices
        self.pieces = pieces
        self.first = pieces[0]
        self.count = pieces[0].count.copy()  # shared by its pieces from now on
        for piece in pieces:
            piece.count = self.count
        updated = [piece.main.updated for piece in pieces]
        # Those that must be stored after an update.
        self.opened = [main for main in updated if isinstance(main, CodedMain | QuantizedMain)]
        columns = [main.columns() for main in updated]
        states = [piece.state for piece in pieces]
        if averages:
            states = [{name: state[name] for name in state if name not in averages} for state in states]
        matrices = [piece.matrix for piece in pieces]
        firsts = tuple([first_number(piece.param) + piece.of_param.start for piece in pieces])
        mains = _column([tensors.main for tensors in columns])
        outs = _column([tensors.out for tensors in columns])
        remainders = _column([tensors.remainder for tensors in columns])
        self._columns = Works(  # without gradients
            (), mains=mains, outs=outs, remainders=remainders, states=states, matrices=matrices, firsts=firsts
        )

    def works(self, grads: Sequence[Tensor]) -> Works:
        """The works of the run, given the gradients of all ready pieces. Opens mains until `close_`."""
        mains = [main.open_() for main in self.opened] if self.opened else self._columns.mains
        return replace(self._columns, grads=[grads[index] for index in self.indices], mains=mains)

    def close_(self, *, skip: Tensor | None) -> None:
        """Store the mains that `works` opened, and count the update."""
        for main in self.opened:
            main.close_(skip=skip)
        self.count.advance(skip)


def _column(values: Sequence[Tensor | None]) -> list[Tensor] | None:
    """The values, or None if all are None. Pieces of one source and rule have the same kind of main values."""
    found = [value for value in values if value is not None]
    assert len(found) in (0, len(values))
    return found or None
