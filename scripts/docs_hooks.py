"""The hook that mkdocs calls for each page before it renders it.

README.md is the home page and CONTRIBUTING.md is another page, so that each text exists once. A link to a file that is
not a page becomes the name of the file.
"""

from __future__ import annotations

import os
import re
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]
TAKEN = {"index.md": "README.md", "contributing.md": "CONTRIBUTING.md"}
"""Pages whose text is a file outside of docs."""
LINK = re.compile(r"(?P<image>!?)\[(?P<text>[^]]*)]\((?P<target>[^)#\s]*)(?P<anchor>#[^)\s]*)?\)")


def on_page_markdown(markdown: str, page: Any, **_: Any) -> str:
    """Returns the text of a page. mkdocs calls this function for each page."""
    name = page.file.src_path
    taken = TAKEN.get(name)
    text = (ROOT / taken).read_text(encoding="utf-8") if taken else markdown
    return relinked(text, ROOT if taken else (ROOT / "docs" / name).parent)


def relinked(text: str, folder: Path) -> str:
    """The text with links that are relative to docs. The links in ``text`` are relative to ``folder``."""
    pages = {(ROOT / source).resolve(): name for name, source in TAKEN.items()}

    def replaced(link: re.Match[str]) -> str:
        target, anchor = link["target"], link["anchor"] or ""
        if not target or "://" in target:
            return link[0]
        path = (folder / target).resolve()
        if path in pages:
            return f"{link['image']}[{link['text']}]({pages[path]}{anchor})"
        if path.is_relative_to(ROOT / "docs"):
            return f"{link['image']}[{link['text']}]({path.relative_to(ROOT / 'docs').as_posix()}{anchor})"
        shown = os.path.relpath(path, ROOT)
        return f"`{shown}`" if link["text"].strip("`") in (shown, path.name) else f"{link['text']} (`{shown}`)"

    return LINK.sub(replaced, text)
