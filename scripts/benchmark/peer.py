"""Times the public package's InPlaceABN. Run by an interpreter that has it, as ``python -m benchmark.peer`` with this
package's folder as the working directory. Reads a JSON object from standard input, writes the timings to the file it
names.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmark.cases import Case
from benchmark.notes import reason
from benchmark.timing import interleaved, module_iteration, phase_quartiles

SUBSTITUTES = {"leaky_relu": "leaky_relu", "relu": "leaky_relu", "elu": "elu", "identity": "identity"}
"""The public package has no in-place relu; leaky_relu is what it offers instead."""


def ask(
    python: str, cases: Sequence[Case], device: str, threads: int, seconds: float, min_rounds: int
) -> dict[str, Any]:
    """What ``python``'s answer to `main` is, for these cases. Raises RuntimeError with its last words if it fails."""
    folder = Path(__file__).resolve().parents[1]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("PYTHON")}
    with tempfile.TemporaryDirectory() as scratch:
        answer = Path(scratch, "answer.json")
        question = {
            "cases": [case.record() for case in cases],
            "device": device,
            "threads": threads,
            "seconds": seconds,
            "min_rounds": min_rounds,
            "answer": str(answer),
        }
        # Absolute, for the working directory is another; not resolved, for a virtual environment is a link.
        interpreter = str(Path(shutil.which(python) or python).absolute())
        done = subprocess.run(
            [interpreter, "-m", "benchmark.peer"],
            input=json.dumps(question),
            capture_output=True,
            text=True,
            cwd=folder,
            env=environment,
        )
        if done.returncode != 0:
            raise RuntimeError(f"{python} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
        return json.loads(answer.read_text())


def main() -> None:
    """Answers with the package's version and where it is, and for each case its quartiles by phase and the
    activation it had, or an error."""
    question = json.load(sys.stdin)
    import inplace_abn

    torch.set_num_threads(question["threads"])
    device = torch.device(question["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device.index or 0)
    timings: list[dict[str, Any]] = []
    for record in question["cases"]:
        case = Case.from_record(record)
        if case.activation not in SUBSTITUTES:
            timings.append({"error": f"has no {case.activation}"})
            continue
        module = inplace_abn.InPlaceABN(case.channels, activation=SUBSTITUTES[case.activation]).to(device)
        iterations = {"peer": module_iteration(module)}
        x, dz = case.random(device), case.random(device)
        try:
            timed = interleaved(iterations, x, dz, question["seconds"], question["min_rounds"])
            timings.append({"ms": phase_quartiles(timed["peer"]), "activation": SUBSTITUTES[case.activation]})
        except Exception as error:
            timings.append({"error": reason(error)})
    package = {"path": inplace_abn.__file__, "version": inplace_abn.__version__}
    answer = {"torch": torch.__version__, "package": package, "timings": timings}
    Path(question["answer"]).write_text(json.dumps(answer))


if __name__ == "__main__":
    main()
