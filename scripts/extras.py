#!/usr/bin/env python
"""Prints the packages of some extras of pyproject.toml, one a line: scripts/extras.py test lint"""

import re
import sys
from pathlib import Path

text = (Path(__file__).parents[1] / "pyproject.toml").read_text(encoding="utf-8")
for extra in sys.argv[1:]:
    print(*re.findall(r'"([^"]+)"', re.search(rf"^{extra} = \[(.+)\]$", text, re.MULTILINE)[1]), sep="\n")
