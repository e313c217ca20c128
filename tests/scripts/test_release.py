"""A release is made only if all that names it agrees, and its workflows have no more rights than they need."""

import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / ".github").is_dir(), reason="needs a clone of the repository")

REPOSITORY = "https://github.com/somebody/something"


@pytest.fixture
def tree(tmp_path):
    """What the check reads, of a release 3.1.0 that is ready."""
    shutil.copy(ROOT / "pyproject.toml", tmp_path)
    (tmp_path / "inplace_abn").mkdir()
    (tmp_path / "inplace_abn/__init__.py").write_text('__version__ = "3.1.0"\n')
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## 3.1.0\n\n- more\n\n## 3.0.0\n")
    (tmp_path / "CITATION.cff").write_text("cff-version: 1.2.0\nversion: 3.1.0\ndate-released: 2027-01-31\n")
    return tmp_path


def check(tree, *options):
    command = [sys.executable, str(ROOT / "scripts/release_check.py"), "--root", str(tree), *options]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert not done.stderr
    assert done.returncode == bool(done.stdout)
    return done.stdout


def test_addresses_are_written_once_and_then_agree(tree):
    assert check(tree).count("[project.urls] has no") == 3
    assert not check(tree, "--tag", "v3.1.0", "--repository", REPOSITORY + "/")
    written = (tree / "pyproject.toml").read_text()
    assert f'\nIssues = "{REPOSITORY}/issues"\n' in written
    assert not check(tree, "--repository", REPOSITORY)
    assert (tree / "pyproject.toml").read_text() == written
    assert check(tree, "--repository", "https://github.com/another/one").count("but the repository is") == 3


@pytest.mark.parametrize(
    ("file", "old", "new", "told"),
    [
        ("inplace_abn/__init__.py", "3.1.0", "3.2.0", "the version is 3.2.0, but the tag is v3.1.0"),
        ("CHANGELOG.md", "## 3.1.0", "## 3.1", "CHANGELOG.md begins with 3.1"),
        ("CITATION.cff", "version: 3.1.0", "version: 3.0.0", "CITATION.cff has 3.0.0"),
        ("CITATION.cff", "date-released: 2027-01-31", "", "no date-released"),
    ],
)
def test_what_does_not_agree_is_named(file, old, new, told, tree):
    text = (tree / file).read_text()
    (tree / file).write_text(text.replace(old, new))
    assert told in check(tree, "--tag", "v3.1.0", "--repository", REPOSITORY)


@pytest.mark.parametrize("path", sorted((ROOT / ".github/workflows").glob("*.yml")), ids=lambda path: path.name)
def test_workflows_name_actions_by_commits_and_ask_for_no_rights(path):
    text = path.read_text()
    uses = re.findall(r"uses: (\S+)(.*)", text)
    assert uses
    assert all(re.fullmatch(r"[\w/-]+@[0-9a-f]{40}", action) for action, _ in uses)
    assert all(re.fullmatch(r" # v\d+\.\d+\.\d+", version) for _, version in uses)
    assert "\npermissions:\n  contents: read\n" in text
    assert set(re.findall(r"^ +([\w-]+): write$", text, re.MULTILINE)) <= {"id-token"}
    assert "\nconcurrency:\n" in text
    checkouts = text.count("uses: actions/checkout@")
    assert text.count("with: { persist-credentials: false }") == checkouts
    assert len(re.findall(r"^    runs-on: ", text, re.MULTILINE)) == text.count("    timeout-minutes: ")


def test_only_a_tag_publishes_and_after_everything_else():
    text = (ROOT / ".github/workflows/release.yml").read_text()
    jobs = dict(re.findall(r"^  (\w+):\n((?:    .*\n|\n)+)", text.partition("\njobs:\n")[2], re.MULTILINE))
    publish = jobs.pop("publish")
    assert "if: github.ref_type == 'tag'\n" in publish
    assert f"needs: [{', '.join(jobs)}]" in publish
    assert "id-token" not in "".join(jobs.values())


def test_a_release_has_a_node_for_each_torch_that_builds_make_one_for():
    script = (ROOT / "scripts/build_wheel.sh").read_text()
    workflow = (ROOT / ".github/workflows/release.yml").read_text()
    assert re.search(r'--all-torches\) every="(.*)"', script)[1] == re.search(r"NODES: (.*)", workflow)[1]


def test_the_files_of_scripts_that_workflows_run_exist():
    for path in (ROOT / ".github/workflows").glob("*.yml"):
        commands = [line for line in path.read_text().splitlines() if "scripts/" in line or ".ci/" in line]
        for name in re.findall(r"(?:scripts|\.ci|tests/scripts)/[\w.]+", "\n".join(commands)):
            assert (ROOT / name).exists()
