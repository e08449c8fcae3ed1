"""Maps the tensors of one side of a name map to those of the other: names, shapes and boxes, in integers only."""

from __future__ import annotations

import itertools
import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from fractions import Fraction
from typing import NamedTuple, TypeAlias

import torch

from opt_checkpoint.boxes.box import Box
from opt_checkpoint.convert.name_rules import NamedSide, NamePattern, NameRule, names_of, sides_of
from opt_checkpoint.disk.index import Within
from opt_checkpoint.errors import CheckpointKeyError, CheckpointMismatchError
from opt_checkpoint.state.sharded import Shape

_SHOWN = 8
Names: TypeAlias = dict[tuple[str, Shape], str]  # of one side's tensors: by pattern, and by the other side's axes


class Described(NamedTuple):
    """Shape and dtype of a tensor."""

    shape: Shape
    dtype: torch.dtype


class Piece(NamedTuple):
    """A box of one of our tensors, and the position of its values in one of their tensors."""

    box: Box
    theirs: str
    within: Within


@dataclass(frozen=True, slots=True, kw_only=True)
class Mapped:
    """The other side of some tensors.

    Args:
        ours: our tensors.
        theirs: their tensors.
        pieces: for each of our tensors, disjoint boxes that cover it except for padding.
        tied: by our names, the pieces of tensors whose values another of our tensors writes.
        left_out: names that a rule leaves out.
    """

    ours: dict[str, Described] = field(default_factory=dict)
    theirs: dict[str, Described] = field(default_factory=dict)
    pieces: dict[str, list[Piece]] = field(default_factory=dict)
    tied: dict[str, list[Piece]] = field(default_factory=dict)
    left_out: set[str] = field(default_factory=set)


def to_theirs(rules: Sequence[NameRule], ours: Mapping[str, Described]) -> Mapped:
    """Map our tensors to theirs.

    Raises:
        CheckpointKeyError: a name has no rule or several, two tensors become one, or a part of a tensor is missing.
        CheckpointMismatchError: shapes or dtypes do not fit a rule.
    """
    return _mapped(rules, ours, known=0)


def to_ours(rules: Sequence[NameRule], theirs: Mapping[str, Described]) -> Mapped:
    """Map their tensors to ours. Raises like `to_theirs`."""
    return _mapped(rules, theirs, known=1)


def _mapped(rules: Sequence[NameRule], tensors: Mapping[str, Described], *, known: int) -> Mapped:
    mapped = Mapped()
    instances = _instances(rules, tensors, known, mapped)
    claimed: dict[str, str] = {}
    for instance in sorted(instances, key=lambda i: i.rule.tied):
        instance.add_to(mapped, tensors, claimed)
    for name, pieces in mapped.tied.items():
        _check_tied(mapped, name, pieces)
    return mapped


def _check_tied(mapped: Mapped, name: str, pieces: list[Piece]) -> None:
    for piece in pieces:
        other = mapped.theirs.get(piece.theirs)
        if other is None:
            raise CheckpointKeyError(f"{name} is tied to {piece.theirs}, but no tensor is converted to that name")
        if other != Described(piece.within.shape, mapped.ours[name].dtype):
            raise CheckpointMismatchError(
                f"{name} is {mapped.ours[name].dtype} and tied to {piece.theirs} of shape {list(piece.within.shape)}, "
                f"which another rule makes {other.dtype} of shape {list(other.shape)}"
            )


class _Instance(NamedTuple):
    """A rule with the placeholders common to both sides filled in, and the known tensors that match it.

    Args:
        rule: the rule.
        common: values of the placeholders that both sides have in their names.
        names: the known tensors, by pattern and by the numbers that are axes on the other side.
        known: which side is known: 0 for ours, 1 for theirs.
    """

    rule: NameRule
    common: dict[str, str]
    names: Names
    known: int

    def add_to(self, mapped: Mapped, tensors: Mapping[str, Described], claimed: dict[str, str]) -> None:
        """Add the tensors of both sides and the pieces of this instance. Writes to `mapped` and `claimed`.

        Args:
            mapped: the result.
            tensors: the tensors of the known side.
            claimed: for each tensor of the other side so far, one tensor that it is made from.
        """
        sides = sides_of(self.rule)
        cut = _cut_of(self, sides, tensors)
        other = dict(_other_names(self, sides, cut))
        ours, theirs = (self.names, other) if self.known == 0 else (other, self.names)
        mapped.ours.update(cut.all_described(0, sides[0], ours))
        if self.known == 1 or not self.rule.tied:
            self._claim(list(other.values()), claimed)
            mapped.theirs.update(cut.all_described(1, sides[1], theirs))
        found = mapped.tied if self.rule.tied else mapped.pieces
        for name in ours.values():
            found[name] = []  # also for tensors without elements
        for name, piece in _pieces(sides, cut, ours, theirs):
            found[name].append(piece)

    def _claim(self, names: list[str], claimed: dict[str, str]) -> None:
        source = next(iter(self.names.values()))
        twice = [
            name for name, count in Counter(names).items() if count > 1 or claimed.setdefault(name, source) != source
        ]
        if twice:
            raise CheckpointKeyError(
                f"{twice[0]} would be created twice, from {claimed.get(twice[0], source)} and from {source}"
            )


def _instances(
    rules: Sequence[NameRule], tensors: Mapping[str, Described], known: int, mapped: Mapped
) -> list[_Instance]:
    """Every rule with each combination of common placeholders found in the names. Writes to `mapped.left_out`."""
    patterns = [[NamePattern(n) for n in dict.fromkeys(names_of((r.ours, r.theirs)[known]))] for r in rules]
    found: dict[tuple[int, frozenset[tuple[str, str]]], _Instance] = {}
    unmapped = []
    for name in tensors:
        fitting = [(i, p, v) for i, own in enumerate(patterns) for p in own if (v := p.match(name)) is not None]
        _check_one(name, [rules[i] for i, _, _ in fitting])
        if not fitting:
            unmapped.append(name)
        for number, pattern, values in fitting:
            rule = rules[number]
            if rule.leaves_out:
                mapped.left_out.add(name)
                continue
            stack = sides_of(rule)[1 - known].stack
            common = {k: v for k, v in values.items() if k not in stack}
            key = (number, frozenset(common.items()))
            instance = found.setdefault(key, _Instance(rule, common, {}, known))
            instance.names[(pattern.text, tuple(int(values[k]) for k in stack))] = name
    if unmapped:
        raise CheckpointKeyError(f"no rule names {_some(unmapped)}; add one, or leave them out by a rule")
    return list(found.values())


def _check_one(name: str, fitting: list[NameRule]) -> None:
    rules = [rule for rule in fitting if not rule.tied]
    if len(rules) > 1:
        raise CheckpointKeyError(f"{name} is named by several rules: {rules[0]} and {rules[1]}")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Cut:
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

    def described(self, number: int, side: NamedSide, pattern: str) -> Described:
        """Shape and dtype of one side's tensor."""
        length = sum(n for part, n in zip(side.parts, self.lengths[number]) if part.text == pattern)
        block = tuple(length if d == self.dim else n for d, n in enumerate(self.block))
        return Described((*(self.stacks[name] for name in side.stack), *_swapped(block, side)), self.dtype)

    def all_described(self, number: int, side: NamedSide, names: Names) -> Iterator[tuple[str, Described]]:
        """Shape and dtype of every tensor of one side, by name."""
        by_pattern = {pattern.text: self.described(number, side, pattern.text) for pattern in side.patterns}
        return ((name, by_pattern[text]) for (text, _), name in names.items())


def _swapped(axes: Shape, side: NamedSide) -> Shape:
    """Values per axis, reordered from our axes to those of a side. The inverse is the same operation."""
    return (*axes[:-2], axes[-1], axes[-2]) if side.swapped else axes


def _cut_of(instance: _Instance, sides: tuple[NamedSide, NamedSide], tensors: Mapping[str, Described]) -> _Cut:
    """The sizes of an instance, from the tensors of the known side.

    Raises:
        CheckpointKeyError: a tensor is missing.
        CheckpointMismatchError: shapes or dtypes do not fit each other or the rule.
    """
    rule, side = instance.rule, sides[instance.known]
    counts = _counts(instance, side, sides[1 - instance.known])
    name, first = next((n, tensors[n]) for n in instance.names.values())
    depth = len(side.stack)
    if len(first.shape) < depth + (2 if rule.transposed else 0) or (
        (rule.parts > 1 or rule.rows is not None) and len(first.shape) - depth <= rule.dim
    ):
        raise CheckpointMismatchError(f"{name} has shape {list(first.shape)}, too few axes for {rule}")
    stacks = {**counts, **dict(zip(side.stack, first.shape))}
    block = _swapped(first.shape[depth:], side)
    lengths = _lengths(instance, sides, {n: tensors[n].shape for n in instance.names.values()})
    cut = _Cut(stacks=stacks, block=block, dim=rule.dim, lengths=lengths, dtype=first.dtype)
    for other, expected in cut.all_described(instance.known, side, instance.names):
        if expected != tensors[other]:
            raise CheckpointMismatchError(
                f"{other} has {tensors[other].dtype} {list(tensors[other].shape)}, which does not fit {name} of "
                f"{first.dtype} {list(first.shape)} by {rule}"
            )
    return cut


def _counts(instance: _Instance, side: NamedSide, other: NamedSide) -> dict[str, int]:
    """The count of values of each number that only the known names have.

    Raises:
        CheckpointKeyError: a tensor for one of the values is missing.
    """
    indices = [index for _, index in instance.names]
    counts = [1 + max(index[axis] for index in indices) for axis in range(len(other.stack))]
    if math.prod(counts) * len(side.patterns) == len(instance.names):  # they are distinct, so none is missing
        return dict(zip(other.stack, counts))
    every = itertools.product(side.patterns, itertools.product(*map(range, counts)))
    pattern, index = next((p, i) for p, i in every if (p.text, i) not in instance.names)
    values = {**instance.common, **{name: str(n) for name, n in zip(other.stack, index)}}
    raise CheckpointKeyError(
        f"{pattern.filled(values)} is missing; {next(iter(instance.names.values()))} cannot be converted without it"
    )


def _lengths(
    instance: _Instance, sides: tuple[NamedSide, NamedSide], shapes: Mapping[str, Shape]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """The length of every part, on our side and on theirs.

    Raises:
        CheckpointMismatchError: shares or groups do not divide a length, or tensors contradict each other.
    """
    rule, side = instance.rule, sides[instance.known]
    shares = rule.shares or (1,) * rule.parts
    units = {}
    for pattern in side.patterns:
        name = next(n for (text, _), n in instance.names.items() if text == pattern.text)
        block = _swapped(shapes[name][len(side.stack) :], side)
        length = block[rule.dim] if rule.dim < len(block) else 1
        units[name] = Fraction(length, sum(shares[part] for part in side.parts_of(pattern)))
    name, unit = next(iter(units.items()))
    lengths = tuple(unit * share for share in shares)
    divisor = math.lcm(*(s.groups for s in sides if len(s.patterns) < rule.parts))
    if len(set(units.values())) > 1 or any(n.denominator > 1 or n.numerator % divisor for n in lengths):
        found = ", ".join(f"{n} of {list(shapes[n])}" for n in units)
        raise CheckpointMismatchError(
            f"{found} cannot be cut along axis {rule.dim} into parts of shares {shares} in {divisor} group(s): {rule}"
        )
    whole = tuple(int(n) for n in lengths)
    if rule.rows is None:
        return whole, whole
    if whole[0] < rule.rows or (instance.known == 1 and whole[0] != rule.rows):
        raise CheckpointMismatchError(f"{name} of shape {list(shapes[name])} does not have {rule.rows} rows: {rule}")
    return whole, (rule.rows,)


def _other_names(
    instance: _Instance, sides: tuple[NamedSide, NamedSide], cut: _Cut
) -> Iterator[tuple[tuple[str, Shape], str]]:
    """The tensors of the other side, by pattern and numbers."""
    side, known = sides[1 - instance.known], sides[instance.known]
    for pattern in side.patterns:
        for index in itertools.product(*(range(cut.stacks[name]) for name in known.stack)):
            numbers = {name: str(n) for name, n in zip(known.stack, index)}
            yield (pattern.text, index), pattern.filled({**instance.common, **numbers})


def _pieces(sides: tuple[NamedSide, NamedSide], cut: _Cut, ours: Names, theirs: Names) -> Iterator[tuple[str, Piece]]:
    """The boxes that both sides share, with our name of each."""
    our_depth, their_depth = len(sides[0].stack), len(sides[1].stack)
    logical = tuple(range(our_depth, our_depth + len(cut.block)))
    axes = ((None,) * their_depth) + _swapped(logical, sides[1])
    shapes = {pattern.text: cut.described(1, sides[1], pattern.text).shape for pattern in sides[1].patterns}
    runs: dict[tuple[str, str], list[tuple[Shape, Shape, Shape]]] = defaultdict(list)
    for run in (run for part in range(len(sides[0].parts)) for run in _runs(sides, cut, part)):
        sizes = tuple(run.length if d == cut.dim else n for d, n in enumerate(cut.block))
        starts = [tuple(s if d == cut.dim else 0 for d in range(len(cut.block))) for s in run.starts]
        if 0 not in sizes:
            runs[run.patterns].append((starts[0], _swapped(starts[1], sides[1]), (1,) * our_depth + sizes))
    for (their_text, in_ours), their_name in theirs.items():
        for (our_text, in_theirs), our_name in ours.items():
            for our_start, their_start, sizes in runs.get((our_text, their_text), ()):
                within = Within(shapes[their_text], (*in_theirs, *their_start), axes)
                yield our_name, Piece(Box((*in_ours, *our_start), sizes), their_name, within)


class _Run(NamedTuple):
    """Elements of one part that are consecutive on both sides along the axis of the parts.

    Args:
        patterns: our name and theirs.
        starts: position of the first one in our tensor and in theirs.
        length: number of elements.
    """

    patterns: tuple[str, str]
    starts: tuple[int, int]
    length: int


def _runs(sides: tuple[NamedSide, NamedSide], cut: _Cut, part: int) -> Iterator[_Run]:
    length = min(cut.lengths[0][part], cut.lengths[1][part])
    groups = [side.groups if len(side.parts_of(side.parts[part])) > 1 else 1 for side in sides]
    edges = sorted({length * k // count for count in groups for k in range(count + 1)})
    for start, stop in itertools.pairwise(edges):
        starts = [
            _start(side, own, part, start, count) for side, own, count in zip(sides, cut.lengths, groups, strict=True)
        ]
        texts = (sides[0].parts[part].text, sides[1].parts[part].text)
        yield _Run(texts, (starts[0], starts[1]), stop - start)


def _start(side: NamedSide, lengths: tuple[int, ...], part: int, element: int, groups: int) -> int:
    """Position of an element of a part along the axis of its tensor."""
    together = side.parts_of(side.parts[part])
    per_group = {other: lengths[other] // groups for other in together}
    group, rest = divmod(element, per_group[part]) if groups > 1 else (0, element)
    return group * sum(per_group.values()) + sum(n for other, n in per_group.items() if other < part) + rest


def _some(names: Iterable[str]) -> str:
    every = sorted(names)
    return ", ".join(every[:_SHOWN]) + (f" and {len(every) - _SHOWN} more" if len(every) > _SHOWN else "")
