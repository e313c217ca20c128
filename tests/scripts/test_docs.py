"""The Python in README.md and in the pages of docs runs and prints what they show, their links lead somewhere, and
their commands name files and options that exist."""

import ast
import contextlib
import importlib.util
import io
import re
import shlex
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

import generated
import pytest
import torch

import inplace_abn
from inplace_abn.memory import Usage
from inplace_abn.memory.plot import _places

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / name for name in ("README.md", "CONTRIBUTING.md")] + sorted((ROOT / "docs").glob("*.md"))
IDS = [page.name for page in PAGES]
pytestmark = pytest.mark.skipif(not (ROOT / "docs").is_dir(), reason="needs the documentation")

BLOCK = re.compile(
    r"^(?:```(?P<language>\w*)\n(?P<text>.*?)^```$|<!-- setup\n(?P<setup>.*?)^-->$)", re.MULTILINE | re.DOTALL
)
LINK = re.compile(r"!?\[[^]]*]\((?P<target>[^)\s]+)\)")
NUMBER = re.compile(r"(?<![\w.])\d+(?:\.\d+)?(?:e-?\d+)?(?![\w.]*\w)")
MEMORY_TOLERANCE = 0.03
"""Another release of torch may hold a little more or less besides activations."""
OPTIONAL = ("transformers", "timm")
TABLES = [
    *(("README.md", "models"), ("docs/zoo.md", "models"), ("docs/scale.md", "scale")),
    *(("docs/comparison.md", name) for name in ("blocks", "checkpointing", "compiling")),
]
"""Tables that scripts write, and the names of their markers."""


class Block(NamedTuple):
    language: str
    text: str
    line: int


def blocks(page):
    text = page.read_text(encoding="utf-8")
    return [
        Block(
            "setup" if found["setup"] else found["language"],
            found["setup"] or found["text"],
            text[: found.start()].count("\n") + 1,
        )
        for found in BLOCK.finditer(text)
    ]


def programs(page):
    """The Python blocks of a page, each with the output that the page shows for it, or None."""
    found = blocks(page)
    return [
        (block, after.text if after is not None and block.language == "python" and after.language == "text" else None)
        for block, after in zip_longest(found, found[1:])
        if block.language in ("python", "setup")
    ]


def without_peaks(text):
    """The text, with # for the numbers in the peak column of a memory report. Peaks include scratch memory of
    convolutions, which depends on the processor and on the number of threads."""
    lines, column = [], None
    for line in text.splitlines():
        if "peak of a step" in line:
            column = line.index("peak of a step")
        elif not line.strip():
            column = None
        elif column is not None:
            line = line[:column] + NUMBER.sub("#", line[column:])
        lines.append(line)
    return "\n".join(lines)


def same(shown, printed):
    """Whether the texts agree, except for spaces, for peaks, and for a tolerance of numbers."""
    texts = [without_peaks(text) for text in (shown, printed)]
    words = [NUMBER.sub("#", text).split() for text in texts]
    numbers = [[float(n) for n in NUMBER.findall(text)] for text in texts]
    # Percentages and other rounded numbers may differ by one.
    return words[0] == words[1] and all(
        a == pytest.approx(b, rel=MEMORY_TOLERANCE, abs=1 if b > 10 else 1e-9) for a, b in zip(*numbers, strict=True)
    )


def slug(heading):
    """The anchor that GitHub and mkdocs make of a heading of letters, digits and spaces."""
    text = re.sub(r"[`*]|\]\([^)]*\)|\[", "", heading.strip().lower())
    return re.sub(r"\s+", "-", re.sub(r"[^\w\s-]", "", text))


def anchors(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    headings = {slug(heading) for heading in re.findall(r"^#+ (.+)$", text, re.MULTILINE)}
    return headings | set(re.findall(r"^::: (\S+)$", text, re.MULTILINE))


@pytest.fixture
def compiler_settings():
    """A page sets the compiler's budget, which other tests of this process must not have."""
    with torch._functorch.config.patch(activation_memory_budget=1.0):
        yield


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_python_on_a_page_runs_and_prints_what_the_page_shows(page, one_thread, compiler_settings, monkeypatch):
    found = programs(page)
    if not found:
        pytest.skip("has no Python")
    monkeypatch.chdir(ROOT)
    # Tables are as wide as the terminal.
    monkeypatch.setenv("COLUMNS", "80")
    # Classes that a page defines need a module's name.
    namespace = {"__name__": "__main__"}
    skipped = []
    for block, shown in found:
        missing = [
            p for p in OPTIONAL if re.search(rf"import .*\b{p}\b", block.text) and not importlib.util.find_spec(p)
        ]
        if missing:
            skipped.append(f"line {block.line} needs {missing[0]}")
            continue
        out = io.StringIO()
        # There are as many lines above the code as on the page, so that errors name the line of the page.
        code = compile("\n" * block.line + block.text, str(page), "exec")
        with contextlib.redirect_stdout(out):
            exec(code, namespace)
        if shown is None:
            assert block.language == "setup" or not out.getvalue(), (
                f"line {block.line} prints what the page does not show"
            )
        else:
            assert same(shown, out.getvalue()), f"line {block.line} prints\n{out.getvalue()}"
    if len(skipped) == len(found):
        pytest.skip("; ".join(skipped))


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_relative_links_lead_to_files_and_anchors_that_there_are(page):
    text = re.sub(r"^```.*?^```$", "", page.read_text(encoding="utf-8"), flags=re.MULTILINE | re.DOTALL)
    wrong = []
    for link in LINK.finditer(text):
        target, _, anchor = link["target"].partition("#")
        if "://" in target:
            continue
        file = page if not target else (page.parent / target).resolve()
        if not file.exists() or (anchor and anchor not in anchors(file)):
            wrong.append(link["target"])
    assert not wrong


def commands(text):
    """Yields the words of each command. Comments are dropped, continued lines are joined, and lines are divided at
    &&."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        command = []
        for word in [*words, "&&"]:
            if word == "&&":
                if command:
                    yield command
                command = []
            elif command or not re.fullmatch(r"[A-Z_]+=.*", word):
                command.append(word)


def program_of(command):
    """Returns the file of this repository that a command runs, or None for other programs, and its arguments."""
    first, *rest = command
    if first.startswith("scripts/"):
        return ROOT / first, rest
    if first == "python" and rest[0] == "-m":
        name = rest[1].replace(".", "/")
        if rest[1].startswith("inplace_abn"):
            return ROOT / name / "command.py", rest[2:]
        return None, rest[2:]
    if first == "python":
        return ROOT / rest[0], rest[1:]
    return None, rest


@pytest.mark.parametrize("page", PAGES, ids=IDS)
def test_commands_name_files_and_options_that_there_are(page):
    wrong = []
    for block in blocks(page):
        for command in commands(block.text) if block.language == "bash" else ():
            program, arguments = program_of(command)
            if program is None:
                continue
            if not program.exists():
                wrong.append(str(program.relative_to(ROOT)))
                continue
            source = program.read_text(encoding="utf-8")
            for argument in arguments:
                if argument.startswith("--") and f'"{argument.partition("=")[0]}"' not in source:
                    # Shell scripts compare options without quotes, or pass them on.
                    if program.suffix == ".py" or argument not in source:
                        wrong.append(f"{program.name} {argument}")
                elif argument.startswith(("scripts/", "docs/", "examples/")) and not (ROOT / argument).exists():
                    wrong.append(argument)
    assert not wrong


def texts(tree):
    """The string constants of a program. Other values within a text are …."""
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield "".join(str(part.value) if isinstance(part, ast.Constant) else "…" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield node.value


def test_messages_that_are_explained_are_those_of_the_package():
    page = (ROOT / "docs/troubleshooting.md").read_text(encoding="utf-8")
    explained = [re.sub(r"\s+", " ", text) for text in re.findall(r"\*\*(.+?)\*\*", page, re.DOTALL)]
    explained += re.findall(r"^\| ((?!reason|---)[^|]+?) \|", page, re.MULTILINE)
    assert len(explained) > 30
    sources = [path.read_text(encoding="utf-8") for path in (ROOT / "inplace_abn").rglob("*.py")]
    known = "\n".join(text for source in sources for text in texts(ast.parse(source)))
    torchs = {"Expected more than 1 value per channel when training"}
    parts = [part.strip(" .") for text in explained for part in re.split(r"…|\bNAME\b|\bN\b|cuda:0,", text)]
    assert [part for part in parts if part not in known and part not in torchs] == []


def table(page, name):
    """What is between the markers of a name."""
    text = (ROOT / page).read_text(encoding="utf-8")
    return re.search(f"^<!-- {name} -->\n(.*?)^<!-- /{name} -->$", text, re.MULTILINE | re.DOTALL)[1]


@pytest.mark.parametrize(("page", "name"), TABLES)
def test_a_table_that_a_script_writes_says_by_which_run_and_is_of_this_version(page, name):
    found = generated.LINE.findall(table(page, name))
    assert len(found) == 1
    of_table, of_package = ([int(part) for part in v.split(".")[:2]] for v in (found[0], inplace_abn.__version__))
    assert of_table >= of_package


def test_all_tables_between_markers_are_checked():
    found = {
        (page.relative_to(ROOT).as_posix(), name)
        for page in PAGES
        for name in re.findall(r"^<!-- /(\w+) -->$", page.read_text(encoding="utf-8"), re.MULTILINE)
    }
    assert found == set(TABLES)


def rows(page, name, column):
    """The cells of each row of a table, but for those before a column and the one in it, which is the key."""
    cells = [line.strip("| ").split(" | ") for line in table(page, name).splitlines() if line.startswith("| ")]
    return {row[column]: row[column + 1 :] for row in cells}


def test_nets_that_are_in_two_tables_have_the_same_figures():
    readme, comparison = rows("README.md", "models", 1), rows("docs/comparison.md", "checkpointing", 0)
    nets = [net for net in comparison if net.startswith("timm ")]
    assert len(nets) == 2
    for net in nets:
        held, _, held_trained, peak, _, peak_trained, _ = (cell.split(",")[0] for cell in readme[net])
        native, converted = (cell.split(",")[0] for cell in comparison[net][:2])
        assert (native, converted) == (f"{held} / {peak}", f"{held_trained} / {peak_trained}")


def test_what_the_comparison_says_of_compiled_nets_is_in_its_table():
    text = (ROOT / "docs/comparison.md").read_text(encoding="utf-8")
    found = re.search(
        r"EfficientNet-B0 holds (\d+) instead of (\d+) MiB; others .+ ResNet-18 (\d+) instead of (\d+)", text
    )
    cells = rows("docs/comparison.md", "compiling", 0)
    named = [cells[f"torchvision {name}, 8x3x128x128"] for name in ("efficientnet_b0", "resnet18")]
    held = [row[i].split(" / ")[0] for row in named for i in (2, 0)]
    assert list(found.groups()) == held
    assert int(held[0]) < int(held[1])
    assert int(held[2]) > int(held[3])


def test_every_page_is_in_the_navigation():
    config = (ROOT / "mkdocs.yml").read_text(encoding="utf-8")
    named = set(re.findall(r"^  - .+: (\S+\.md)$", config, re.MULTILINE))
    assert named == {page.name for page in (ROOT / "docs").glob("*.md")}


def test_every_public_name_is_in_the_reference():
    text = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = set(re.findall(r"^::: inplace_abn\.(\S+)$", text, re.MULTILINE))
    assert set(inplace_abn.__all__) <= documented
    assert {"inplace_abn", "memory.measure", "memory.memory_report"} <= documented


def test_the_hook_gives_links_that_are_right_inside_docs():
    from docs_hooks import relinked

    for link, there in {
        "[a](docs/how.md#x)": "[a](how.md#x)",
        "![p](docs/pictures/speed.png)": "![p](pictures/speed.png)",
        "[c](CONTRIBUTING.md)": "[c](contributing.md)",
        "[w](https://x.y/z)": "[w](https://x.y/z)",
        "[here](#x)": "[here](#x)",
        "[LICENSE](LICENSE)": "`LICENSE`",
        "[e](examples)": "e (`examples`)",
    }.items():
        assert relinked(link, ROOT) == there
    assert relinked("[b](../CONTRIBUTING.md#test)", ROOT / "docs") == "[b](contributing.md#test)"


def test_forward_and_backward_take_half_of_the_memory_picture_each_whatever_their_times():
    times = [(0.0, 1), (1.0, 2), (90.0, 3), (91.0, 2), (91.5, 1), (99.0, 0)]
    assert _places(Usage(3, 3, tuple(times), 90.0)) == pytest.approx([0, 1 / 3, 2 / 3, 1, 4 / 3, 5 / 3])
    assert _places(Usage(0, 0, (), 0.0)) == []
