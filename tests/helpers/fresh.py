"""Processes that have imported torch, and nothing of this package.

Importing torch takes more than a second. So one server imports it, and forks for every process that a test needs.
"""

import importlib
import multiprocessing
import os
import sys
import tempfile
from pathlib import Path
from subprocess import CompletedProcess

CONTEXT = multiprocessing.get_context("forkserver")
CONTEXT.set_forkserver_preload(["torch"])


def run(function, *args, **environment):
    """Calls a function of a module in a fresh process, and returns how it went, as `subprocess.run` does.

    The module is imported when the process has ``environment`` in its environment.
    """
    with tempfile.TemporaryDirectory() as folder:
        outputs = [Path(folder) / name for name in ("stdout", "stderr")]
        target = function.__module__, function.__qualname__
        process = CONTEXT.Process(target=_call, args=(outputs, environment, *target, *args))
        process.start()
        process.join()
        return CompletedProcess(target, process.exitcode, *(path.read_text() for path in outputs))


def run_code(code, **environment):
    """Runs the text of a program."""
    return run(_execute, code, **environment)


def _call(outputs, environment, module, name, *args):
    for stream, path in zip((sys.stdout, sys.stderr), outputs, strict=True):
        with path.open("w") as file:
            os.dup2(file.fileno(), stream.fileno())
    os.environ.update(environment)
    getattr(importlib.import_module(module), name)(*args)


def _execute(code):
    exec(code, {"__name__": "__main__"})
