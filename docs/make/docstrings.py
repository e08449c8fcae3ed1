"""A docstring of this project as Markdown: its sections become lists, its examples fenced code."""

import inspect
import re
from collections.abc import Iterator

SECTIONS = {
    "Args:": "Arguments",
    "Attributes:": "Attributes",
    "Raises:": "Raises",
    "Returns:": "Returns",
    "Yields:": "Yields",
    "Example:": "Example",
    "Examples:": "Examples",
}
ITEM = re.compile(r"([\w*., ]+?)(?: \([^)]*\))?: (.*)")


def markdown(docstring: str | None) -> str:
    """The docstring as Markdown; empty for None."""
    lines = inspect.cleandoc(docstring or "").splitlines()
    return "\n".join(_blocks(lines)).strip()


def _blocks(lines: list[str]) -> Iterator[str]:
    at = 0
    while at < len(lines):
        line = lines[at]
        if line.strip() in SECTIONS and _indent(line) == 0:
            end = _end_of_indented(lines, at + 1)
            yield from _section(SECTIONS[line.strip()], lines[at + 1 : end])
        elif line.lstrip().startswith(">>>"):
            end = next((n for n in range(at, len(lines)) if not lines[n].strip()), len(lines))
            yield from ("", "```pycon", *_dedented(lines[at:end]), "```", "")
        elif _indent(line) >= 4 and (at == 0 or not lines[at - 1].strip() or _indent(lines[at - 1]) < 4):
            end = _end_of_indented(lines, at)
            yield from ("", "```text", *_dedented(lines[at:end]), "```", "")
        else:
            end = at + 1
            yield _escaped(re.sub("::$", ":", line))  # as reStructuredText begins a block
        at = end


def _section(title: str, lines: list[str]) -> Iterator[str]:
    """The items of a section as a list; text without items unchanged."""
    yield from ("", f"**{title}**", "")
    body = _dedented(lines)
    items: list[list[str]] = []
    for line in body:
        found = ITEM.fullmatch(line) if _indent(line) == 0 else None
        if found:
            items.append([f"`{found[1]}`: {found[2]}"])
        elif items and line.strip():
            items[-1].append(line.strip())
        elif line.strip():
            items.append([line.strip()])
    if title == "Returns" or not any(item[0].startswith("`") for item in items):
        yield _escaped(" ".join(line for item in items for line in item))
    else:
        yield from (f"- {_escaped(' '.join(item))}" for item in items)
    yield ""


def _end_of_indented(lines: list[str], start: int) -> int:
    """The first line after `start` that is neither indented nor blank; blank lines before it are left out."""
    end = start
    while end < len(lines) and (not lines[end].strip() or _indent(lines[end]) > 0):
        end += 1
    while end > start and not lines[end - 1].strip():
        end -= 1
    return end


def _dedented(lines: list[str]) -> list[str]:
    least = min((_indent(line) for line in lines if line.strip()), default=0)
    return [line[least:] for line in lines]


def _indent(line: str) -> int:
    return len(line) - len(line.lstrip())


def _escaped(line: str) -> str:
    """Outside of `code`: what Markdown would take for HTML, emphasis, roles or headings."""
    parts = re.split(r"(`[^`]*`)", line)
    parts[::2] = [re.sub(r"([<*\[\]{}|]|\b_+(?=\w)|(?<=\w)_+\b)", r"\\\1", part) for part in parts[::2]]
    return re.sub(r"^(\s*)([#>+])", r"\1\\\2", "".join(parts))
