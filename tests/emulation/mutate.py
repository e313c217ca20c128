"""Changes the kernels in many small ways, one at a time, and says which changes the tests do not notice.

In ``tests``: ``python -m emulation.mutate [words of a mutation's name ...]``. Kernels are changed for one type of
elements and built with one activation. Only the tests of this folder run. The rest of the suite could only notice more.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from emulation import build
from emulation.mutations import MUTATIONS


class Few(NamedTuple):
    """The type of elements and the activation that changed kernels are built for, in C++ and in Python."""

    type_: str
    dtype: str
    functor: str = "LeakyRelu"
    activation: str = "leaky_relu"

    @property
    def flags(self) -> tuple[str, ...]:
        return (f"-DEMULATION_ACTIVATION={self.functor}",)

    def environment(self, library: Path) -> dict[str, str]:
        few = f"{self.dtype} {self.activation}"
        return {"INPLACE_ABN_EMULATED": str(library), "INPLACE_ABN_EMULATED_FEW": few}


# Types with vectors of 4 and of 8 elements. The tests of huge tensors need the second one, and so does code that packs
# two elements into a word. The third one is inverted once, the others are inverted twice.
FLOAT, BFLOAT16 = Few("float", "float32"), Few("c10::BFloat16", "bfloat16")
DOUBLE = Few("double", "float64", "Elu", "elu")
TESTS = ["test_fuzz.py", "test_extents.py", "test_emulator.py"]
# After this time the run counts as an endless loop, which is noticed, too.
MOST_SECONDS = 600


@dataclass
class Outcome:
    name: str
    noticed_by: str
    seconds: float


def unchanged_rest(changed: str) -> list[build.Object]:
    """The kernels for the other types of elements."""
    return build.kernel_objects(tuple(type_ for type_ in build.TYPES if type_ != changed))


def library(name: str | None, few: Few) -> Path:
    """Builds the kernels with the mutation ``name``, or unchanged, for one type of elements."""
    found = 0

    def change(file: str, text: str) -> str:
        nonlocal found
        if name is None or file != MUTATIONS[name][0]:
            return text
        _, old, new = MUTATIONS[name]
        found += text.count(old)
        return text.replace(old, new)

    kernels = build.kernel_objects((few.type_,), change, (*build.CALLS, *few.flags))
    if name is not None and found == 0:
        raise SystemExit(f"mutation {name!r} changes nothing: the kernels no longer have {MUTATIONS[name][1]!r}")
    label = "unchanged" if name is None else "".join(c if c.isalnum() else "-" for c in name)
    # The emulator's own tests launch kernels, too.
    of_launches = name is not None and MUTATIONS[name][0] == "launch.cuh"
    faulty = build.faulty_object(change if of_launches else build.unchanged)
    objects = [*build.device_objects(), *kernels, *unchanged_rest(few.type_), faulty, *build.op_objects()]
    return build.link(f"mutant-{label}", objects, jobs=1)


def few_for(name: str) -> Few:
    if "inverted once" in name:
        return DOUBLE
    return BFLOAT16 if "32 bits" in name or "word" in name else FLOAT


def try_out(name: str | None) -> Outcome:
    started = time.monotonic()
    few = few_for(name or "")
    try:
        path = library(name, few)
    except RuntimeError as error:
        return Outcome(str(name), f"it does not compile: {error}", time.monotonic() - started)
    environment = os.environ | few.environment(path) | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", "not slow"]
    command += [str(build.HERE / test) for test in TESTS]
    try:
        done = subprocess.run(
            command, cwd=build.ROOT, env=environment, capture_output=True, text=True, timeout=MOST_SECONDS, check=False
        )
    except subprocess.TimeoutExpired:
        return Outcome(str(name), "it does not end", time.monotonic() - started)
    finally:
        if name is not None:
            path.unlink()
    errors = [line for line in done.stdout.splitlines() if line.startswith("E  ")]
    noticed = "" if done.returncode == 0 else errors[0].removeprefix("E").strip() if errors else done.stdout[-300:]
    return Outcome(str(name), noticed, time.monotonic() - started)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("words", nargs="*", help="only mutations whose name has one of these")
    parser.add_argument("--jobs", type=int, default=os.cpu_count())
    arguments = parser.parse_args()
    names = [n for n in MUTATIONS if not arguments.words or any(word in n for word in arguments.words)]
    unchanged = try_out(None)
    if unchanged.noticed_by:
        raise SystemExit(f"the kernels as they are fail: {unchanged.noticed_by}")
    with ThreadPoolExecutor(arguments.jobs) as pool:
        outcomes = []
        for outcome in pool.map(try_out, names):
            outcomes.append(outcome)
            seen = f"caught, {outcome.noticed_by[:150]}" if outcome.noticed_by else "SURVIVES"
            print(f"{outcome.seconds:4.0f} s  {outcome.name}: {seen}", flush=True)
    survivors = [outcome.name for outcome in outcomes if not outcome.noticed_by]
    print(f"{len(outcomes) - len(survivors)} of {len(outcomes)} mutations are caught")
    for name in survivors:
        print(f"survives: {name}")
    return 1 if survivors else 0


if __name__ == "__main__":
    sys.exit(main())
