"""States of pieces by name, in exact dtypes, as in a `state_dict`: read, checked and loaded. Writes no files.

State of a DTensor parameter is a DTensor with its mesh and placements. State of a part of a plain parameter has the
part in its name, such as `exp_avg[128:256]` for a range of flat elements: `torch.distributed.checkpoint` treats tensors
with one name as replicas, and would save one of them. `sharded_pieces` describes the same states for any layout.
"""

import re
from collections import OrderedDict
from collections.abc import Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from opt_distributed.pieces.averages import AVERAGES
from opt_distributed.pieces.dtensor import part_of_mesh
from opt_distributed.pieces.piece import OwnedPiece, init_state
from opt_distributed.step.unit import Unit
from opt_kernels.backends import in_memory_order
from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.dtensor import distributed_like, local_like
from opt_kernels.params import encode_again_, followed, values_of
from opt_kernels.works import StateKind, StateSpec
from opt_paramgroups import is_dtensor

__all__ = [
    "MAIN", "STEP", "PieceState", "StateError", "check_loaded", "check_state", "decoded", "is_by_part", "kept_states",
    "load_state_", "read_state", "reset_state_", "restart_", "take_loaded_",
]  # fmt: skip

MAIN = "fp32_param"  # Megatron-Core's name for the main values of a 16-bit parameter
STEP = "step"
_AVERAGE = re.compile(rf"({'|'.join(AVERAGES)})(?:[@\[]|$)")  # in a state dict, of a whole or a part
_OF_MAIN = StateSpec(name=MAIN)  # main values have the parameter's shape
_ELSEWHERE = (
    "it was saved by another rule, in other dtypes or on another layout; use sharded_state_dict to load on another "
    "layout"
)


class StateError(ValueError):
    """A saved state does not match the piece that it is loaded into."""


class PieceState(dict[str, Tensor]):
    """State by saved name. `state["exp_avg"]` also finds `exp_avg[128:256]`. Copies and pickles are OrderedDicts."""

    def __missing__(self, name: str) -> Tensor:
        for key in self:
            if key.startswith((f"{name}[", f"{name}@")):
                return self[key]
        raise KeyError(name)

    def __contains__(self, name: object) -> bool:
        return self.get(name) is not None

    def get(self, name: Any, default: Any = None) -> Any:
        """`dict.get`, which also finds a name given without the part."""
        try:
            return self[name]
        except KeyError:
            return default

    def __reduce__(self) -> tuple[Any, ...]:
        return OrderedDict, (list(self.items()),)


# --- what is kept for a piece -----------------------------------------------------------------------------------------


def kept_states(unit: Unit, piece: OwnedPiece) -> Iterator[StateSpec]:
    """The states that a rule keeps for a piece on this rank, except block scales: values are saved decoded."""
    for spec in unit.rule.state_specs:
        if spec.kind is not StateKind.BLOCK_SCALES and spec.name in piece.state:
            yield spec


def decoded(unit: Unit, piece: OwnedPiece, spec: StateSpec) -> Tensor:
    """The values of one state: its own memory, or a new fp32 tensor if it is stored as codes."""
    codec = _codec(unit, spec.name)
    codes = piece.state[spec.name]
    if codec is None:
        return codes
    return values_of(codec, codes, piece.state[scale_name(spec.name)])


def _codec(unit: Unit, name: str) -> StateCodec | None:
    """The codec of a state that is stored in scaled blocks; None if its memory holds the values themselves."""
    codec = unit.rule.codecs.get(name)
    return codec if codec is not None and codec.block else None


def is_by_part(spec: StateSpec, piece: OwnedPiece) -> bool:
    """Whether a state depends on how the piece's rows are split, so that no other split may load it."""
    return spec.by_part and bool(piece.matrix.split_rows)


def reset_state_(unit: Unit, piece: OwnedPiece) -> None:
    """Set the rule's state and the averages of a piece to those before the first step. Main values stay."""
    _reset_rule_(unit, piece)
    unit.restart_averages_(piece)


def _reset_rule_(unit: Unit, piece: OwnedPiece) -> None:
    piece.step = 0
    fresh = init_state(unit.rule, piece.main.value(), id=piece.id, matrix=piece.matrix, stage=piece.stage)
    for name, value in fresh.items():
        piece.state[name].copy_(value)


@torch.no_grad()
def _set_(
    unit: Unit, piece: OwnedPiece, saved: Mapping[str, Tensor], *, step: int | None, is_decoded: bool = True
) -> None:
    """Set everything that is kept for a piece, from tensors by name: main values, states, averages and `extra`.

    A saved main value replaces the parameter, too, without a comparison. Main values that are lacking are those of the
    parameter, and averages that are lacking begin anew. Without a number of steps, the rule's is as before the first
    one. `is_decoded`: `saved` has values where the piece has codes.
    """
    if MAIN in saved:
        piece.main.set_(saved[MAIN].view(piece.main.shape))
    else:
        piece.main.reload_()
    piece.main.restore_(saved)
    if step is None:
        _reset_rule_(unit, piece)
    else:
        piece.step = step
    states = unit.averages.names if step is None else piece.state.keys()
    for name in saved.keys() & states:
        target = piece.state[name]
        value = saved[name].view(target.shape)
        codec = _codec(unit, name) if is_decoded else None
        if codec is None:
            target.copy_(value)
        else:
            values = torch.empty_like(target, dtype=torch.float32).copy_(value)
            encode_again_(codec, in_memory_order(target), piece.state[scale_name(name)], in_memory_order(values))
    unit.restart_averages_(piece, saved.keys())


def check_loaded(unit: Unit, piece: OwnedPiece, loaded: Collection[str]) -> None:
    """Raise StateError if only a part of a piece's state is among the names `loaded`."""
    wanted = [STEP, *(spec.name for spec in kept_states(unit, piece))]
    lacking = [name for name in wanted if name not in loaded]
    only_steps = lacking == wanted[1:]  # saved by another rule, which counts steps too
    if lacking and lacking != wanted and not only_steps:
        present = ", ".join(name for name in wanted if name in loaded)
        raise StateError(
            f"state of {piece.id.name!r}: {present} was loaded and {', '.join(lacking)} was not; load all of it, with "
            "aliases for other names, or none"
        )


def take_loaded_(unit: Unit, piece: OwnedPiece, loaded: Mapping[str, Tensor]) -> None:
    """Set a piece from loaded tensors, by the names of `sharded_piece`.

    Main values that were not saved are read from the parameter. If a state was not saved, all state and the count of
    steps are as before the first step.
    """
    names = [STEP, *(spec.name for spec in kept_states(unit, piece))]
    step = int(loaded[STEP]) if all(name in loaded for name in names) else None
    _set_(unit, piece, loaded, step=step)


# --- by name ----------------------------------------------------------------------------------------------------------


def read_state(unit: Unit, piece: OwnedPiece, *, copies_main: bool = False, follows: bool = False) -> dict[str, Tensor]:
    """Return `step` (0-d fp32), the rule's state, and the main values if they are kept separately from the parameter.

    Tensors share memory with the live ones, except `step`, joined main values and decoded codes: copy what must outlast
    the next step. The result is a `PieceState` if names contain a part, else a plain dict, because torch's pytrees do
    not traverse subclasses. With `copies_main`, main values are always included, as a copy. If it
    `follows` writes of other code to the parameter, they are copies that have its values.
    """
    state = {STEP: torch.tensor(float(piece.step), dtype=torch.float32, device="cpu")}
    specs = _specs(unit, piece)
    if copies_main and _OF_MAIN not in specs:
        specs.append(_OF_MAIN)
    saves_values = _saves_values(piece)
    for spec in specs:
        if spec is _OF_MAIN:
            value = followed(piece.main) if follows else piece.main.value()
            if copies_main:
                value = value.detach().clone()
        elif saves_values:
            value = decoded(unit, piece, spec)
        else:
            value = piece.state[spec.name]
        if _is_like_param(piece, spec) and value.dim():
            value = distributed_like(value.detach(), piece.param)
        state[_saved_name(piece, spec)] = value
    has_parts = any(spec.name not in state for spec in specs)
    state.update(piece.main.extra())
    return PieceState(state) if has_parts else state


def check_state(
    unit: Unit, piece: OwnedPiece, saved: Mapping[str, Any], *, needs_main: bool = False, leaves_averages: bool = False
) -> None:
    """Raise StateError if `saved` cannot be loaded into `piece`. Changes nothing.

    With `needs_main`, main values must be in `saved`, because the parameter only holds them rounded. With
    `leaves_averages`, it may have averages that this run does not keep.
    """
    if not saved:
        return
    specs = _specs(unit, piece)
    keys = _keys(unit, piece, saved)
    names = [_saved_name(piece, spec) for spec in specs]
    may_lack = (_OF_MAIN, *unit.averages.specs)
    missing = [name for spec, name in zip(specs, names) if spec not in keys and spec not in may_lack]
    if missing:
        raise StateError(
            f"state of {piece.id.name!r} lacks {', '.join(missing)} (it has {', '.join(map(str, saved))}): {_ELSEWHERE}"
        )
    if needs_main and _OF_MAIN in specs and _OF_MAIN not in keys:
        raise StateError(
            f"state of {piece.id.name!r} lacks {names[-1]}: an fp32 run saved it, and the {piece.param.dtype} "
            "parameter holds its values rounded; load with sharded_state_dict, which takes main values from the saved "
            "fp32 weights, or pass main_values='parameters' to load_state_dict and call "
            "reload_model_params(fp32_state_dict) after it"
        )
    known = {STEP, *piece.main.extra(), *keys.values()}
    if piece.stage is not None:  # earlier versions kept state of whole matrices on all tensor-parallel ranks
        known |= {_saved_name(piece, spec) for spec in unit.rule.state_specs if spec.whole}
    unknown = [name for name in saved if name not in known]
    if leaves_averages:
        averages = {name: found[1] for name in unknown if (found := _AVERAGE.match(str(name))) is not None}
        unknown = [name for name in unknown if averages.get(name) in (None, *unit.averages.names)]
    if unknown:
        raise StateError(
            f"state of {piece.id.name!r} has {', '.join(map(str, unknown))}, which its rule does not keep here "
            f"({', '.join(names) or 'nothing'}): {_ELSEWHERE}"
        )
    _values(unit, piece, saved)


def load_state_(unit: Unit, piece: OwnedPiece, saved: Mapping[str, Any]) -> None:
    """Set the whole state of a piece from `saved`, or to the state before the first step if `saved` is empty.

    Values are converted to the declared dtype of each state, never to that of the parameter. Saved main values are also
    written to the parameter: an fp32 parameter continues from the fp32 main values of a 16-bit run.
    """
    step = int(saved.get(STEP, 0)) if saved else None
    _set_(unit, piece, _values(unit, piece, saved), step=step, is_decoded=_saves_values(piece))


def restart_(unit: Unit, piece: OwnedPiece, saved: Mapping[str, Any]) -> None:
    """Set a piece to the state before its first step, with the main values and averages of `saved`, the state of
    another rule."""
    continued = (_OF_MAIN, *unit.averages.specs)
    kept = {key: saved[key] for spec, key in _keys(unit, piece, saved).items() if spec in continued}
    _set_(unit, piece, _values(unit, piece, kept), step=None)


def _saves_values(piece: OwnedPiece) -> bool:
    """Whether a state_dict has decoded values instead of codes and scales: where another optimizer may have other
    blocks, because they are runs of a rank's part, or of memory that is not in the order of elements."""
    return is_dtensor(piece.param) or not all(state.is_contiguous() for state in piece.state.values())


def _specs(unit: Unit, piece: OwnedPiece) -> list[StateSpec]:
    """The tensors of a piece in a state_dict; main values last, if they are kept."""
    specs = list(kept_states(unit, piece))
    if not _saves_values(piece):
        specs = [spec for spec in unit.rule.state_specs if spec.name in piece.state]
    specs += unit.averages.specs
    if piece.main.kept:
        specs.append(_OF_MAIN)
    return specs


def _saved_name(piece: OwnedPiece, spec: StateSpec) -> str:
    """The state's name, with a suffix for state of a part of a parameter, unless it is the same tensor on all ranks."""
    if spec.kind is StateKind.SCALAR:
        return spec.name
    name = spec.name
    if is_by_part(spec, piece):
        name += f"@{piece.matrix.split_name}"
    if spec.whole and piece.stage is not None:
        block = piece.stage.whole(piece.id)
        if block.shape != piece.stage.matrices[piece.id].shape:
            name += "@" + ".".join(map(str, block.offset))
    elif not is_dtensor(piece.param):
        name += piece.part
        if not piece.is_whole:
            name += f"[{piece.of_param.start}:{piece.of_param.stop}]"
    elif not _is_like_param(piece, spec):
        name += part_of_mesh(piece.param)
    return name


def _is_like_param(piece: OwnedPiece, spec: StateSpec) -> bool:
    """Whether a state has one element for each element of the piece."""
    return spec.kind is StateKind.LIKE_PARAM and not (spec.whole and piece.stage is not None)


def _keys(unit: Unit, piece: OwnedPiece, saved: Iterable[str]) -> dict[StateSpec, str]:
    """The keys of the tensors of a piece that `saved` has, main values included even if they are not kept. State of a
    whole parameter, as torch.optim saves it, serves every part."""
    exact = set(saved)  # `in` a `PieceState` would also find other parts
    keys = {}
    for spec in (*_specs(unit, piece), _OF_MAIN):
        name = _saved_name(piece, spec)
        if name in exact:
            keys[spec] = name
        elif spec.kind is StateKind.LIKE_PARAM and spec.name in exact:
            keys[spec] = spec.name
    return keys


def _values(unit: Unit, piece: OwnedPiece, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """This rank's part of each saved tensor, by the name of the state, in the shape of the live one, and `extra`.
    Collective if a saved DTensor has other placements than the parameter. Raises StateError."""
    found = {name: saved[name] for name in piece.main.extra().keys() & set(saved)}
    for spec, key in _keys(unit, piece, saved).items():
        where = f"{key} of {piece.id.name!r}"
        value = saved[key]
        if not isinstance(value, Tensor):
            raise StateError(f"{where} is a {type(value).__name__}; a tensor is needed")
        live = piece.main if spec is _OF_MAIN else piece.state[spec.name]
        if _is_like_param(piece, spec):
            try:
                if is_dtensor(value) or is_dtensor(piece.param):
                    value = local_like(value, piece.param)
            except ValueError as error:
                raise StateError(f"{where} {error}") from error
            if not piece.is_whole and value.shape == piece.param.shape:
                value = value.flatten()[piece.of_param]
        if value.shape != live.shape:
            raise StateError(
                f"{where} has shape {tuple(value.shape)}, this rank's piece has {tuple(live.shape)}; use "
                "sharded_state_dict to load on another layout"
            )
        found[spec.name] = value
    return found
