"""Share what the server's processes do: read the Spec on stdin, die with the parent, log to stderr."""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import sys
from typing import Any

import msgspec

from qrt.cli import set_up_logging
from qrt.config import EngineConfig
from qrt.serve.link.metric_names import MetricNames
from qrt.serve.settings import ServerConfig

PR_SET_PDEATHSIG = 1  # linux/prctl.h
MOST_OPEN_FILES = 1 << 16
END_ENGINE = signal.SIGUSR1  # from the supervisor to the engine process


class EngineLink(msgspec.Struct, frozen=True):
    """How the server's processes know an engine.

    index     its number, from 0
    name      for people: "engine 1 (cuda:1)"
    socket    path of its ipc socket, in a folder that only this user may enter
    alive     file descriptor of a pipe that the engine process holds open for writing, and others for
              reading: its end is the engine's end, however it died
    """

    index: int
    name: str
    socket: str
    alive: int


class Spec(msgspec.Struct, frozen=True):
    """The settings of a child process, as JSON on its stdin, so that no key is on a command line.

    name        the child's own: "engine", "api-0", ...
    engine      of this engine process; an API process reads the names of model and tokenizer
    links       to all engines; an engine process has its own
    listener    file descriptor of the listening HTTP socket; -1 in an engine process
    """

    name: str
    engine: EngineConfig
    server: ServerConfig
    links: list[EngineLink]
    supervisor: int
    listener: int

    @property
    def descriptors(self) -> set[int]:
        """The file descriptors that the child inherits."""
        return {self.listener, *(link.alive for link in self.links)} - {-1}

    def metric_names(self, link: EngineLink) -> MetricNames:
        """Return the names of an engine's metrics."""
        server = self.server
        index = link.index if server.data_parallel_size > 1 else None
        return MetricNames(server.model_names[0], server.metrics_prefix, index)


def child_spec(kind: str) -> Spec:
    """Read this child's Spec and set up the process.

    It dies with the supervisor, leaves Ctrl-C to it, logs to stderr, and may open as many connections as the
    system allows.
    """
    spec = msgspec.json.decode(sys.stdin.buffer.read(), type=Spec)
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)
    if os.getppid() != spec.supervisor:
        sys.exit(f"{kind}: the supervisor has died")
    for descriptor in spec.descriptors:
        os.set_inheritable(descriptor, False)
    allow_open_files()
    set_up_logging(spec.server.log_level, f"{spec.name} pid={os.getpid()}")
    return spec


def allow_open_files() -> None:
    """Raise the soft limit of open files, usually 1,024, to the hard one: each connection is a file."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def leave_sigterm_to_supervisor() -> None:
    """Ignore SIGTERM in the engine process; END_ENGINE from the supervisor ends it with a clean exit.

    systemd sends SIGTERM to all processes at once. That starts a drain, during which the engine must run on.
    """

    def end(number: int, frame: Any) -> None:
        signal.signal(END_ENGINE, signal.SIG_IGN)
        sys.exit(0)

    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    signal.signal(END_ENGINE, end)
