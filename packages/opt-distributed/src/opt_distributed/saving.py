"""States of pieces as checkpoints have them, read, checked and loaded in two forms.

By name, in exact dtypes, as in a `state_dict`. State of a DTensor parameter is a DTensor with its mesh and placements.
State of a part of a plain parameter has the part in its name, such as `exp_avg[128:256]` for a range of flat elements:
`torch.distributed.checkpoint` treats tensors with one name as replicas, and would save one of them.

As sharded values, which load on any layout. Keys are `optimizer.state.<state name>.<parameter key>`, and global shapes
are those of the parameter, as if one process had saved an optimizer that was never sharded. Block-scaled state is saved
decoded, in fp32, so that it loads into any other format.
"""

from collections import OrderedDict
from collections.abc import Collection, Iterator, Mapping
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from opt_checkpoint import (
    LayoutBound,
    LikeParam,
    PerMatrix,
    PerParam,
    Reduced,
    Segment,
    ShardedBase,
    ShardedTensor,
    ShardedTensorFactory,
    make_sharded_state,
)
from opt_checkpoint import StateSpec as SavedSpec
from opt_checkpoint.state import SPLIT_MARK
from opt_distributed.pieces.dtensor import part_of_mesh
from opt_distributed.pieces.piece import OwnedPiece, init_state
from opt_distributed.step.unit import Unit
from opt_kernels.backends import in_memory_order
from opt_kernels.codecs import StateCodec, scale_name
from opt_kernels.dtensor import distributed_like, local_like
from opt_kernels.params import encode_again_, values_of
from opt_kernels.works import StateKind, StateSpec
from opt_paramgroups import is_dtensor

__all__ = [
    "MAIN", "STEP", "PieceState", "Rows", "StateError", "check_loaded", "check_state", "decoded", "kept_states",
    "load_state_", "read_state", "reset_state_", "restart_", "rows_of_part", "sharded_piece", "take_loaded_",
]  # fmt: skip

MAIN = "fp32_param"  # Megatron-Core's name for the main values of a 16-bit parameter
STEP = "step"
_OF_MAIN = StateSpec(name=MAIN)  # main values have the parameter's shape
_ELSEWHERE = (
    "it was saved by another rule, in other dtypes or on another layout; use sharded_state_dict to load on another "
    "layout"
)
ShardedParam = ShardedTensor | ShardedTensorFactory


class StateError(ValueError):
    """A saved state does not match the piece that it is loaded into."""


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
        found = name if super().__contains__(name) else self._of_part(name)
        return default if found is None else self[found]

    def _of_part(self, name: object) -> str | None:
        return next((key for key in self if key.startswith((f"{name}[", f"{name}@"))), None)

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
    codes = piece.kept[spec.name]
    return codes if codec is None else values_of(codec, codes, piece.state[scale_name(spec.name)])


def _codec(unit: Unit, name: str) -> StateCodec | None:
    """The codec of a state that is stored in scaled blocks; None if its memory holds the values themselves."""
    found = unit.rule.codecs.get(name)
    return found if found is not None and found.block else None


def _is_by_part(spec: StateSpec, piece: OwnedPiece) -> bool:
    """Whether a state depends on how the piece's rows are split, so that no other split may load it."""
    return spec.by_part and bool(piece.matrix.split_rows)


def reset_state_(unit: Unit, piece: OwnedPiece) -> None:
    """Set the rule's state and the averages of a piece to those before the first step. Main values stay."""
    _reset_rule_(unit, piece)
    unit.averages.restart_(piece)


def _reset_rule_(unit: Unit, piece: OwnedPiece) -> None:
    piece.step = 0
    fresh = init_state(unit.rule, piece.main.value(), id=piece.id, matrix=piece.matrix, stage=piece.stage)
    for name, value in fresh.items():
        piece.state[name].copy_(value)


@torch.no_grad()
def _set_(
    unit: Unit,
    piece: OwnedPiece,
    main: Tensor | None,  # main values; None: those of the parameter
    state: Mapping[str, Tensor],
    extra: Mapping[str, Tensor],  # of an fp8 parameter
    averages: Mapping[str, Tensor],  # those that are lacking begin anew
    *,
    step: int | None,  # None: the state is as before the first step
    is_decoded: bool,  # whether `state` has values where the piece has codes
) -> None:
    """Set everything that is kept for a piece."""
    if main is None:
        piece.main.reload_()
    else:
        piece.main.set_(main.view(piece.main.shape))
    piece.main.restore_(extra)
    if step is None:
        _reset_rule_(unit, piece)
        state = {}
    else:
        piece.step = step
    for name, value in averages.items():
        piece.averages[name].copy_(value.view(piece.averages[name].shape))
    unit.averages.restart_(piece, piece.averages.keys() - averages.keys())
    for name, value in state.items():
        target = piece.state[name]
        codec = _codec(unit, name) if is_decoded else None
        if codec is None:
            target.copy_(value.view(target.shape))
        else:
            values = torch.empty_like(target, dtype=torch.float32).copy_(value.view(target.shape))
            encode_again_(codec, in_memory_order(target), piece.state[scale_name(name)], in_memory_order(values))


# --- by name ----------------------------------------------------------------------------------------------------------


def read_state(unit: Unit, piece: OwnedPiece, *, copies_main: bool = False) -> dict[str, Tensor]:
    """Return `step` (0-d fp32), the rule's state, and the main values if they are kept separately from the parameter.

    Tensors share memory with the live ones, except `step`, joined main values and decoded codes: copy what must outlast
    the next step. The result is a `PieceState` if names contain a part, else a plain dict, because torch's pytrees do
    not traverse subclasses. With `copies_main`, main values are always included, as a copy.
    """
    state = {STEP: torch.tensor(float(piece.step), dtype=torch.float32, device="cpu")}
    specs = _specs(unit, piece)
    if copies_main and _OF_MAIN not in specs:
        specs.append(_OF_MAIN)
    for spec in specs:
        if spec is _OF_MAIN:
            value = piece.main.value().detach().clone() if copies_main else piece.main.value()
        else:
            value = decoded(unit, piece, spec) if _saves_values(piece) else piece.kept[spec.name]
        if _is_like_param(piece, spec) and value.dim():
            value = distributed_like(value.detach(), piece.param)
        state[_saved_name(piece, spec)] = value
    has_parts = any(spec.name not in state for spec in specs)
    state.update(piece.main.extra())
    return PieceState(state) if has_parts else state


def check_state(unit: Unit, piece: OwnedPiece, saved: Mapping[str, Any], *, needs_main: bool = False) -> None:
    """Raise StateError if `saved` cannot be loaded into `piece`. Changes nothing.

    With `needs_main`, main values must be in `saved`, because the parameter only holds them rounded.
    """
    if not saved:
        return
    specs = _specs(unit, piece)
    names = [_saved_name(piece, spec) for spec in specs]
    found = {spec.name: _key(piece, spec, saved) for spec in (*specs, _OF_MAIN)}
    may_lack = (_OF_MAIN, *unit.averages.specs)
    missing = [name for spec, name in zip(specs, names) if spec not in may_lack and found[spec.name] is None]
    if missing:
        raise StateError(
            f"state of {piece.id.name!r} lacks {', '.join(missing)} (it has {', '.join(map(str, saved))}): {_ELSEWHERE}"
        )
    if needs_main and _OF_MAIN in specs and found[MAIN] is None:
        raise StateError(
            f"state of {piece.id.name!r} lacks {names[-1]}: an fp32 run saved it, and the {piece.param.dtype} "
            "parameter holds its values rounded; load with sharded_state_dict, which takes main values from the saved "
            "fp32 weights, or pass main_values='parameters' to load_state_dict and call "
            "reload_model_params(fp32_state_dict) after it"
        )
    known = {STEP, *piece.main.extra(), *found.values()}
    if piece.stage is not None:  # earlier versions kept state of whole matrices on all tensor-parallel ranks
        known |= {_saved_name(piece, spec) for spec in unit.rule.state_specs if spec.whole}
    unknown = [name for name in saved if name not in known]
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
    state = _values(unit, piece, saved)
    main = state.pop(MAIN, None)
    averages = {name: state.pop(name) for name in piece.averages.keys() & state.keys()}
    extra = {name: saved[name] for name in piece.main.extra() if name in set(saved)}
    step = int(saved.get(STEP, 0)) if saved else None
    _set_(unit, piece, main, state, extra, averages, step=step, is_decoded=_saves_values(piece))


def restart_(unit: Unit, piece: OwnedPiece, saved: Mapping[str, Any]) -> None:
    """Set a piece to the state before its first step, with the main values and averages of `saved`, the state of
    another rule."""
    keys = [_key(piece, spec, saved) for spec in (_OF_MAIN, *unit.averages.specs)]
    found = _values(unit, piece, {key: saved[key] for key in keys if key is not None})
    main = found.pop(MAIN, None)
    _set_(unit, piece, main, {}, {}, found, step=None, is_decoded=False)


def _saves_values(piece: OwnedPiece) -> bool:
    """Whether a state_dict has decoded values instead of codes and scales: where another optimizer may have other
    blocks, because they are runs of a rank's part, or of memory that is not in the order of elements."""
    return is_dtensor(piece.param) or not all(state.is_contiguous() for state in piece.state.values())


def _specs(unit: Unit, piece: OwnedPiece) -> list[StateSpec]:
    """The tensors of a piece in a state_dict; main values last, if they are kept."""
    specs = list(kept_states(unit, piece))
    if not _saves_values(piece):
        specs = [spec for spec in unit.rule.state_specs if spec.name in piece.state]
    return [*specs, *unit.averages.specs, *([_OF_MAIN] if piece.main.kept else [])]


def _saved_name(piece: OwnedPiece, spec: StateSpec) -> str:
    """The state's name, with a suffix for state of a part of a parameter, unless it is the same tensor on all ranks."""
    if spec.kind is StateKind.SCALAR:
        return spec.name
    name = spec.name + (f"@{piece.matrix.split_name}" if _is_by_part(spec, piece) else "")
    if spec.whole and piece.stage is not None:
        block = piece.stage.whole(piece.id)
        return name + ("" if block.shape == piece.stage.shape(piece.id) else "@" + ".".join(map(str, block.offset)))
    if is_dtensor(piece.param):
        return name + ("" if _is_like_param(piece, spec) else part_of_mesh(piece.param))
    return name + piece.part + ("" if piece.is_whole else f"[{piece.of_param.start}:{piece.of_param.stop}]")


def _is_like_param(piece: OwnedPiece, spec: StateSpec) -> bool:
    """Whether a state has one element for each element of the piece."""
    return spec.kind is StateKind.LIKE_PARAM and not (spec.whole and piece.stage is not None)


def _key(piece: OwnedPiece, spec: StateSpec, saved: Mapping[str, Any]) -> str | None:
    """The key of a state in `saved`. State of a whole parameter, as torch.optim saves it, serves every part."""
    names = [_saved_name(piece, spec), *([spec.name] if spec.kind is StateKind.LIKE_PARAM else [])]
    exact = set(saved)  # `in` a `PieceState` would also find other parts
    return next((name for name in names if name in exact), None)


def _values(unit: Unit, piece: OwnedPiece, saved: Mapping[str, Any]) -> dict[str, Tensor]:
    """This rank's part of each saved tensor, by the name of the state, in the shape of the live one. Collective if a
    saved DTensor has other placements than the parameter. Raises StateError."""
    found = {}
    for spec in dict.fromkeys((*_specs(unit, piece), _OF_MAIN)):
        key = _key(piece, spec, saved)
        if key is None:
            continue
        where = f"{key} of {piece.id.name!r}"
        value = saved[key]
        if not isinstance(value, Tensor):
            raise StateError(f"{where} is a {type(value).__name__}; a tensor is needed")
        shape = piece.main.shape if spec is _OF_MAIN else piece.kept[spec.name].shape
        if _is_like_param(piece, spec):
            try:
                if is_dtensor(value) or is_dtensor(piece.param):
                    value = local_like(value, piece.param)
            except ValueError as error:
                raise StateError(f"{where} {error}") from error
            if not piece.is_whole and value.shape == piece.param.shape:
                value = value.flatten()[piece.of_param]
        if value.shape != shape:
            raise StateError(
                f"{where} has shape {tuple(value.shape)}, this rank's piece has {tuple(shape)}; use sharded_state_dict "
                "to load on another layout"
            )
        found[spec.name] = value
    return found


# --- as sharded values ------------------------------------------------------------------------------------------------


Rows = Mapping[int, tuple[Segment, ...]]
"""The rows of a fused matrix that parts of it have, as these are saved, by the first row of a part in the matrix."""


def rows_of_part(piece: OwnedPiece, param: ShardedParam) -> Rows:
    """The rows of a piece that is a part of a matrix, if it is saved in several runs of rows."""
    if piece.stage is None or not isinstance(param, ShardedTensorFactory) or piece.param.dim() != 2:
        return {}
    segments = param.declared().segments
    return {piece.stage.part(piece.id).offset[0]: segments} if segments else {}


def sharded_piece(
    unit: Unit, piece: OwnedPiece, param: ShardedParam, rows: Rows, *, always_main: bool = False
) -> dict[str, ShardedBase]:
    """Describe the tensors of a piece, which share the live memory if possible, under the key of `param`.

    `rows` are those of all parts of its matrix. With `always_main`, main values are described even if they are the
    parameter itself.
    """
    if piece.replica is not None:  # by convention (pipeline, tensor, data); a shard has no replicas in its instance
        id = param.replica_id
        at = piece.replica
        param = replace(param, replica_id=(*id[:-1], at) if isinstance(id, tuple) else at)
    part = param
    whole = _whole(param, piece, rows)
    # SOAP's moments are in bases of the matrix with the rows in this order, so that no other order may load them.
    has_bases = any(spec.kind in (StateKind.MATRIX, StateKind.SHAPED) for spec in unit.rule.state_specs)
    if isinstance(whole, ShardedTensorFactory) and has_bases and not _is_in_order(whole):
        whole = None
    if not piece.is_whole:
        if isinstance(param, ShardedTensor):
            part = param.flat(None, piece.of_param.start, piece.of_param.stop)
        else:
            part = replace(param, data=None, flattened_range=piece.of_param)
    step = torch.tensor(piece.step, dtype=torch.int64, device="cpu")
    described = {STEP: make_sharded_state(part, step, STEP, PerParam())}
    for spec in kept_states(unit, piece):
        key = spec.name + (SPLIT_MARK + piece.matrix.split_name if _is_by_part(spec, piece) else "")
        of = part
        saved_spec = _saved_spec(spec, piece)
        if spec.whole and piece.stage is not None:
            if whole is not None:
                of = whole
            else:  # can only be loaded if the same number of parts makes up the matrix
                saved_spec = LayoutBound(fingerprint=f"parts{piece.stage.layout.num_ranks}")
        described[spec.name] = make_sharded_state(of, decoded(unit, piece, spec), key, saved_spec)
    for spec in unit.averages.specs:
        average = make_sharded_state(part, piece.averages[spec.name], spec.name, _saved_spec(spec, piece))
        assert isinstance(average, ShardedTensor | ShardedTensorFactory)
        average.optional = True  # checkpoints of runs without averages lack it
        described[spec.name] = average
    if always_main or piece.main.kept:
        described[MAIN] = make_sharded_state(part, piece.main.value(), MAIN, LikeParam())
    for name, tensor in piece.main.extra().items():  # of the fp8 parameter itself: once for what this rank stores of it
        # Each tensor-parallel rank scales its own part, so that scales are meaningless for a part of another size.
        of_part = LayoutBound(fingerprint=f"fp8tp{piece.part.rpartition('of')[2]}") if piece.part else PerParam()
        stored = replace(param, replica_id=param.replica_id if piece.of_param.start == 0 else 1)
        # A copy, because loading the parameter itself quantises it, which writes this memory.
        extra = make_sharded_state(stored, tensor.clone(), name, of_part)
        assert isinstance(extra, ShardedTensor)
        extra.optional = True  # checkpoints of runs without fp8 parameters lack it
        described[name] = extra
    return described


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
    names = [spec.name for spec in kept_states(unit, piece)]
    state = {name: loaded[name] for name in names if name in loaded}
    extra = {name: loaded[name] for name in piece.main.extra() if name in loaded}
    averages = {name: loaded[name] for name in piece.averages if name in loaded}
    step = int(loaded[STEP]) if all(name in loaded for name in (*names, STEP)) else None
    _set_(unit, piece, loaded.get(MAIN), state, extra, averages, step=step, is_decoded=True)


def _whole(param: ShardedParam, piece: OwnedPiece, rows: Rows) -> ShardedParam | None:
    """The description of the block that is one matrix to the rule and contains the piece.

    None if the parts do not make up the parameter as it is saved.
    """
    stage = piece.stage
    if stage is None:
        return None
    block = stage.whole(piece.id)
    if isinstance(param, ShardedTensorFactory):
        start = block.offset[0]
        segments = []
        for first, segment in ((first, segment) for first, of_part in sorted(rows.items()) for segment in of_part):
            if start <= first < start + block.shape[0]:
                row_start = segment.row_start + first - start
                row_stop = segment.row_stop + first - start
                offset = (*segment.global_offset[:-1], block.offset[-1])
                segments.append(replace(segment, row_start=row_start, row_stop=row_stop, global_offset=offset))
        if not segments:
            return None
        replica_id = param.replica_id if stage.computes(piece.id) else 1
        shape = block.shape
        return ShardedTensorFactory(param.key, None, segments=tuple(segments), local_shape=shape, replica_id=replica_id)
    prepended = param.prepend_axis_num
    if param.global_shape[prepended:] != stage.shape(piece.id):
        return None
    offset = (*param.global_offset[:prepended], *block.offset)
    whole = replace(param, data=None, local_shape=block.shape, global_offset=offset, axis_fragmentations=None)
    if not stage.computes(piece.id):
        whole = replace(whole, replica_id=1, may_repeat=False)
    return whole


def _is_in_order(factory: ShardedTensorFactory) -> bool:
    """Whether the segments are one tensor, with its rows in order."""
    first = factory.segments[0]
    axis = len(first.global_shape) - len(factory.local_shape)
    starts = [segment.global_offset[axis] - segment.row_start for segment in factory.segments]
    return len(set(starts)) == 1 and not any(segment.suffix for segment in factory.segments)


def _saved_spec(spec: StateSpec, piece: OwnedPiece) -> SavedSpec:
    """How the checkpoint relates a state to the parameter."""
    group = piece.matrix.tensor_parallel
    match spec.kind:
        case StateKind.LIKE_PARAM:
            return LikeParam()
        case StateKind.MATRIX | StateKind.SHAPED if group is not None:
            # Factors of this rank's block are meaningless for a block of another size.
            return LayoutBound(fingerprint=f"tp{group.size}")
        case StateKind.REDUCED if not _is_by_part(spec, piece):
            return Reduced(dims=spec.dims)
        case StateKind.MATRIX | StateKind.SHAPED | StateKind.REDUCED:
            return PerMatrix()
        case _:
            return PerParam()
