"""Writes tables between their markers in a page, and the line beneath each that says how it was made."""

from __future__ import annotations

import datetime
import importlib.metadata
import re
import shlex
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import torch

import inplace_abn

ROOT = Path(__file__).parents[1]
LINE = re.compile(
    r"^Made by `python scripts/.+` on \d{4}-\d\d-\d\d, commit [0-9a-f]{7,40}\+?, inplace_abn (?P<version>\d+\.\d+)\S*, "
    r"torch .+, \d+ threads?, \w+, CPU\.",
    re.MULTILINE,
)
"""What `made_by` returns. A remark may follow."""


def made_by(distributions: Iterable[str] = (), dtype: torch.dtype = torch.float32) -> str:
    """The line about this run, with the versions of those distributions that are installed."""
    command = shlex.join(["python", f"scripts/{Path(sys.argv[0]).name}", *sys.argv[1:]])
    versions = [f"inplace_abn {inplace_abn.__version__}", f"torch {torch.__version__}"]
    for distribution in dict.fromkeys(distributions):
        try:
            versions.append(f"{distribution} {importlib.metadata.version(distribution)}")
        except importlib.metadata.PackageNotFoundError:
            continue
    threads = torch.get_num_threads()
    return (
        f"Made by `{command}` on {datetime.date.today().isoformat()}, commit {commit()}, {', '.join(versions)}, "
        f"{threads} thread{'s' if threads > 1 else ''}, {str(dtype).removeprefix('torch.')}, CPU."
    )


def commit() -> str:
    """The short hash of the commit, with a plus if files other than pages have changed since."""

    def git(*arguments: str) -> str:
        try:
            return subprocess.run(["git", *arguments], cwd=ROOT, capture_output=True, text=True).stdout.strip()
        except FileNotFoundError:
            return ""

    # Tables of one run after another go into pages, which changes no figure.
    return (git("rev-parse", "--short", "HEAD") or "unknown") + "+" * bool(git("status", "--porcelain", "--", ":!*.md"))


def table_line(cells: Iterable[str]) -> str:
    return f"| {' | '.join(cells)} |"


def table_head(columns: Iterable[str]) -> str:
    columns = tuple(columns)
    return table_line(columns) + "\n" + table_line(["---"] * len(columns))


def write(page: Path, name: str, table: Iterable[str], line: str) -> None:
    """Puts the lines of a table, and the line about it, between the markers of that name in a page.

    Raises:
        ValueError: the page does not have each marker exactly once.
    """
    text = page.read_text(encoding="utf-8")
    begin, end = f"<!-- {name} -->\n", f"<!-- /{name} -->"
    if any(text.count(marker) != 1 for marker in (begin, end)):
        raise ValueError(f"expected one {begin.strip()} and one {end} in {page.name}")
    before, rest = text.split(begin)
    made = "\n".join([*table, "", line, ""])
    page.write_text(before + begin + made + end + rest.split(end)[1], encoding="utf-8")
