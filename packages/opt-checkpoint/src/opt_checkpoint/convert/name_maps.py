"""Maps the tensors of one side of a table of `NameRule`s to those of the other: names, shapes, boxes, in integers."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from functools import lru_cache
from typing import NamedTuple, TypeAlias

import torch

from opt_checkpoint.boxes import Box
from opt_checkpoint.convert.name_rules import NamePattern, NameRule, Names, names_of
from opt_checkpoint.dcp.names import some_of
from opt_checkpoint.disk.index import Within
from opt_checkpoint.errors import CheckpointKeyError, CheckpointMismatchError
from opt_checkpoint.state.sharded import Shape, with_axis


class Described(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: Shape
    dtype: torch.dtype


Tensors: TypeAlias = dict[str, Described]  # by name


class Piece(NamedTuple):
    """A box of one of our tensors, and the position of its values in one of their tensors."""

    box: Box
    theirs: str
    within: Within


Pieces: TypeAlias = dict[str, list[Piece]]  # by our names


class Mapped(NamedTuple):
    """The other side of some tensors.

    Args:
        ours: our tensors.
        theirs: their tensors.
        pieces: for each of our tensors, disjoint boxes that cover it except for padding.
        tied: by our names, the pieces of tensors whose values another of our tensors writes.
    """

    ours: Tensors
    theirs: Tensors
    pieces: Pieces
    tied: Pieces


def to_theirs(rules: Sequence[NameRule], ours: Tensors) -> Mapped:
    """Map our tensors to theirs.

    Raises:
        CheckpointKeyError: a name has no rule or several, two tensors become one, or a part of a tensor is missing.
        CheckpointMismatchError: shapes or dtypes do not fit a rule.
    """
    return _mapped(rules, ours, known=0)


def to_ours(rules: Sequence[NameRule], theirs: Tensors) -> Mapped:
    """Map their tensors to ours. Raises like `to_theirs`."""
    return _mapped(rules, theirs, known=1)


def _mapped(rules: Sequence[NameRule], tensors: Tensors, *, known: int) -> Mapped:
    mapped = Mapped({}, {}, {}, {})
    claimed: dict[str, str] = {}  # for each tensor of the other side, one that it is made from
    for instance in sorted(_instances(rules, tensors, known), key=lambda i: i.rule.tied):
        rule = instance.rule
        sides = instance.sides
        names = instance.names
        sizes = _sizes_of(instance, tensors, known)
        made = dict(instance.names_on(1 - known, [sizes.stacks[name] for name in sides[known].stack]))
        ours = names if known == 0 else made
        theirs = made if known == 0 else names
        mapped.ours.update(sizes.described(0, sides, ours))
        if known == 1 or not rule.tied:
            source = next(iter(names.values()))
            for name, count in Counter(made.values()).items():
                first = claimed.setdefault(name, source)
                if count > 1 or first != source:
                    raise CheckpointKeyError(f"{name} would be created twice, from {first} and from {source}")
            mapped.theirs.update(sizes.described(1, sides, theirs))
        found = mapped.tied if rule.tied else mapped.pieces
        found.update((name, []) for name in ours.values())  # also for tensors without elements
        for name, piece in _pieces(sides, sizes, ours, theirs):
            found[name].append(piece)
    for name, tied in mapped.tied.items():
        dtype = mapped.ours[name].dtype
        for piece in tied:
            other = mapped.theirs.get(piece.theirs)
            if other is None:
                raise CheckpointKeyError(f"{name} is tied to {piece.theirs}, but no tensor is converted to that name")
            if other != (piece.within.shape, dtype):
                shape = list(piece.within.shape)
                raise CheckpointMismatchError(
                    f"{name} is {dtype} and tied to {piece.theirs} of shape {shape}, which another "
                    f"rule makes {other.dtype} of shape {list(other.shape)}"
                )
    return mapped


_Patterns: TypeAlias = dict[str, tuple[NamePattern, list[int]]]  # by text: a name, and the parts in its tensor


class _Side(NamedTuple):
    """One side of a rule.

    Args:
        parts: the name of each part.
        groups: number of groups in which the parts of one tensor are interleaved.
        stack: the numbers that are leading axes of this side's tensors.
        swapped: whether the last two axes are swapped, compared with ours.
    """

    parts: tuple[NamePattern, ...]
    groups: int
    stack: tuple[str, ...]
    swapped: bool

    @property
    def patterns(self) -> _Patterns:
        """By text: each distinct name, and the parts that are in the tensor of this name."""
        found: _Patterns = {}
        for number, pattern in enumerate(self.parts):
            found.setdefault(pattern.text, (pattern, []))[1].append(number)
        return found

    def axes(self, ours: Shape) -> Shape:
        """Return values per axis, reordered from our axes to those of this side. The inverse is the same operation."""
        return (*ours[:-2], ours[-1], ours[-2]) if self.swapped else ours


_Sides: TypeAlias = tuple[_Side, _Side]
_Names: TypeAlias = dict[tuple[str, Shape], str]  # of one side's tensors: by pattern, and by the other side's axes


@lru_cache(maxsize=1024)
def _sides_of(rule: NameRule) -> _Sides:
    """Our side and their side; one without names has no parts."""

    def patterns_of(names: Names) -> tuple[NamePattern, ...]:
        patterns = tuple(map(NamePattern, names_of(names))) if names else ()
        return patterns * rule.parts if len(patterns) == 1 else patterns

    ours = patterns_of(rule.ours)
    theirs = patterns_of(rule.theirs)
    our_numbers = ours[0].numbers if ours else ()
    their_numbers = theirs[0].numbers if theirs else ()
    our_stack = tuple(name for name in their_numbers if name not in our_numbers)
    their_stack = tuple(name for name in our_numbers if name not in their_numbers)
    return (_Side(ours, rule.groups, our_stack, False), _Side(theirs, rule.their_groups, their_stack, rule.transposed))


class _Instance(NamedTuple):
    """A rule with the placeholders common to both sides filled in, and the known tensors that match it.

    Args:
        rule: the rule.
        sides: ours and theirs.
        common: values of the placeholders that both sides have in their names.
        names: the known tensors, by pattern and by the numbers that are axes on the other side.
    """

    rule: NameRule
    sides: _Sides
    common: dict[str, str]
    names: _Names

    def names_on(self, side: int, counts: Sequence[int]) -> Iterator[tuple[tuple[str, Shape], str]]:
        """Yield pattern, numbers and name of every tensor of one side, whose names have all numbers up to `counts`."""
        stack = self.sides[1 - side].stack
        for index in itertools.product(*map(range, counts)):
            values = {**self.common, **dict(zip(stack, map(str, index)))}
            for text, (pattern, _) in self.sides[side].patterns.items():
                yield (text, index), pattern.filled(values)


def _instances(rules: Sequence[NameRule], tensors: Tensors, known: int) -> list[_Instance]:
    """Every rule with each combination of common placeholders found in the names."""
    patterns = [(rule, pattern) for rule in rules for pattern, _ in _sides_of(rule)[known].patterns.values()]
    found: dict[tuple[NameRule, frozenset[tuple[str, str]]], _Instance] = {}
    unmapped = []
    for name in tensors:
        fitting = []
        for rule, pattern in patterns:
            values = pattern.match(name)
            if values is not None:
                fitting.append((rule, pattern, values))
        untied = [rule for rule, _, _ in fitting if not rule.tied]
        if len(untied) > 1:
            raise CheckpointKeyError(f"{name} is named by several rules: {untied[0]} and {untied[1]}")
        if not fitting:
            unmapped.append(name)
        for rule, pattern, values in fitting:
            if not (rule.ours and rule.theirs):  # left out
                continue
            sides = _sides_of(rule)
            stack = sides[1 - known].stack
            common = {k: v for k, v in values.items() if k not in stack}
            index = tuple(int(values[k]) for k in stack)
            new = _Instance(rule, sides, common, {})
            instance = found.setdefault((rule, frozenset(common.items())), new)
            instance.names[pattern.text, index] = name
    if unmapped:
        raise CheckpointKeyError(f"no rule names {some_of(sorted(unmapped))}; add one, or leave them out by a rule")
    return list(found.values())


class _Sizes(NamedTuple):
    """The sizes that both sides of an instance share.

    Args:
        stacks: sizes of the axes that are numbers in the other side's names.
        block: shape of one of our tensors without those axes; its size along `dim` is ignored.
        dim: the axis of the parts.
        lengths: of every part along `dim`, on our side and on theirs; they differ only by padding.
        dtype: of all tensors.
    """

    stacks: dict[str, int]
    block: Shape
    dim: int
    lengths: tuple[tuple[int, ...], tuple[int, ...]]
    dtype: torch.dtype

    def described(self, number: int, sides: _Sides, names: _Names) -> Iterator[tuple[str, Described]]:
        """Yield shape and dtype of every tensor of one side, by name."""
        side = sides[number]
        lead = tuple(self.stacks[name] for name in side.stack)
        by_pattern = {}
        for text, (_, parts) in side.patterns.items():
            length = sum(self.lengths[number][part] for part in parts)
            block = with_axis(self.block, self.dim, length)
            by_pattern[text] = Described((*lead, *side.axes(block)), self.dtype)
        return ((name, by_pattern[text]) for (text, _), name in names.items())


def _sizes_of(instance: _Instance, tensors: Tensors, known: int) -> _Sizes:
    """The sizes of an instance, from the tensors of the known side: 0 for ours, 1 for theirs.

    Raises:
        CheckpointKeyError: a tensor is missing.
        CheckpointMismatchError: shapes or dtypes do not fit each other or the rule.
    """
    rule = instance.rule
    names = instance.names
    side = instance.sides[known]
    other = instance.sides[1 - known]
    (text, _), name = next(iter(names.items()))
    counts = [1 + max(index[axis] for _, index in names) for axis in range(len(other.stack))]
    within = [min(count, len(names) + 1) for count in counts]  # of larger numbers, one before them is missing
    for place, wanted in instance.names_on(known, within):
        if place not in names:
            raise CheckpointKeyError(f"{wanted} is missing; {name} cannot be converted without it")
    first = tensors[name]
    depth = len(side.stack)
    num_axes = len(first.shape) - depth
    is_cut = rule.parts > 1 or rule.rows is not None
    num_needed = rule.dim + 1 if is_cut else 0
    if rule.transposed:
        num_needed = max(num_needed, 2)
    if num_axes < num_needed:
        raise CheckpointMismatchError(f"{name} has shape {list(first.shape)}, too few axes for {rule}")
    block = side.axes(first.shape[depth:])
    shares = rule.shares or (1,) * rule.parts
    length = block[rule.dim] if rule.dim < len(block) else 1
    total = sum(shares[part] for part in side.patterns[text][1])
    groups = math.lcm(*(own.groups for own in instance.sides if len(own.patterns) < rule.parts))
    if any(length * share % (total * groups) for share in shares):
        raise CheckpointMismatchError(
            f"{name} of {list(first.shape)} cannot be cut along axis {rule.dim} into parts of shares {shares} in "
            f"{groups} group(s): {rule}"
        )
    lengths = tuple(length * share // total for share in shares)
    padding = 0 if rule.rows is None else lengths[0] - rule.rows
    if padding < 0 or (padding and known == 1):
        raise CheckpointMismatchError(f"{name} of shape {list(first.shape)} does not have {rule.rows} rows: {rule}")
    stacks = dict(zip((*other.stack, *side.stack), (*counts, *first.shape)))
    their_lengths = lengths if rule.rows is None else (rule.rows,)
    sizes = _Sizes(stacks, block, rule.dim, (lengths, their_lengths), first.dtype)
    for own, expected in sizes.described(known, instance.sides, names):
        found = tensors[own]
        if expected != found:
            raise CheckpointMismatchError(
                f"{own} has {found.dtype} {list(found.shape)}, which does not fit {name} of "
                f"{first.dtype} {list(first.shape)} by {rule}"
            )
    return sizes


class _Segment(NamedTuple):
    """Elements `[first, end)` of a part that are consecutive in a tensor, from `position` on along the parts' axis."""

    part: int
    position: int
    first: int
    end: int


def _segments(side: _Side, lengths: Shape) -> dict[str, list[_Segment]]:
    """The segments of each tensor of a side, by pattern; `lengths` are those of every part."""
    found: dict[str, list[_Segment]] = {}
    for text, (_, parts) in side.patterns.items():
        groups = side.groups if len(parts) > 1 else 1
        position = 0
        found[text] = []
        for group, part in itertools.product(range(groups), parts):
            length = lengths[part] // groups
            found[text].append(_Segment(part, position, group * length, (group + 1) * length))
            position += length
    return found


def _pieces(sides: _Sides, sizes: _Sizes, ours: _Names, theirs: _Names) -> Iterator[tuple[str, Piece]]:
    """The boxes that both sides share, with our name of each."""
    our_side, their_side = sides
    lead = (1,) * len(our_side.stack)
    logical = tuple(range(len(lead), len(lead) + len(sizes.block)))
    axes = ((None,) * len(their_side.stack)) + their_side.axes(logical)
    described = dict(sizes.described(1, sides, theirs))
    our_segments, their_segments = map(_segments, sides, sizes.lengths)
    zeros = (0,) * len(sizes.block)
    for (their_text, in_ours), their_name in theirs.items():
        for (our_text, in_theirs), our_name in ours.items():
            for own, other in itertools.product(our_segments[our_text], their_segments[their_text]):
                start = max(own.first, other.first)
                end = min(own.end, other.end)
                block = with_axis(sizes.block, sizes.dim, end - start)
                if own.part != other.part or start >= end or 0 in block:
                    continue
                ours_at = with_axis(zeros, sizes.dim, own.position + start - own.first)
                theirs_at = their_side.axes(with_axis(zeros, sizes.dim, other.position + start - other.first))
                within = Within(described[their_name].shape, (*in_theirs, *theirs_at), axes)
                yield our_name, Piece(Box((*in_ours, *ours_at), lead + block), their_name, within)
