"""What is written down of something that failed."""

from __future__ import annotations


def reason(error: BaseException) -> str:
    """In one line: the error's kind and first line, and the second one if the first only introduces it."""
    first, *more = str(error).strip().splitlines() or ["no message"]
    told = f"{first} {more[0]}" if first.endswith(":") and more else first
    return f"{type(error).__name__}: {told}"
