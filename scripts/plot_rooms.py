#!/usr/bin/env python
"""Draws the rooms of the package, the files and folders of ``inplace_abn/``, and which one imports which.

python scripts/plot_rooms.py docs/pictures/rooms.png
"""

from __future__ import annotations

import argparse
import ast
from graphlib import TopologicalSorter
from pathlib import Path

PACKAGE = Path(__file__).parents[1] / "inplace_abn"
WIDTH, HEIGHT = 1.7, 0.5
"""Of a box, where rooms are 2 apart and floors 1."""


def imported(path: Path) -> set[str]:
    """The rooms that a file imports, at its top or later."""
    found: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.ImportFrom) and node.module is not None:
            package, *names = node.module.split(".")
            if package == PACKAGE.name:
                found.update(names[:1] or (alias.name for alias in node.names))
    return found


def rooms(package: Path = PACKAGE) -> dict[str, set[str]]:
    """The rooms that each room imports. A folder is one room."""
    graph: dict[str, set[str]] = {}
    for path in sorted(package.rglob("*.py")):
        room = path.relative_to(package).parts[0].removesuffix(".py")
        graph.setdefault(room, set()).update(imported(path) - {room})
    return graph


def floors(graph: dict[str, set[str]]) -> dict[str, int]:
    """The floor of each room: one above the highest room that it imports.

    Raises:
        graphlib.CycleError: rooms import each other.
    """
    found: dict[str, int] = {}
    for room in TopologicalSorter(graph).static_order():
        found[room] = 1 + max((found[other] for other in graph.get(room, ())), default=0)
    return found


def reduced(graph: dict[str, set[str]]) -> dict[str, set[str]]:
    """The graph without the imports of what an imported room imports, too."""

    def below(room: str) -> set[str]:
        return graph.get(room, set()).union(*(below(other) for other in graph.get(room, ())))

    return {room: others - set().union(*map(below, others)) for room, others in graph.items()}


def told(graph: dict[str, set[str]]) -> str:
    """The graph as text. A picture contains it, so that a test finds out whether the picture is of this graph."""
    return "; ".join(f"{room}: {' '.join(sorted(others))}" for room, others in sorted(graph.items()))


def draw(path: Path) -> None:
    # A test looks at the graph where there is no matplotlib, too.
    from matplotlib.figure import Figure

    graph = rooms()
    floor_of = floors(graph)
    rows: dict[int, list[str]] = {}
    for room in sorted(floor_of, key=lambda room: (floor_of[room], -len(graph.get(room, ())), room)):
        rows.setdefault(floor_of[room], []).append(room)
    places = {
        room: (2.0 * i - (len(row) - 1), float(floor)) for floor, row in rows.items() for i, room in enumerate(row)
    }
    figure = Figure(figsize=(8.5, 5.5), layout="constrained")
    axes = figure.subplots()
    for room, others in reduced(graph).items():
        for other in others:
            (x, y), (to_x, to_y) = places[room], places[other]
            axes.annotate(
                "",
                (to_x, to_y + HEIGHT / 2),
                (x, y - HEIGHT / 2),
                arrowprops={"arrowstyle": "->", "color": "#888888", "linewidth": 1, "shrinkA": 0, "shrinkB": 0},
            )
    for room, (x, y) in places.items():
        is_folder = (PACKAGE / room).is_dir()
        box = {"boxstyle": "square,pad=0.7", "facecolor": "#cfe3f3" if is_folder else "#f3ead2", "edgecolor": "#666666"}
        name = f"{room}/" if is_folder else f"{room}.py"
        axes.text(x, y, name, ha="center", va="center", fontsize=9, bbox=box)
    axes.set_xlim(min(x for x, _ in places.values()) - WIDTH, max(x for x, _ in places.values()) + WIDTH)
    axes.set_ylim(1 - HEIGHT, max(rows) + HEIGHT)
    axes.set_axis_off()
    figure.savefig(path, dpi=120, metadata={"Description": told(graph)})


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("picture", type=Path)
    draw(parser.parse_args().picture)


if __name__ == "__main__":
    main()
