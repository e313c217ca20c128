"""The check of a machine with a GPU, as far as it can be tested without one."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import gpu_check  # noqa: E402

SLEEPS = """
import time

def test_passes():
    pass

def test_takes_long():
    time.sleep(60)
"""


def test_a_pytest_that_takes_too_long_is_interrupted_and_writes_its_report(tmp_path):
    tests, log, report = tmp_path / "test_slow.py", tmp_path / "slow.log", tmp_path / "slow.xml"
    tests.write_text(SLEEPS)
    command = (sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", f"--junitxml={report}", str(tests))
    # Without plugins pytest starts in a fraction of the time that it is given.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    assert gpu_check.run(command, 3, log, environment) == "timed out"
    assert gpu_check.counts(report)["tests"] >= 1
    assert "KeyboardInterrupt" in log.read_text()


@pytest.mark.parametrize(("code", "result"), [(0, "passed"), (3, "failed (3)")])
def test_what_became_of_a_step_is_told(code, result, tmp_path):
    command = (sys.executable, "-c", f"print('last words'); raise SystemExit({code})")
    assert gpu_check.run(command, 60, tmp_path / "log", dict(os.environ)) == result
    assert gpu_check.last_line(tmp_path / "log") == "last words"


def test_a_step_that_crashes_has_failed(tmp_path):
    command = (sys.executable, "-c", "import os; os.abort()")
    assert gpu_check.run(command, 60, tmp_path / "log", dict(os.environ)) == "failed (-6)"


def test_everything_known_is_written_after_each_step(tmp_path):
    logs = tmp_path / "logs"
    logs.mkdir()
    (logs / "build.log").write_text("built\n")
    results = [gpu_check.Result("build", "passed", 3, "built")]
    text = gpu_check.write(tmp_path, logs, results, "a GPU")
    assert "built" in text
    assert json.loads((tmp_path / "summary.json").read_text())["steps"] == [results[0]._asdict()]
    assert (tmp_path / "logs.tar.gz").stat().st_size > 0


def test_the_plan_names_every_step_once_beside_the_build():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/gpu_check.py"), "--plan"], capture_output=True, text=True, check=True
    )
    planned = [word for line in done.stdout.splitlines() if "gpu_check.sh" in line for word in line.split()[2:]]
    assert set(planned) == set(gpu_check.STEPS)
    assert all(planned.count(name) == 1 for name in gpu_check.STEPS if name != "build")


@pytest.mark.parametrize("name", ["bench", "nets", "batches"])
def test_a_benchmark_is_a_valid_call_that_ends_before_its_step(name, tmp_path, monkeypatch):
    bench = pytest.importorskip("bench")
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    command = gpu_check.command_of(name, gpu_check.STEPS[name], tmp_path, tmp_path, 200)
    args = bench.parse_arguments(command[2:])
    assert args.time_limit == 150
    assert args.out.parent == tmp_path


def test_steps_name_files_that_exist():
    words = [word for step in gpu_check.STEPS.values() for word in step.command]
    named = [word for word in words if word.startswith(("tests/", "scripts/"))]
    assert named
    assert all((ROOT / word).exists() for word in named)
