"""Commands and code in processes of their own that need no start: a server that has imported everything forks each.

A fork can be killed for real, at any moment and as often as a test likes, without paying for the imports every time.
As a script this file is the server: it reads one JSON request per line, and answers each by one line.
"""

from __future__ import annotations

import importlib
import itertools
import json
import os
import resource
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

WARM = (
    "diffusers.models.unets.unet_2d",  # which "diffusers" alone leaves to the first use: most of a small command's time
    "matplotlib.backends.backend_agg",
    "matplotlib.figure",
    "PIL.PngImagePlugin",
    *(f"optcov.cli.{name}" for name in ("train", "fit", "sample", "bpd", "trajectory")),
    "optcov.experiments.commands.table",
    "optcov.data.sample_directory",
    "optcov.metrics",
    "optcov.networks.paper_unet",
    "optcov.bundle.pictures",
    "optcov.likelihood.plots",
    "optcov.experiments.tables",
    "optcov.fitting.stage1",
)
WRITES = ("fsync", "replace", "rename")  # every write of the package ends in calls of these, in this order


@dataclass(frozen=True)
class Ended:
    """How a command ended."""

    code: int  # as a shell would say, negative for a signal
    out: str
    err: str
    seconds: float
    writes: int  # calls of the watched functions that it made, -1 if it did not live to say so


class Running:
    """A command that was started."""

    def __init__(self, server: WarmCommands, pid: int, files: Path):
        self.server, self.pid, self._files = server, pid, files
        self._began = time.monotonic()

    def signal(self, number: int) -> None:
        os.kill(self.pid, number)  # until `wait`, a command that has ended keeps its number

    def said(self) -> str:
        """What it has printed so far."""
        return (self._files / "out").read_text() if (self._files / "out").exists() else ""

    def wait(self) -> Ended:
        status = self.server.ask({"wait": self.pid})["status"]
        seconds = time.monotonic() - self._began
        out, err = ((self._files / name).read_text(errors="replace") for name in ("out", "err"))
        counted = self._files / "writes"
        writes = int(counted.read_text()) if counted.exists() else -1
        return Ended(os.waitstatus_to_exitcode(status), out, err, seconds, writes)


class WarmCommands:
    """The client: starts commands, each in a directory of its choice."""

    def __init__(self, directory: Path):
        self._directory, self._count = directory, 0
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "COLUMNS": "300", "MPLBACKEND": "agg"}
        self._server = subprocess.Popen(
            [sys.executable, __file__], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment
        )

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        assert self._server.stdin is not None
        assert self._server.stdout is not None
        self._server.stdin.write(json.dumps(request) + "\n")
        self._server.stdin.flush()
        answer: dict[str, Any] = json.loads(self._server.stdout.readline())
        return answer

    def start(self, *arguments: object, cwd: Path, **conditions: Any) -> Running:
        """Start `optcov ARGUMENTS`.

        fault: {"of": names among WRITES, "at": k, "how": "kill" | "error"}: the k-th call of them does not return.
        file_size: no file may become larger, in bytes. save_always: sweeps and tables save after every part.
        environment: variables for this command alone.
        """
        return self._start({"argv": ["optcov", *map(str, arguments)], "cwd": str(cwd), **conditions})

    def start_code(self, code: str, *arguments: object, cwd: Path, **conditions: Any) -> Running:
        """Start `python -c CODE ARGUMENTS`."""
        return self._start({"code": code, "argv": ["-c", *map(str, arguments)], "cwd": str(cwd), **conditions})

    def _start(self, request: dict[str, Any]) -> Running:
        self._count += 1
        files = self._directory / str(self._count)
        files.mkdir()
        return Running(self, self.ask({"files": str(files), **request})["pid"], files)

    def run(self, *arguments: object, cwd: Path, **conditions: Any) -> Ended:
        return self.start(*arguments, cwd=cwd, **conditions).wait()

    def close(self) -> None:
        self._server.communicate(timeout=60)  # closes the pipes; the server ends with its requests


def not_flushed(descriptor: int) -> None:
    """In the place of os.fsync: thousands of times 10 ms. A process that is killed loses nothing by it."""
    os.fstat(descriptor)  # a file that is closed is an error as before


def serve() -> None:
    warm()
    os.fsync = not_flushed
    for line in sys.stdin:
        request = json.loads(line)
        answer = {"status": os.waitpid(request["wait"], 0)[1]} if "wait" in request else {"pid": fork(request)}
        print(json.dumps(answer), flush=True)  # noqa: T201


def warm() -> None:
    import torch

    for name in WARM:
        importlib.import_module(name)
    torch.set_num_threads(1)
    importlib.import_module("small_bundles").small_bundle().check_loadable()  # tried once here, not in every command


def fork(request: dict[str, Any]) -> int:
    pid = os.fork()
    if pid:
        return pid
    code = 70
    try:
        code = child(request)
    finally:
        os._exit(code)


def child(request: dict[str, Any]) -> int:
    files = Path(request["files"])
    null = os.open(os.devnull, os.O_RDONLY)
    out, err = (os.open(files / name, os.O_WRONLY | os.O_CREAT) for name in ("out", "err"))
    for source, target in ((null, 0), (out, 1), (err, 2)):
        os.dup2(source, target)
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a shell's background jobs inherit that it is ignored
    os.chdir(request["cwd"])
    os.environ.update(request.get("environment", {}))
    sys.argv = request["argv"]
    fault = request.get("fault", {})
    count = watch_writes(fault.get("of", WRITES), fault.get("at", 0), fault.get("how", ""))
    if request.get("save_always"):
        save_after_every_part()
    if "file_size" in request:
        signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
        resource.setrlimit(resource.RLIMIT_FSIZE, (request["file_size"], request["file_size"]))
    try:
        run(request.get("code"))
        code = 0
    except SystemExit as stop:
        code = stop.code if isinstance(stop.code, int) else 1 if stop.code else 0
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    sys.stdout.flush()
    sys.stderr.flush()
    resource.setrlimit(resource.RLIMIT_FSIZE, (resource.getrlimit(resource.RLIMIT_FSIZE)[1],) * 2)
    with (files / "writes").open("w") as stream:
        stream.write(str(count()))
    return code


def run(code: str | None) -> None:
    """The code, or else the command line."""
    if code is not None:
        exec(compile(code, "<code>", "exec"), {"__name__": "__main__"})
        return
    from optcov.cli import main

    main()


def watch_writes(names: tuple[str, ...], at: int, how: str) -> Callable[[], int]:
    """Count the calls of os functions, and let one of them fail; returns how many there were."""
    calls = itertools.count(1)  # which, unlike a sum, threads can share

    def watched(original: Callable[..., Any]) -> Callable[..., Any]:
        def call(*arguments: Any, **options: Any) -> Any:
            number = next(calls)
            if number == at and how == "kill":
                os.kill(os.getpid(), signal.SIGKILL)
            if number == at:
                raise OSError(28, "No space left on device")
            return original(*arguments, **options)

        return call

    for name in names:
        setattr(os, name, watched(getattr(os, name)))
    return lambda: next(calls) - 1


def save_after_every_part() -> None:
    """Tiny runs end before their first save by the clock is due."""
    from optcov.experiments.tables import drawing
    from optcov.likelihood import Sweep

    assert Sweep.__init__.__kwdefaults__ is not None
    Sweep.__init__.__kwdefaults__["save_every"] = -1.0
    drawing.SAVE_EVERY = -1.0


if __name__ == "__main__":
    serve()
