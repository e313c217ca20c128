"""The source tree, for tests that need one."""

from pathlib import Path

import pytest

import inplace_abn


@pytest.fixture
def source_tree():
    root = Path(inplace_abn.__file__).parents[1]
    if not (root / "setup.py").exists():
        pytest.skip("not in a source tree")
    return root
