"""Tables that fit a terminal. Names and sentences that differ in their numbers only become one."""

from __future__ import annotations

import re
from collections.abc import Sequence
from itertools import zip_longest

_NUMBER = re.compile(r"\d+")
_GAP = "  "


def shape_of(name: str) -> str:
    """A module's name without its indices. The last part keeps what is a name, such as ``bn1``."""
    path, dot, last = name.rpartition(".")
    return _NUMBER.sub("\0", path) + dot + ("\0" if last.isdigit() else last)


def numberless(text: str) -> str:
    """A text without its numbers. Texts that are equal without their numbers become one text in `joined`."""
    return _NUMBER.sub("\0", text)


def joined(texts: Sequence[str]) -> str:
    """Texts that are equal but for numbers, as one text: ``layer[1-4].0.bn1``.

    A range shows its ends, and may have gaps.
    """
    between = _NUMBER.split(texts[0])
    columns = zip(*(_NUMBER.findall(text) for text in texts), strict=True)
    numbers = [
        column[0] if len(set(column)) == 1 else f"[{min(column, key=int)}-{max(column, key=int)}]" for column in columns
    ]
    return "".join(a + b for a, b in zip(between, [*numbers, ""], strict=True))


def broken(text: str, width: int) -> list[str]:
    """The text in lines of at most that width. They end at a dot or space where possible."""
    lines = [""]
    for piece in re.findall(r"[^. ]*[. ]|[^. ]+", text):
        if lines[-1] and len(lines[-1]) + len(piece.rstrip()) > width:
            lines.append("")
        piece = lines.pop() + piece
        lines += [piece[i : i + width] for i in range(0, len(piece.rstrip()), width)] or [""]
    return [line.rstrip() for line in lines]


def lay_out(rows: Sequence[Sequence[str]], right: Sequence[int], width: int) -> list[str]:
    """Each row as lines below one another, and a rule. No line is longer than ``width``.

    The first cell of a row is broken into lines if there is not enough room for the others. The last column is left out
    if there is no room for it. The columns ``right`` are aligned to the right.
    """
    widths = [max(len(row[i]) for row in rows) for i in range(len(rows[0]))]
    others = sum(widths[1:-1]) + len(_GAP) * (len(widths) - 2)
    widths[0] = max(min(widths[0], width - others), 8)
    shown = len(widths) - (widths[0] + others + len(_GAP) + widths[-1] > width)
    formats = [f"{'>' if i in right else '<'}{width}" for i, width in enumerate(widths)]
    laid_out = []
    for row in rows:
        lines = zip_longest(*map(broken, row[:shown], widths), fillvalue="")
        laid_out.append("\n".join(_GAP.join(map(format, line, formats)).rstrip() for line in lines))
    return [*laid_out, _GAP.join("-" * width for width in widths[:shown])]


def readable(size: float) -> str:
    """A number of bytes, with its unit."""
    for unit in ("B", "KiB", "MiB"):
        if abs(size) < 1024:
            return f"{size:.0f} B" if unit == "B" else f"{size:.1f} {unit}"
        size /= 1024
    return f"{size:.2f} GiB"
