"""The order of the package's modules, the picture of it, and the page that describes it."""

from pathlib import Path

import plot_rooms
import pytest

DOCS = Path(plot_rooms.__file__).parents[1] / "docs"

pytestmark = pytest.mark.skipif(not DOCS.is_dir(), reason="needs the documentation")


def test_no_module_or_folder_imports_one_that_imports_it():
    graph = plot_rooms.rooms()
    folders = {path.name for path in plot_rooms.PACKAGE.iterdir() if (path / "__init__.py").exists()}
    assert folders < graph.keys()
    assert len(graph["conversion"]) > 5
    assert max(plot_rooms.floors(graph).values()) <= 8


def test_a_circle_is_an_error():
    with pytest.raises(ValueError, match="cycle"):
        plot_rooms.floors({"a": {"b"}, "b": {"a"}})


def test_the_picture_is_of_these_rooms():
    """`python scripts/plot_rooms.py docs/pictures/rooms.png` draws it anew."""
    image = pytest.importorskip("PIL.Image")
    drawn = image.open(DOCS / "pictures" / "rooms.png").text["Description"]
    assert drawn == plot_rooms.told(plot_rooms.rooms())


def test_the_page_has_a_sentence_for_each_room():
    page = (DOCS / "architecture.md").read_text(encoding="utf-8")
    for room in plot_rooms.rooms():
        target = f"{room}/" if (plot_rooms.PACKAGE / room).is_dir() else f"{room}.py"
        assert page.replace("`", "").count(f"| [{target}](") == 1, target


def test_the_map_of_the_tests_has_a_row_for_each_helper():
    tests = Path(__file__).parents[1]
    text = (tests / "README.md").read_text(encoding="utf-8")
    assert [path.name for path in (tests / "helpers").glob("*.py") if f"| `{path.name}` |" not in text] == []
