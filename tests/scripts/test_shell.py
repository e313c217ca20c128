"""Shell scripts, with stand-ins for the programs that they call: what they call, with which arguments, and what they
show."""

import os
import re
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.skipif(not (ROOT / ".ci").is_dir(), reason="needs a clone of the repository")


@pytest.fixture
def clone(tmp_path):
    """A folder with the scripts alone. The programs in its ``bin`` come first on the path."""
    for name in ("scripts", ".ci"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("results", "__pycache__"))
    shutil.copy(ROOT / "README.md", tmp_path)
    (tmp_path / "bin").mkdir()
    return tmp_path


def write_program(folder, name, body):
    (folder / name).parent.mkdir(parents=True, exist_ok=True)
    (folder / name).write_text(f"#!/bin/sh\n{body}\n")
    (folder / name).chmod(0o755)


def run(clone, *command, **variables):
    environment = {"PATH": f"{clone / 'bin'}:{os.environ['PATH']}", "HOME": str(clone)} | variables
    return subprocess.run(command, cwd=clone, env=environment, capture_output=True, text=True, check=False)


def test_the_wheel_is_built_where_there_is_no_virtual_environment(clone):
    """The script that makes .venv was told to make it with the interpreter of .venv."""
    write_program(clone / "bin", "python3", 'echo "python3 $*"; exit 3')
    result = run(clone, "scripts/build_wheel.sh")
    assert result.returncode == 3, result.stderr
    assert re.fullmatch(r"\[\d+ s\] making \.venv\npython3 -m venv \.venv\n", result.stdout)


@pytest.fixture
def built_clone(clone):
    """A clone with a .venv in which the package is built. Programs there print how they were called."""
    for name in ("python", "ruff", "mypy", "clang-format", "git"):
        write_program(clone / ".venv/bin", name, f'echo "{name} $*"')
    (clone / ".venv/bin/activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    for name in ("build_backend.py", "setup.py", "pyproject.toml", "include", "src", "inplace_abn/_kernels.so"):
        (clone / name).parent.mkdir(exist_ok=True)
        (clone / name).touch()
    (clone / ".venv/installed").touch()
    return clone


@pytest.mark.parametrize("arguments", [[], ["-n", "0", "-k", "guard"], ["-m", "emulated"]])
def test_the_tests_share_all_processors_unless_arguments_say_otherwise(arguments, built_clone):
    """The tests took four times as long as they had to, in one process."""
    result = run(built_clone, "scripts/test.sh", *arguments)
    assert result.returncode == 0, result.stderr
    called = ["python -m pytest -n auto --dist worksteal -m not emulated", *arguments]
    assert result.stdout.splitlines()[-1] == " ".join(called)


def test_the_quick_tests_exist_and_none_of_them_is_slow(built_clone):
    result = run(built_clone, "scripts/test.sh", "--quick", "-x")
    called = result.stdout.splitlines()[-1]
    assert called.startswith("python -m pytest -n auto --dist worksteal -m not slow and not emulated tests/")
    assert called.endswith(" -x")
    paths = [word for word in called.split() if word.startswith("tests/")]
    assert len(paths) > 3
    assert all((ROOT / path).exists() for path in paths)


@pytest.fixture
def without_torches(clone):
    """A clone whose ``some-python`` has torch 2.13.0, and cannot download another one."""
    write_program(
        clone / "bin",
        "some-python",
        'case "$*" in *download*) echo "no such torch" >&2; exit 1;; *setup.py*) exit 7;; esac; echo 2.13.0',
    )
    write_program(clone / "build/wheel-tools/bin", "pip", "true")
    return clone


def test_a_wheel_has_the_node_of_the_torch_that_is_there_and_downloads_no_other(without_torches):
    """README's first command downloaded four releases of torch that nobody had asked for."""
    result = run(without_torches, "scripts/build_wheel.sh", PYTHON="some-python")
    assert "compiling the kernels and 1 nodes" in result.stdout
    assert "download" not in result.stdout


def test_a_wheel_has_the_node_of_the_readers_torch_although_another_one_builds_it(without_torches):
    write_program(without_torches / "bin", "python3", "echo 2.14.1")
    write_program(without_torches / ".venv/bin", "python", 'exec some-python "$@"')
    (without_torches / ".venv/bin/activate").write_text('PATH="$PWD/.venv/bin:$PATH"\n')
    write_program(without_torches / ".venv/bin", "python3", "exit 1")
    write_program(without_torches / "bin", "some-python", 'echo "$INPLACE_ABN_NODE_HEADERS" >>headers; echo 2.13.0')
    run(without_torches, "scripts/build_wheel.sh")
    assert "2.14.1" in (without_torches / "headers").read_text().splitlines()


@pytest.mark.parametrize("nodes", [{}, {"NODES": "2.99.0"}])
def test_a_torch_that_cannot_be_had_has_no_node_unless_it_was_asked_for(nodes, without_torches):
    """The wheel could not be built where an index lacks one of the releases."""
    result = run(without_torches, "scripts/build_wheel.sh", "--all-torches", PYTHON="some-python", **nodes)
    told = f"headers of {1 if nodes else 4} releases of torch are missing: up to {550 if nodes else 2200} MB"
    assert told in result.stdout.partition("downloading torch")[0]
    left_out = [line for line in result.stdout.splitlines() if "has no node for it: no such torch" in line]
    assert len(left_out) == (0 if nodes else 4)
    assert ("compiling the kernels and 1 nodes" in result.stdout) == (not nodes)
    assert result.returncode == 1


@pytest.mark.parametrize("arguments", [["--all"], ["one", "two"], ["--help"]])
def test_an_unknown_argument_of_the_wheels_script_is_an_error_with_its_usage(arguments, clone):
    """An unknown option was taken for the folder of the wheel."""
    result = run(clone, "scripts/build_wheel.sh", *arguments)
    assert result.returncode == 2
    assert f"unknown argument {arguments[-1]}\nusage: scripts/build_wheel.sh [--cuda] [--all-torches]" in result.stderr
    assert not result.stdout


def test_what_takes_long_says_so_every_20_seconds(clone):
    """pip and mypy printed nothing for minutes."""
    sleep = shutil.which("sleep")
    write_program(clone / "bin", "sleep", f'echo "$1" >>waits; exec {sleep} 0.2')
    write_program(clone / "bin", "install", f"{sleep} 1; echo installed; exit 3")
    code = "source scripts/progress.sh; waiting 'installing torch, 0.2 GB' install || echo $?; echo done"
    result = run(clone, "bash", "-euo", "pipefail", "-c", code)
    first, *still, installed, status, done = result.stdout.splitlines()
    assert re.fullmatch(r"\[\d+ s\] installing torch, 0\.2 GB", first)
    assert still
    assert all(re.fullmatch(r"\[\d+ s\] still installing torch", line) for line in still)
    assert [installed, status, done] == ["installed", "3", "done"]
    assert not result.stderr
    assert set((clone / "waits").read_text().split()) == {"20"}


BUILD = """
echo "running build_ext"
echo "inplace_abn: building for CPU"
echo "${NINJA_STATUS}c++ -MMD -MF /a/b/x.o.d -I/a/src/y -c -c /a/b/src/cpu/x.cpp -o /a/b/build/src/cpu/x.o -O3" |
  sed 's/%f/1/; s/%t/7/; s/%e/2.5/'
"""


@pytest.mark.parametrize("fails", [False, True])
def test_a_build_shows_how_far_it_is_and_why_it_fails(fails, clone):
    """Scripts compiled for minutes and said nothing."""
    write_program(clone / "bin", "compile", BUILD + ('echo "x.cpp:3: error: no such thing"; exit 1' if fails else ""))
    result = run(clone, "bash", "-euo", "pipefail", "-c", "source scripts/progress.sh; build build/log compile")
    shown = ["inplace_abn: building for CPU", "[1 of 7, 2.5 s] src/cpu/x.cpp"]
    assert result.stdout.splitlines() == shown + ["x.cpp:3: error: no such thing"] * fails
    assert result.returncode == fails
    assert "running build_ext" in (clone / "build/log").read_text()


def test_continuous_integration_runs_what_the_first_screen_of_the_readme_shows(clone):
    """Its tests had made .venv before, so it did not see that README's first command needed one."""
    write_program(clone / "bin", "git", 'mkdir -p "$4"')
    write_program(clone / "bin", "tool", 'env && echo "$(basename "$0") $* in $(basename "$PWD")"')
    write_program(
        clone / "bin", "python3", 'mkdir -p "$3/bin" && cp bin/tool "$3/bin/pip" && cp bin/tool "$3/bin/python"'
    )
    result = run(clone, ".ci/first_screen", PYTHON="a", INPLACE_ABN_PORTABLE="1", VIRTUAL_ENV="b", PYTHONPATH="c")
    assert result.returncode == 0, result.stderr
    block = re.search(r"```bash\n(.*?)```", (ROOT / "README.md").read_text(), re.DOTALL)[1].splitlines()
    block = [line for line in block if not line.startswith("#")]
    printed = result.stdout.splitlines()
    assert [line for line in printed if line.startswith("first_screen: ")][:-1] == [f"first_screen: {c}" for c in block]
    assert "pip install --no-build-isolation . in clone" in printed
    assert not re.search(r"^(PYTHON|INPLACE_ABN_\w+|VIRTUAL_ENV|PYTHONPATH)=", result.stdout, re.MULTILINE)
    assert not list((clone / "build").iterdir())


@pytest.mark.parametrize("script", ["demo.sh", "test.sh"])
def test_continuous_integration_runs_the_two_commands_of_the_readme(script):
    text = (ROOT / ".ci/run").read_text()
    assert f"scripts/{script}" in (ROOT / "README.md").read_text()
    assert re.search(rf"^step scripts/{script}\b", text, re.MULTILINE)
