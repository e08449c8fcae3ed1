"""Rules that map our tensor names to those of another format, and describe how fused tensors are cut.

A rule is a row of a table. Both sides of it have the same parts in the same order. A tensor with several parts has them
one after another along one axis, or interleaved in groups. For example, this rule maps a query-key-value weight of
Megatron-Core, with 8 groups of 4 queries, one key and one value, to three tensors of a Llama by Hugging Face:

    NameRule(
        ours="decoder.layers.{layer}.self_attention.linear_qkv.weight",
        theirs=tuple(f"model.layers.{{layer}}.self_attn.{part}_proj.weight" for part in "qkv"),
        shares=(4, 1, 1),
        groups=8,
    )
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import NamedTuple

from opt_checkpoint.convert.foreign_files import read_rows
from opt_checkpoint.errors import CheckpointValueError
from opt_checkpoint.run.save_load import PathLike

_PLACEHOLDER = re.compile(r"\{([A-Za-z_][A-Za-z0-9_]*)(:path)?\}")
_NUMBER, _TEXT = "(0|[1-9][0-9]*)", "(.+)"


class NamePattern:
    """A name with placeholders: `{layer}` is a whole number, `{rest:path}` any non-empty text.

    Args:
        text: for example `model.layers.{layer}.mlp.up_proj.weight`.

    Raises:
        CheckpointingException: braces do not match, or a placeholder occurs twice.
    """

    __slots__ = ("_names", "_regex", "numbers", "text", "texts")

    def __init__(self, text: str) -> None:
        found = _PLACEHOLDER.findall(text)
        names = [name for name, _ in found]
        if len(set(names)) != len(names) or set("{}") & set(_PLACEHOLDER.sub("", text)):
            raise CheckpointValueError(
                f"name pattern {text!r}: placeholders are {{name}} for a number and {{name:path}} for text, each once"
            )
        self.text, self._names = text, names
        self.numbers = tuple(name for name, is_text in found if not is_text)
        self.texts = tuple(name for name, is_text in found if is_text)
        literals = _PLACEHOLDER.split(text)[::3]
        groups = [_TEXT if is_text else _NUMBER for _, is_text in found]
        self._regex = re.compile("".join(re.escape(a) + b for a, b in zip(literals, [*groups, ""])), re.DOTALL)

    def match(self, name: str) -> dict[str, str] | None:
        """The values of the placeholders if a name matches, else None."""
        matched = self._regex.fullmatch(name)
        return dict(zip(self._names, matched.groups())) if matched else None

    def filled(self, values: Mapping[str, str]) -> str:
        """The name that has these values."""
        return _PLACEHOLDER.sub(lambda found: values[found[1]], self.text)


@dataclass(frozen=True, slots=True, kw_only=True)
class NameRule:
    """Maps some of our tensors to tensors of the other side with the same values.

    A number that only one side has in its names is a leading axis of the other side's tensors. For example, with
    `decoder.layers.mlp.linear_fc2.weight` and `model.layers.{layer}.mlp.down_proj.weight`, our tensor has shape
    `(layers, ...)`. Several such axes have the order of the numbers in the names.

    Args:
        ours: name of our tensor; or several names, one for each part. Parts with the same name are in one tensor.
        theirs: the same for the other side. If one side is empty, tensors with the other side's names are left out.
        shares: relative lengths of the parts along `dim`; empty for equal parts.
        groups: number of groups in which the parts are interleaved in one of our tensors that has several parts: each
            group has one piece of every part.
        their_groups: the same for the other side.
        dim: the axis along which parts are concatenated, counted on our side without the axes that are numbers.
        transposed: whether the last two axes are swapped on the other side.
        rows: the other side has only the first `rows` along `dim`; our tensor has padding after them (of a vocabulary).
        tied: another rule reads and writes the tensors named in `theirs`; our tensor must have the same values.

    Raises:
        CheckpointingException: the fields contradict each other.
    """

    ours: str | tuple[str, ...]
    theirs: str | tuple[str, ...]
    shares: tuple[int, ...] = ()
    groups: int = 1
    their_groups: int = 1
    dim: int = 0
    transposed: bool = False
    rows: int | None = None
    tied: bool = False

    def __post_init__(self) -> None:
        if not all(isinstance(field, str | tuple) for field in (self.ours, self.theirs, self.shares)):
            raise CheckpointValueError(f"{self!r}: ours and theirs must be names or tuples of names, shares a tuple")
        lengths = {len(names) for names in (self.ours, self.theirs) if isinstance(names, tuple) and names}
        lengths |= {len(self.shares)} - {0}
        if len(lengths) > 1 or not (self.ours or self.theirs):
            raise CheckpointValueError(f"{self}: ours, theirs and shares must have the same number of parts")
        self._check_numbers()
        self._check_placeholders()

    def __str__(self) -> str:
        return f"the rule for {self.ours or 'nothing'} = {self.theirs or 'nothing'}"

    @property
    def parts(self) -> int:
        """Number of parts."""
        return max(len(names) for names in (self.ours, self.theirs, self.shares, ("",)) if isinstance(names, tuple))

    @property
    def leaves_out(self) -> bool:
        """Whether tensors with these names are not converted."""
        return not (self.ours and self.theirs)

    def _check_numbers(self) -> None:
        counts = {"groups": self.groups, "their_groups": self.their_groups, "rows": self.rows or 1}
        counts.update({f"shares[{i}]": share for i, share in enumerate(self.shares)})
        for name, count in counts.items():
            if isinstance(count, bool) or not isinstance(count, int) or count < 1:
                raise CheckpointValueError(f"{self}: {name}={count!r} must be a whole number of at least 1")
        if isinstance(self.dim, bool) or not isinstance(self.dim, int) or self.dim < 0:
            raise CheckpointValueError(f"{self}: dim={self.dim!r} must be a whole number, counted from 0")
        if self.parts == 1 and (self.groups, self.their_groups) != (1, 1):
            raise CheckpointValueError(f"{self}: groups need several parts; there is one")
        if self.parts > 1 and self.rows is not None:
            raise CheckpointValueError(f"{self}: rows can be given for a tensor of one part only")

    def _check_placeholders(self) -> None:
        sides = [[NamePattern(name) for name in names_of(side)] for side in (self.ours, self.theirs) if side]
        for patterns in sides:
            if len({(frozenset(p.numbers), frozenset(p.texts)) for p in patterns}) > 1:
                raise CheckpointValueError(f"{self}: names of one side must have the same placeholders")
        if len({frozenset(patterns[0].texts) for patterns in sides}) > 1:
            raise CheckpointValueError(f"{self}: both sides must have the same text placeholders")


class NamedSide(NamedTuple):
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
    def patterns(self) -> tuple[NamePattern, ...]:
        """The distinct names."""
        return tuple({pattern.text: pattern for pattern in self.parts}.values())

    def parts_of(self, pattern: NamePattern) -> list[int]:
        """The parts that are in the tensor of this name."""
        return [number for number, part in enumerate(self.parts) if part.text == pattern.text]


@lru_cache(maxsize=1024)
def sides_of(rule: NameRule) -> tuple[NamedSide, NamedSide]:
    """Our side and their side of a rule that leaves nothing out."""
    ours, theirs = _patterns(rule.ours, rule.parts), _patterns(rule.theirs, rule.parts)
    our_stack = tuple(name for name in theirs[0].numbers if name not in ours[0].numbers)
    their_stack = tuple(name for name in ours[0].numbers if name not in theirs[0].numbers)
    return (
        NamedSide(ours, rule.groups, our_stack, False),
        NamedSide(theirs, rule.their_groups, their_stack, rule.transposed),
    )


def _patterns(names: str | Sequence[str], parts: int) -> tuple[NamePattern, ...]:
    each = names_of(names)
    return tuple(NamePattern(name) for name in (each * parts if len(each) == 1 else each))


def names_of(names: str | Sequence[str]) -> tuple[str, ...]:
    """One name or several as a tuple of names; empty for an empty name."""
    if isinstance(names, str):
        return (names,) if names else ()
    return tuple(names)


def fingerprint(rules: Sequence[NameRule]) -> str:
    """A short text that is equal only for equal rules."""
    return hashlib.sha256(repr(tuple(rules)).encode()).hexdigest()[:16]


SAME_NAMES = (NameRule(ours="{name:path}", theirs="{name:path}"),)


def read_name_rules(file: PathLike) -> list[NameRule]:
    """Rules from a JSON list of objects with `NameRule`'s fields.

    Raises:
        CheckpointingException: it is not such a list.
    """
    return read_rows(file, NameRule)
