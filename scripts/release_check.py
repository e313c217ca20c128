#!/usr/bin/env python
"""Checks that all that names a release agrees: the version, the tag, CHANGELOG.md, CITATION.cff and the addresses.

    python scripts/release_check.py --tag v2.0.0 --repository https://github.com/OWNER/NAME

With --repository the addresses of [project.urls] are written into pyproject.toml first, where they are missing. The
tree does not know them. It needs Python alone, and prints what does not agree.
"""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Iterator
from pathlib import Path

PAGES = {"Repository": "", "Issues": "/issues", "Changelog": "/blob/main/CHANGELOG.md"}
"""The addresses that a release has, relative to that of the repository."""
HEADING = "[project.urls]\n"


def urls(pyproject: str) -> dict[str, str]:
    section = pyproject.partition(HEADING)[2].partition("\n[")[0]
    return dict(re.findall(r'^"?([^"=\n]+?)"? = "(.*)"$', section, re.MULTILINE))


def filled(pyproject: str, repository: str) -> str:
    missing = PAGES.keys() - urls(pyproject).keys()
    lines = [f'{name} = "{repository}{page}"\n' for name, page in PAGES.items() if name in missing]
    return pyproject.replace(HEADING, HEADING + "".join(lines))


def problems(root: Path, tag: str | None, repository: str | None) -> Iterator[str]:
    def first(pattern: str, name: str) -> str | None:
        found = re.search(pattern, (root / name).read_text(encoding="utf-8"), re.MULTILINE)
        return found and found[1]

    version = first(r'^__version__ = "(.+)"$', "inplace_abn/__init__.py")
    told = first(r"^## (\S+)", "CHANGELOG.md")
    if told != version:
        yield f"the version is {version}, but CHANGELOG.md begins with {told}"
    cited = first(r"^version: (.+)$", "CITATION.cff")
    if cited != version:
        yield f"the version is {version}, but CITATION.cff has {cited}"
    if first(r"^date-released: '?(\d{4}-\d\d-\d\d)'?$", "CITATION.cff") is None:
        yield "CITATION.cff has no date-released"
    if tag is not None and tag != f"v{version}":
        yield f"the version is {version}, but the tag is {tag}"
    found = urls((root / "pyproject.toml").read_text(encoding="utf-8"))
    for name, page in PAGES.items():
        url = found.get(name)
        if url is None:
            yield f"[project.urls] has no {name}"
        elif repository is not None and url != repository + page:
            yield f"[project.urls] has {url} as {name}, but the repository is {repository}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("--tag", help="the tag of the release")
    parser.add_argument("--repository", help="the repository's address, for [project.urls]")
    parser.add_argument("--root", type=Path, default=Path(__file__).parents[1], help=argparse.SUPPRESS)
    args = parser.parse_args()
    repository = args.repository and args.repository.rstrip("/")
    if repository:
        path = args.root / "pyproject.toml"
        path.write_text(filled(path.read_text(encoding="utf-8"), repository), encoding="utf-8")
    found = list(problems(args.root, args.tag, repository))
    for problem in found:
        print(f"release_check: {problem}")
    return bool(found)


if __name__ == "__main__":
    sys.exit(main())
