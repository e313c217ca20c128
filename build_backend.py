"""The backend of builds: setuptools' own, after a check that what a build needs is there.

Installers import this file before anything else. So its message comes where setuptools is missing or too old to read
pyproject.toml, too. setup.py imports it for builds without an installer.
"""

import importlib.metadata
import os
import re
import shutil
import sys
import sysconfig

NEEDED = {"torch": (2, 11), "setuptools": (77,)}
"""The oldest releases that will do. torch's is the first one whose stable ABI has all that the kernels call."""


def _lack(name: str) -> str:
    """What is wrong with a distribution, in words; empty if there is one that is new enough."""
    try:
        version = importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return f"{name} is missing"
    return "" if tuple(map(int, re.findall(r"\d+", version)[:2])) >= NEEDED[name] else f"{name} is {version}"


def _check() -> None:
    # The ninja beside an interpreter whose environment was not activated is not on the path.
    os.environ["PATH"] = os.pathsep.join([os.environ.get("PATH", os.defpath), sysconfig.get_path("scripts")])
    lacks = [_lack(name) for name in NEEDED] + ["" if shutil.which("ninja") else "ninja is missing"]
    if any(lacks):
        oldest = {name: ".".join(map(str, version)) for name, version in NEEDED.items()}
        needed = " ".join(f'"{name}>={version}"' for name, version in oldest.items())
        raise SystemExit(
            f"inplace_abn: a build without isolation needs {', '.join(f'{n} >= {v}' for n, v in oldest.items())} and "
            f"ninja, but in {sys.prefix} {', '.join(filter(None, lacks))}. Install them first: pip install {needed} "
            "ninja. Or leave out --no-build-isolation"
        )


_check()

from setuptools import build_meta as build_meta  # noqa: E402
