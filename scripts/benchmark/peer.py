"""Times the InPlaceABN of the public package.

An interpreter that has the public package runs this file as ``python -m benchmark.peer`` with ``scripts`` as the
working directory. The program reads a JSON object from standard input. The last line that it prints is the answer, a
JSON object, too.
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from benchmark.cases import Case
from benchmark.timing import by_phase, interleaved, module_iteration, reason

SUBSTITUTES = {"leaky_relu": "leaky_relu", "relu": "leaky_relu", "elu": "elu", "identity": "identity"}
"""For each activation of ours, the one of the public package that is timed. The public package has no in-place relu. It
offers leaky_relu instead."""


def ask(python: str, cases: Sequence[Case], **settings: Any) -> dict[str, Any]:
    """Runs `main` in the interpreter ``python`` and returns its answer for ``cases``.

    Raises:
        RuntimeError: the interpreter failed. The message has the last line of its standard error.
    """
    # The path is made absolute, because the working directory is another one. It is not resolved, because the
    # interpreter of a virtual environment is a link.
    interpreter = str(Path(shutil.which(python) or python).absolute())
    done = subprocess.run(
        [interpreter, "-m", "benchmark.peer"],
        input=json.dumps({"cases": cases, **settings}),
        capture_output=True,
        text=True,
        cwd=Path(__file__).resolve().parents[1],
        env={name: value for name, value in os.environ.items() if not name.startswith("PYTHON")},
    )
    if done.returncode != 0:
        raise RuntimeError(f"{python} failed: {(done.stderr.strip().splitlines() or ['no message'])[-1]}")
    answer: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return answer


def timed(case: Case, device: torch.device, seconds: float, min_rounds: int) -> dict[str, Any]:
    """Returns the quartiles of each phase and the activation that was timed, or an error."""
    import inplace_abn

    activation = SUBSTITUTES.get(case.activation)
    if activation is None:
        return {"error": f"has no {case.activation}"}
    module = inplace_abn.InPlaceABN(case.shape[1], activation=activation).to(device)
    x, dz = case.random(device), case.random(device)
    try:
        samples = interleaved({"": module_iteration(module)}, x, dz, seconds, min_rounds)
    except Exception as error:
        return {"error": reason(error)}
    return {"ms": by_phase(samples[""]), "activation": activation}


def main() -> None:
    """Prints the version and the path of the public package, and the result of `timed` for each case."""
    question = json.load(sys.stdin)
    import inplace_abn

    torch.set_num_threads(question["threads"])
    device = torch.device(question["device"])
    if device.type == "cuda":
        torch.cuda.set_device(device)
    timings = [timed(Case(*case), device, question["seconds"], question["min_rounds"]) for case in question["cases"]]
    package = {"path": inplace_abn.__file__, "version": inplace_abn.__version__}
    print("\n" + json.dumps({"torch": torch.__version__, "package": package, "timings": timings}))


if __name__ == "__main__":
    main()
