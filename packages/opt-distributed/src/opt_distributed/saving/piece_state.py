"""Reading and loading the state of a piece as tensors by name, in exact dtypes: the entries of `state_dict`.

State of a DTensor parameter is returned as a DTensor with the parameter's mesh and placements. State of a part of a
plain parameter has the part in its name, such as `exp_avg[128:256]` for a range of flat elements:
`torch.distributed.checkpoint` treats tensors with one name as replicas, and would save the part of one rank only.
"""

from collections import OrderedDict
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

import torch
from torch import Tensor

from opt_distributed.pieces.dtensor import PlacementError, is_dtensor, laid_out_like, local_part, part_of_mesh
from opt_distributed.pieces.mains import Numbers, encode_again_, values_of
from opt_distributed.pieces.piece import OwnedPiece
from opt_distributed.step.unit import Unit
from opt_kernels.backends import in_memory_order
from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.works import StateKind, StateSpec

MAIN = "fp32_param"  # Megatron-Core's name for the main values of a 16-bit parameter
STEP = "step"
_OF_MAIN = StateSpec(name=MAIN)  # main values have the parameter's shape
_ELSEWHERE = (
    "it was saved by another rule, in other dtypes or on another layout; use sharded_state_dict to load on another "
    "layout"
)


class StateError(ValueError):
    """A saved state does not match the piece that it is loaded into."""


class _Entry(NamedTuple):
    """One tensor of a piece's state."""

    spec: StateSpec
    saved_name: str


class PieceState(dict[str, Tensor]):
    """State by saved name. `state["exp_avg"]` also finds `exp_avg[128:256]`. Copies and pickles are OrderedDicts."""

    def __missing__(self, name: str) -> Tensor:
        found = self._of_part(name)
        if found is None:
            raise KeyError(name)
        return self[found]

    def __contains__(self, name: object) -> bool:
        return super().__contains__(name) or self._of_part(name) is not None

    def get(self, name: str, default: Any = None) -> Any:
        """`dict.get`, which also finds a name given without the part."""
        try:
            return self[name]
        except KeyError:
            return default

    def _of_part(self, name: object) -> str | None:
        return next((key for key in self if key.startswith((f"{name}[", f"{name}@"))), None)

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)


def read_state(unit: Unit, piece: OwnedPiece, *, copies_main: bool = False) -> dict[str, Tensor]:
    """Return `step` (0-d fp32), the rule's state, and the main values if they are kept separately from the parameter.

    Tensors share memory with the live ones, except `step`, main values joined from a remainder, and decoded codes
    (`saves_values`): copy what must outlast the next step. The result is a `PieceState` if names contain a part, else
    a plain dict, because torch's pytrees do not traverse subclasses. With `copies_main`, main values are always
    included, as a copy.
    """
    state = {STEP: torch.tensor(float(piece.step))}
    entries = list(_entries(unit, piece))
    if copies_main and piece.main.numbers is Numbers.DIRECT:
        entries.append(_main_entry(piece))
    for spec, saved_name in entries:
        value = _value(unit, piece, spec)
        if copies_main and spec is _OF_MAIN:
            value = value.detach().clone()
        state[saved_name] = laid_out_like(value, piece.param) if _is_like_param(piece, spec) else value
    state.update(piece.main.extra())
    has_parts = any(saved_name != spec.name for spec, saved_name in entries)
    return PieceState(state) if has_parts else state


def check_state(unit: Unit, piece: OwnedPiece, saved: Mapping[str, Any], *, needs_main: bool = False) -> None:
    """Raise StateError if `saved` cannot be loaded into `piece`. Changes nothing.

    With `needs_main`, main values must be in `saved`, because the parameter only holds them rounded.
    """
    if not saved:
        return
    entries = list(_entries(unit, piece))
    missing = [entry.saved_name for entry in entries if entry.spec is not _OF_MAIN and _key(entry, saved) is None]
    if missing:
        raise StateError(
            f"state of {piece.id.name!r} lacks {', '.join(missing)} (it has {', '.join(map(str, saved))}): {_ELSEWHERE}"
        )
    main = _main_entry(piece)
    if needs_main and piece.main.numbers is not Numbers.DIRECT and _key(main, saved) is None:
        raise StateError(
            f"state of {piece.id.name!r} lacks {main.saved_name}: an fp32 run saved it, and the {piece.param.dtype} "
            "parameter holds its values rounded; load with sharded_state_dict, which takes main values from the saved "
            "fp32 weights, or pass main_values='parameters' to load_state_dict and call "
            "reload_model_params(fp32_state_dict) after it"
        )
    known = {STEP, *piece.main.extra(), *(_key(entry, saved) for entry in (*entries, main))}
    unknown = [name for name in saved if name not in known]
    if unknown:
        raise StateError(
            f"state of {piece.id.name!r} has {', '.join(map(str, unknown))}, which its rule does not keep here "
            f"({', '.join(entry.saved_name for entry in entries) or 'nothing'}): {_ELSEWHERE}"
        )
    for entry in {*entries, main}:
        _saved_value(unit, piece, entry, saved)


def load_state_(unit: Unit, piece: OwnedPiece, saved: Mapping[str, Any]) -> None:
    """Set the whole state of a piece from `saved`, or to the state before the first step if `saved` is empty.

    Values are converted to the declared dtype of each state, never to that of the parameter. Saved main values are also
    written to the parameter: an fp32 parameter continues from the fp32 main values of a 16-bit run.
    """
    found = {entry.spec.name: _saved_value(unit, piece, entry, saved) for entry in _entries(unit, piece) if saved}
    main = _saved_value(unit, piece, _main_entry(piece), saved)
    state = {name: value for name, value in found.items() if value is not None and name != MAIN}
    extra = {name: saved[name] for name in piece.main.extra() if name in set(saved)}
    step = int(saved.get(STEP, 0)) if saved else None
    set_piece_(unit, piece, main, state, extra, step=step, is_decoded=saves_values(piece))


@torch.no_grad()
def set_piece_(
    unit: Unit,
    piece: OwnedPiece,
    main: Tensor | None,  # main values; None: those of the parameter
    state: Mapping[str, Tensor],
    extra: Mapping[str, Tensor],  # of an fp8 parameter
    *,
    step: int | None,  # None: the state is as before the first step
    is_decoded: bool,  # whether `state` has values where the piece has codes
) -> None:
    """Set everything that is kept for a piece."""
    if main is None:
        piece.main.reload_()
    else:
        piece.main.set_(main)
    piece.main.restore_(extra)
    if step is None:
        reset_state_(unit, piece)
        return
    piece.step = step
    for name, value in state.items():
        target, codec = piece.state[name], _codec(unit, name) if is_decoded else None
        if codec is None:
            target.copy_(value.view(target.shape))
        else:
            values = torch.empty_like(target, dtype=torch.float32).copy_(value.view(target.shape))
            encode_again_(codec, in_memory_order(target), piece.state[scale_name(name)], in_memory_order(values))


def reset_state_(unit: Unit, piece: OwnedPiece) -> None:
    """Set the rule's state of a piece to that before the first step. Main values stay."""
    piece.step = 0
    for name, fresh in unit.fresh_state(piece).items():
        piece.state[name].copy_(fresh)


def kept_states(unit: Unit, piece: OwnedPiece) -> Iterator[StateSpec]:
    """The states that a rule keeps for a piece on this rank, except block scales: values are saved decoded."""
    for spec in unit.rule.state_specs:
        if spec.kind is not StateKind.BLOCK_SCALES and spec.name in piece.state:
            yield spec


def saves_values(piece: OwnedPiece) -> bool:
    """Whether a state_dict has decoded values instead of codes and scales: where another optimizer may have other
    blocks, because they are runs of a rank's part, or of memory that is not in the order of elements."""
    return is_dtensor(piece.param) or not all(state.is_contiguous() for state in piece.state.values())


def is_by_part(spec: StateSpec, piece: OwnedPiece) -> bool:
    """Whether a state depends on how the piece's rows are split, so that no other split may load it."""
    return spec.by_part and bool(piece.matrix.split_rows)


def _codec(unit: Unit, name: str) -> StateCodec | None:
    """The codec of a state that is stored in scaled blocks; None if its memory holds the values themselves."""
    found = unit.rule.codecs.get(name)
    return found if found is not None and found.block else None


def decoded(unit: Unit, piece: OwnedPiece, spec: StateSpec) -> Tensor:
    """The values of one state: its own memory, or a new fp32 tensor if it is stored as codes."""
    codec = _codec(unit, spec.name)
    codes = piece.state[spec.name]
    return codes if codec is None else values_of(codec, codes, piece.state[scale_name(spec.name)])


def _entries(unit: Unit, piece: OwnedPiece) -> Iterator[_Entry]:
    if saves_values(piece):
        specs = list(kept_states(unit, piece))
    else:
        specs = [spec for spec in unit.rule.state_specs if spec.name in piece.state]
    for spec in specs:
        yield _Entry(spec, spec.name + _part(piece, spec))
    if piece.main.numbers is not Numbers.DIRECT:
        yield _main_entry(piece)


def _main_entry(piece: OwnedPiece) -> _Entry:
    return _Entry(_OF_MAIN, MAIN + _part(piece, _OF_MAIN))


def _part(piece: OwnedPiece, spec: StateSpec) -> str:
    """The suffix that marks state of a part of a parameter; empty if the name means the same tensor on every rank."""
    if spec.kind is StateKind.SCALAR:
        return ""
    split = f"@{piece.matrix.split_name}" if is_by_part(spec, piece) else ""
    if spec.whole and piece.stage is not None:
        block = piece.stage.whole(piece.id)
        return split + ("" if block.shape == piece.stage.shape(piece.id) else "@" + ".".join(map(str, block.offset)))
    if is_dtensor(piece.param):
        return split + ("" if _is_like_param(piece, spec) else part_of_mesh(piece.param))
    return split + piece.part + ("" if piece.is_whole else f"[{piece.of_param.start}:{piece.of_param.stop}]")


def _is_like_param(piece: OwnedPiece, spec: StateSpec) -> bool:
    """Whether a state has one element for each element of the piece."""
    return spec.kind is StateKind.LIKE_PARAM and not (spec.whole and piece.stage is not None)


def _value(unit: Unit, piece: OwnedPiece, spec: StateSpec) -> Tensor:
    if spec is _OF_MAIN:
        return piece.main.value()
    return decoded(unit, piece, spec) if saves_values(piece) else piece.state[spec.name]


def _key(entry: _Entry, saved: Mapping[str, Any]) -> str | None:
    """The key of an entry in `saved`. State of a whole parameter, as torch.optim saves it, serves every part."""
    names = [entry.saved_name, entry.spec.name] if entry.spec.kind is StateKind.LIKE_PARAM else [entry.saved_name]
    exact = set(saved)  # `in` a `PieceState` would also find other parts
    return next((name for name in names if name in exact), None)


def _saved_value(unit: Unit, piece: OwnedPiece, entry: _Entry, saved: Mapping[str, Any]) -> Tensor | None:
    """This rank's part of a saved tensor, in the shape of the live one; None if `saved` lacks it."""
    key = _key(entry, saved)
    if key is None:
        return None
    where = f"{key} of {piece.id.name!r}"
    value = saved[key]
    if not isinstance(value, Tensor):
        raise StateError(f"{where} is a {type(value).__name__}; a tensor is needed")
    shape = piece.main.shape if entry.spec is _OF_MAIN else piece.state[entry.spec.name].shape
    if _is_like_param(piece, entry.spec):
        try:
            value = local_part(value, piece.param)
        except PlacementError as error:
            raise StateError(f"{where} {error}") from error
        if not piece.is_whole and value.shape == piece.param.shape:
            value = value.flatten()[piece.of_param]
    if value.shape != shape:
        raise StateError(
            f"{where} has shape {tuple(value.shape)}, this rank's piece has {tuple(shape)}; use sharded_state_dict to "
            "load on another layout"
        )
    return value
