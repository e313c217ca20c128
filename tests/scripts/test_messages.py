"""Every error of the package says whose it is, and what was expected and given, or what to do."""

import ast
import re
from pathlib import Path

import inplace_abn

PACKAGE = Path(inplace_abn.__file__).parent
REMEDY = re.compile(
    r"_REMEDY|\b(use|pass|leave|copy|call|build|convert|replace|set|ask|install|give|make|undo|remove|needs)\b",
    re.IGNORECASE,
)
"""Words that say what to do, and the name of a text that does."""
TORCHS = ("Expected more than 1", "Trying to backward through the graph a second time")
"""Errors that are torch's in torch's own words."""


OTHERS = ("memory/command.py", "kernels/node.py", "kernels/fakes.py")
"""Errors of a command line, those that are only logged, and those whose texts stand in a table."""


def messages():
    """The texts of all errors that are raised, as they are written, with their places."""
    for path in sorted(PACKAGE.rglob("*.py")):
        place = path.relative_to(PACKAGE).as_posix()
        for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
            if not isinstance(node, ast.Raise) or not isinstance(node.exc, ast.Call) or not node.exc.args:
                continue
            kind, text = ast.unparse(node.exc.func), node.exc.args[0]
            # What another function says is looked at there.
            is_text = isinstance(text, (ast.Constant, ast.JoinedStr, ast.BinOp))
            if is_text and place not in OTHERS and kind not in ("AttributeError", "AssertionError"):
                yield f"{place}:{node.lineno}", ast.unparse(text)


def test_messages_are_found():
    assert len(list(messages())) > 50


def test_a_message_says_what_was_expected_and_given_or_what_to_do():
    wrong = {}
    for place, text in messages():
        is_complete = ("expected" in text and "got" in text) or REMEDY.search(text)
        if not is_complete and not any(words in text for words in TORCHS):
            wrong[place] = text
    assert wrong == {}


def test_a_message_names_the_package():
    wrong = {place: text for place, text in messages() if "inplace_abn" not in text}
    assert {place: text for place, text in wrong.items() if not any(words in text for words in TORCHS)} == {}
