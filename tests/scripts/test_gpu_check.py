"""The check of a machine with a GPU, as far as it can be tested without one."""

import json
import os
import subprocess
import sys
import tarfile
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from cases import needs_kernels

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT / "scripts"))
import gpu_check  # noqa: E402
import gpu_prebuilt  # noqa: E402
import gpu_profile  # noqa: E402
import gpu_sanitizer  # noqa: E402
import gpu_smoke  # noqa: E402

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
    assert (tmp_path / "results.tar.gz").stat().st_size > 0


def words_after_script(line):
    return line.split("gpu_check.sh")[1].split()


def test_the_plan_is_one_call_of_all_steps_and_two_of_what_it_may_have_no_time_for():
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/gpu_check.py"), "--plan"], capture_output=True, text=True, check=True
    )
    first, *others = [words_after_script(line) for line in done.stdout.splitlines() if "OUT=" in line]
    assert first == []
    assert all(call[:2] == ["prebuilt", "build"] for call in others)
    named = [name for call in others for name in call[2:]]
    steps = list(gpu_check.STEPS)
    assert sorted(named) == sorted({"compiled", *steps[steps.index("others") :]})


@pytest.mark.parametrize("rehearsal", [False, True])
@pytest.mark.parametrize("name", ["bench", "nets", "compiled", "others", "batches"])
def test_a_benchmark_is_a_valid_call_that_ends_before_its_step(name, rehearsal, tmp_path, monkeypatch):
    bench = pytest.importorskip("bench")
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    step = gpu_check.STEPS[name]
    command = step.rehearsal if rehearsal else step.command
    if not command:
        assert gpu_check.Check("emulated", 60, tmp_path, tmp_path).run(name, []).result == "skipped"
        return
    args = bench.parse_arguments(gpu_check.command_of(name, command, tmp_path, tmp_path / "tables", 200)[2:])
    assert args.time_limit == 150
    assert args.out == tmp_path / "tables"


def test_steps_name_files_that_exist():
    words = [word for step in gpu_check.STEPS.values() for word in (*step.command, *step.rehearsal)]
    named = [word for word in words if word.startswith(("tests/", "scripts/"))]
    assert named
    assert all((ROOT / word).exists() for word in named)


def test_the_checkers_have_tests_to_run():
    """The call of each checker named its tests by a dtype that was not in their names."""
    selected = gpu_check.CHECKED[-1].replace("cuda and", "cpu and")
    command = [*gpu_check.PYTEST, "--collect-only", *gpu_check.CHECKED[:-1], selected]
    found = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    assert all(f"{name}[" in found for name in ("any_alignment_agree_with_the_cpu", "from_the_output_and_from_xhat"))
    assert "whose_xhat_is_saved[" in found


def steps_of(**scripts):
    return {name: gpu_check.Step((sys.executable, "-c", script), (), 60) for name, script in scripts.items()}


@pytest.fixture
def folders(tmp_path):
    out, logs = tmp_path / "out", tmp_path / "logs"
    out.mkdir()
    logs.mkdir()
    return out, logs


WRITES = "import os, sys; os.makedirs(sys.argv[1]); open(sys.argv[1] + '/table.md', 'w').write('1'); print('done')"


def test_what_a_step_wrote_is_there_when_a_later_step_ends_everything(folders, monkeypatch):
    out, logs = folders
    steps = steps_of(first=WRITES, second="print('begun')")
    steps["first"] = steps["first"]._replace(command=(*steps["first"].command, "{tables}"))
    monkeypatch.setattr(gpu_check, "STEPS", steps)
    run = gpu_check.run

    def killed_in_the_second(command, *rest):
        result = run(command, *rest)
        if "begun" in command[-1]:
            raise KeyboardInterrupt
        return result

    monkeypatch.setattr(gpu_check, "run", killed_in_the_second)
    with pytest.raises(KeyboardInterrupt):
        gpu_check.Check("cuda", 120, out, logs).run_all(list(steps), "a GPU")
    with tarfile.open(out / "results.tar.gz") as archive:
        assert {"results/first.log", "results/first/table.md"} <= set(archive.getnames())
    assert "first      passed" in (out / "summary.txt").read_text()
    assert (out / "running.log").read_text() == "begun\n"


def test_a_build_runs_only_where_what_was_built_before_does_not(folders, monkeypatch):
    monkeypatch.setattr(gpu_check, "STEPS", steps_of(prebuilt="", build="print('compiled')", smoke=""))
    check = gpu_check.Check("cuda", 120, *folders)
    check.run_all(["prebuilt", "build"], "a GPU")
    assert [result.result for result in check.results] == ["passed", "skipped"]
    monkeypatch.setattr(gpu_check, "STEPS", steps_of(prebuilt="raise SystemExit(1)", build="print('compiled')"))
    check = gpu_check.Check("cuda", 120, *folders)
    check.run_all(["prebuilt", "build"], "a GPU")
    assert [(result.result, result.last_line) for result in check.results] == [("not used", ""), ("passed", "compiled")]


def test_nothing_runs_on_kernels_that_were_not_built(folders, monkeypatch):
    monkeypatch.setattr(gpu_check, "STEPS", steps_of(prebuilt="raise SystemExit(1)", build="0/0", smoke=""))
    check = gpu_check.Check("cuda", 120, *folders)
    check.run_all(["prebuilt", "build", "smoke"], "a GPU")
    assert [result.result for result in check.results] == ["not used", "failed (1)"]


def test_a_step_leaves_the_checkers_their_time(folders):
    check = gpu_check.Check("cuda", 200, *folders)
    later = [gpu_check.STEPS[name] for name in ("memcheck", "racecheck", "synccheck")]
    left = 200 - gpu_check.GRACE
    assert check.seconds_for(gpu_check.STEPS["suite"], []) == pytest.approx(left, abs=2)
    assert check.seconds_for(gpu_check.STEPS["suite"], later) == pytest.approx(left - 3 * 30, abs=2)


SANITIZER = """#!/bin/sh
while [ "$1" != kns=inplace_abn ]; do shift; done
case "$3" in {faulty}) echo "Invalid write in $3"; echo "ERROR SUMMARY: 1 error"; exit 1;; esac
echo "{summary}: 0 errors"
"""


@pytest.mark.parametrize(
    ("faulty", "summary", "reason"),
    [
        (None, "", "there is no compute-sanitizer"),
        ("never", "Device not supported", "does not work here"),
        ("never", "ERROR SUMMARY", "sees none of the faults that were planted"),
        ("none", "ERROR SUMMARY", "finds a fault in a kernel that has none"),
        ("writes_behind_x", "ERROR SUMMARY", ""),
    ],
    ids=["missing", "broken", "blind", "finds too much", "works"],
)
def test_a_checker_is_trusted_only_if_it_names_a_planted_fault(faulty, summary, reason, tmp_path, monkeypatch, capsys):
    if faulty is not None:
        (tmp_path / "compute-sanitizer").write_text(SANITIZER.format(faulty=faulty, summary=summary))
        (tmp_path / "compute-sanitizer").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setattr(gpu_sanitizer, "faulty_program", lambda: tmp_path / "faults")
    commands = []
    run = subprocess.run

    def run_all_but_pytest(command, **options):
        if "pytest" in command:
            commands.append(command)
            return SimpleNamespace(returncode=0)
        return run(command, **options)

    monkeypatch.setattr(gpu_sanitizer.subprocess, "run", run_all_but_pytest)
    code = gpu_sanitizer.main(["memcheck", "tests/ops/test_cuda.py"])
    assert code == (1 if reason else 0)
    assert reason in capsys.readouterr().out
    assert len(commands) == (0 if reason else 1)


def test_the_faults_of_every_checker_are_kernels():
    text = (ROOT / gpu_sanitizer.FAULTS).read_text()
    named = {name for names in gpu_sanitizer.CONTROLS.values() for name in names} | {gpu_sanitizer.CLEAN}
    assert all(f"FAULT({name}" in text for name in named)


@pytest.fixture
def prebuilt(tmp_path):
    folder, package = tmp_path / "prebuilt", tmp_path / "tree/inplace_abn"
    (folder / "inplace_abn").mkdir(parents=True)
    package.mkdir(parents=True)
    (folder / "inplace_abn/_kernels.so").write_bytes(b"kernels")
    assert gpu_prebuilt.seal(folder) == ""
    return folder, package


def test_what_was_built_before_is_used_if_it_is_of_these_sources_and_runs(prebuilt):
    folder, package = prebuilt
    assert gpu_prebuilt.install(folder, package, "print('runs')") == ""
    assert (package / "_kernels.so").read_bytes() == b"kernels"
    assert "0/0" not in gpu_prebuilt.install(folder, package, "1/0")
    assert not (package / "_kernels.so").exists()
    (folder / "fingerprint").write_text("other")
    assert gpu_prebuilt.install(folder, package, "") == "it is of other sources"
    assert "nothing in" in gpu_prebuilt.install(folder / "elsewhere", package, "")


def test_more_than_travels_is_refused(prebuilt, monkeypatch):
    monkeypatch.setattr(gpu_prebuilt, "MOST_BYTES", 3)
    assert "too much to send" in gpu_prebuilt.seal(prebuilt[0])


def event(name, start, microseconds, on_cuda=True):
    device = torch.autograd.DeviceType.CUDA if on_cuda else torch.autograd.DeviceType.CPU
    span = SimpleNamespace(start=start, elapsed_us=lambda: microseconds)
    return SimpleNamespace(name=name, device_type=device, time_range=span)


STATISTICS = (
    "void inplace_abn::cuda::(anonymous namespace)::planes_kernel<inplace_abn::cuda::Statistics<float>, 4>(long)"
)
FINISH = "void inplace_abn::cuda::finish_kernel<inplace_abn::cuda::Statistics<float> >(long)"
INVERT = "void inplace_abn::cuda::rows_kernel<inplace_abn::cuda::InvertAndCombine<float>, 4>(long)"


def test_kernels_of_a_call_are_those_between_two_fills():
    events = [
        event("fill", 5, 1),
        event(FINISH, 4, 2),
        event(STATISTICS, 3, 10),
        event("aten::fill_", 1, 3, on_cuda=False),
        event("fill", 0, 1),
        event(INVERT, 9, 20),
    ]
    groups = gpu_profile.grouped(events)
    assert [[name for name, _ in group] for group in groups] == [[STATISTICS, FINISH], [INVERT]]
    call = gpu_profile.Call("statistics", None, (gpu_profile.Pass("Statistics", 1),))
    found = {one.name: seconds for one, seconds in gpu_profile.passes_of(call, groups[0]).items()}
    assert found == pytest.approx({"Statistics": 1e-5, "finish_kernel": 2e-6})
    with pytest.raises(ValueError, match="unknown here"):
        gpu_profile.passes_of(call, groups[1])
    with pytest.raises(ValueError, match="no kernel has Combine"):
        gpu_profile.passes_of(gpu_profile.Call("last", None, (gpu_profile.Pass("Combine", 3),)), [])


def test_a_kernels_bandwidth_is_told_as_a_share_of_a_copys():
    x = torch.zeros(1000, dtype=torch.float32)
    call = gpu_profile.Call("statistics", None, (gpu_profile.Pass("Statistics", 2),))
    timer = lambda timed, times: [[(STATISTICS, seconds)] for seconds in (1e-6, 4e-6, 2e-6)]  # noqa: E731
    (row,) = gpu_profile.measured(gpu_profile.SHAPES[0], x, [call], timer, 3, 8e9)
    assert row["microseconds"] == pytest.approx(2)
    assert row["of_copy"] == pytest.approx(0.5)
    assert "50%" in gpu_profile.line(row)


def test_the_smoke_test_notices_wrong_values_and_values_that_are_not_numbers():
    expected = {"dx": torch.ones(4, 4), "dbias": torch.ones(4)}
    assert gpu_smoke.worst(expected, expected, 1e-3)[0] == 0
    error, name = gpu_smoke.worst(expected | {"dx": 1.01 * torch.ones(4, 4)}, expected, 1e-3)
    assert error == pytest.approx(10, rel=1e-3)
    assert name == "dx"
    assert gpu_smoke.worst(expected | {"dbias": torch.full((4,), torch.nan)}, expected, 1e-3)[0] == float("inf")


@pytest.mark.slow
@pytest.mark.emulated
@pytest.mark.parametrize("kernels", [pytest.param("emulated", marks=needs_kernels)])
def test_the_whole_check_can_be_rehearsed_without_a_gpu(kernels, tmp_path):
    begun = time.monotonic()
    done = subprocess.run(
        [sys.executable, str(ROOT / "scripts/gpu_check.py"), "--device", kernels, "--out", str(tmp_path)],
        cwd=ROOT,
        env=os.environ | {"PYTEST_ADDOPTS": ""},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    assert time.monotonic() - begun < 600
    steps = {step["step"]: step["result"] for step in json.loads((tmp_path / "summary.json").read_text())["steps"]}
    rehearsed = {name for name, step in gpu_check.STEPS.items() if step.rehearsal}
    assert {name for name, result in steps.items() if result == "passed"} == rehearsed
    assert list(steps) == list(gpu_check.STEPS)
