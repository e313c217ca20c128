"""Runs tests on every rank of a gloo process group.

Starting a process takes a while, so the processes stay for the whole session. Every test gets a new process group in
them.
"""

import contextlib
import faulthandler
import functools
import gc
import importlib
import inspect
import itertools
import multiprocessing.connection
import os
import tempfile
import time
import traceback
import warnings
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from fresh import CONTEXT

TIMEOUT = 180
GRACE = 5

_meeting_points = iter(())


def on_each_rank(*world_sizes, **environment):
    """Makes a test whose body runs on every rank of a process group, once for each of ``world_sizes``.

    If ranks fail, the test fails with their tracebacks, the first failure first. If time runs out, it fails with what
    every rank was doing. The processes have ``environment`` in their environment before they import anything but torch.
    """

    def decorate(test):
        @functools.wraps(test)
        def run(request, world_size, **parameters):
            ranks = _ranks(tuple(sorted(environment.items())))
            if not ranks.processes:
                request.session.addfinalizer(ranks.close)
            ranks.run(world_size, test.__module__, test.__qualname__, parameters)

        added = [inspect.Parameter(name, inspect.Parameter.KEYWORD_ONLY) for name in ("request", "world_size")]
        own = [p.replace(kind=inspect.Parameter.KEYWORD_ONLY) for p in inspect.signature(test).parameters.values()]
        run.__signature__ = inspect.Signature([*added, *own])
        return pytest.mark.parametrize("world_size", world_sizes)(run)

    return decorate


def new_process_group():
    """Replaces the default group of this process. All ranks must call this."""
    rank, world_size = dist.get_rank(), dist.get_world_size()
    dist.barrier()
    dist.destroy_process_group()
    _initialise(rank, world_size)


def check_same_on_all_ranks(*tensors):
    for t in tensors:
        copies = [torch.empty_like(t) for _ in range(dist.get_world_size())]
        dist.all_gather(copies, t)
        assert all(torch.equal(t, copy) for copy in copies)


def _initialise(rank, world_size):
    dist.init_process_group("gloo", init_method=next(_meeting_points).as_uri(), rank=rank, world_size=world_size)
    # A test may destroy the group at once, and another rank may still be waiting for this one to connect.
    dist.barrier()


class _Ranks:
    """Processes that run the tests that they are sent."""

    def __init__(self, environment):
        self.environment = environment
        self.folder = tempfile.TemporaryDirectory(prefix="ranks-", ignore_cleanup_errors=True)
        self.processes = []
        self.connections = []
        self.runs = 0

    def run(self, world_size, module, name, parameters):
        self._start(world_size)
        self.runs += 1
        folder = Path(self.folder.name) / str(self.runs)
        folder.mkdir()
        running = {}
        for rank, connection in enumerate(self.connections[:world_size]):
            connection.send((folder, rank, world_size, module, name, parameters))
            running[connection] = rank
        failures = []
        deadline = time.monotonic() + TIMEOUT
        while running and (left := deadline - time.monotonic()) > 0:
            for connection in multiprocessing.connection.wait(list(running), left):
                rank = running.pop(connection)
                try:
                    failure = connection.recv()
                except EOFError:
                    self.processes[rank].join(GRACE)
                    failure = 0, f"ended with exit code {self.processes[rank].exitcode}\n"
                if failure is not None:
                    when, what = failure
                    failures.append((when, f"rank {rank} of {world_size}: {what}"))
                    deadline = min(deadline, time.monotonic() + GRACE)
        if running and not failures:
            time.sleep(GRACE)
            failures = [
                (0, f"rank {rank} of {world_size} was still here: {(folder / f'stack-{rank}').read_text()}")
                for rank in running.values()
            ]
        # Ranks of which one has failed do not agree on what groups there were, and would wait for each other in vain.
        if failures or not all(process.is_alive() for process in self.processes):
            self._kill()
        if failures:
            pytest.fail("\n".join(what for _, what in sorted(failures)), pytrace=False)

    def _start(self, world_size):
        while len(self.processes) < world_size:
            here, there = CONTEXT.Pipe()
            process = CONTEXT.Process(target=_work, args=(there, self.environment), daemon=True)
            process.start()
            there.close()
            self.processes.append(process)
            self.connections.append(here)

    def _kill(self):
        for process in self.processes:
            process.kill()
        self._forget()

    def close(self):
        for connection in self.connections:
            connection.close()
        self._forget()

    def _forget(self):
        for process in self.processes:
            process.join(GRACE)
        self.processes.clear()
        self.connections.clear()


_ranks = functools.cache(_Ranks)


def _work(connection, environment):
    os.environ.update(environment)
    os.environ["TORCHINDUCTOR_COMPILE_THREADS"] = "1"
    torch.set_num_threads(1)
    with contextlib.suppress(EOFError):
        while True:
            connection.send(_run(*connection.recv()))
    gc.freeze()  # leaves the interpreter nothing to collect, so that it ends at once


def _run(folder, rank, world_size, module, name, parameters):
    """Runs a test on this rank. Returns None, or the time of the first failure and its traceback.

    The process group of the previous run is destroyed only now, when all its ranks have finished that run.
    """
    global _meeting_points
    _meeting_points = (folder / f"store-{i}" for i in itertools.count())
    torch.manual_seed(0)
    warnings.filterwarnings("error", module="inplace_abn")
    with open(folder / f"stack-{rank}", "w") as stack:
        faulthandler.dump_traceback_later(TIMEOUT, file=stack)
        try:
            test = getattr(importlib.import_module(module), name).__wrapped__
            if dist.is_initialized():
                dist.destroy_process_group()
            _initialise(rank, world_size)
            test(**parameters)
        except BaseException:
            return time.monotonic(), traceback.format_exc()
        finally:
            faulthandler.cancel_dump_traceback_later()
    return None
