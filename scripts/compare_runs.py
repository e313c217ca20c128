#!/usr/bin/env python
"""Prints the results of two or more runs of train_segmentation.py as a Markdown table."""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from segmentation.report import comparison_table


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("runs", nargs="+", type=Path, help="a run's --out folder, or its result.json")
    results = []
    for path in parser.parse_args(argv).runs:
        path = path / "result.json" if path.is_dir() else path
        try:
            results.append(json.loads(path.read_text()))
        except (OSError, ValueError) as error:
            raise SystemExit(f"{path}: not a result of train_segmentation.py ({error})") from error
    try:
        print(comparison_table(results))
    except (KeyError, TypeError) as error:
        raise SystemExit(f"a result lacks the entry {error}") from error


if __name__ == "__main__":
    main()
