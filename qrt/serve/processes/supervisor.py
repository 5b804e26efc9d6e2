"""Supervisor: starts the engine processes and the API processes, watches them, and ends them all.

It holds the listening socket, so that it can replace an API process that dies without refusing a connection.
An engine that dies is not replaced: the others go on. If the last one dies, the server ends: all requests
have failed, and its process manager restarts it.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import logging
import os
import signal
import socket
import sys
import tempfile
import time
from collections import deque
from collections.abc import Iterator
from pathlib import Path

import msgspec
from msgspec.structs import replace

from qrt.config import EngineConfig
from qrt.serve.link.messages import Gone
from qrt.serve.processes.process import END_ENGINE, Spec
from qrt.serve.processes.replicas import EngineProcess, engine_configs, engine_name, start_up_lines
from qrt.serve.settings import ServerConfig, check_socket_path

logger = logging.getLogger(__name__)

BACKLOG = 2048
RED_SECONDS = 3.0  # time for which the API processes answer after the engine's death; /health is red
END_SECONDS = 10.0  # time for a process to end after SIGTERM, beyond the time of its requests
MAX_RESTARTS, RESTART_SECONDS = 3, 60.0  # most restarts of API processes in this time
ENGINE, API = "qrt.serve.processes.engine", "qrt.serve.processes.httpserver"


class Supervisor:
    """Runs one server; `run` returns the exit code."""

    def __init__(self, engine: EngineConfig, server: ServerConfig) -> None:
        self._configs = engine_configs(engine, server.data_parallel_size)
        self._server = server
        self._stop = asyncio.Event()
        self._now = asyncio.Event()  # a second signal sets it: stop waiting
        self._signal = 0
        self._ready = False
        self._engines: list[EngineProcess] = []
        self._apis: dict[asyncio.Task[int], tuple[str, asyncio.subprocess.Process]] = {}
        self._restarts: deque[float] = deque()
        self._num_started = 0

    async def run(self) -> int:
        """Start all processes, and return when all have ended."""
        for number in (signal.SIGINT, signal.SIGTERM):
            asyncio.get_running_loop().add_signal_handler(number, self._signalled, number)
        with contextlib.ExitStack() as stack:
            self._listener = stack.enter_context(listen(self._server))
            if self._server.uds:
                stack.callback(_unlink, Path(self._server.uds), os.stat(self._server.uds))
            folder = stack.enter_context(tempfile.TemporaryDirectory(prefix="qrt-"))  # mode 0700
            for index, config in enumerate(self._configs):
                self._engines.append(self._engine(index, config, Path(folder)))
                stack.callback(self._engines[-1].close)
            logger.info(
                "loading %s%s; until it is there, /health and /readiness on %s answer 503, /liveness 200",
                self._configs[0].model,
                f" on {', '.join(each.link.name for each in self._engines)}" if self._several else "",
                address_of(self._listener, self._server),
            )
            try:
                for engine in self._engines:
                    name = f"engine-{engine.link.index}" if self._several else "engine"
                    engine.started(await self._spawn(name, engine))
                for _ in range(num_api_processes(self._server)):
                    await self._start_api()
                return await self._watch()
            finally:
                await self._end()

    @property
    def _several(self) -> bool:
        return len(self._configs) > 1

    def _engine(self, index: int, config: EngineConfig, folder: Path) -> EngineProcess:
        socket, name = folder / "engine", "engine"
        if self._several:
            socket, name = folder / f"engine-{index}", engine_name(index, config)
        check_socket_path("TMPDIR", str(socket))
        return EngineProcess(index, config, socket, name)

    def _signalled(self, number: int) -> None:
        if self._stop.is_set():
            self._now.set()
        self._signal = number
        self._stop.set()

    async def _spawn(self, name: str, engine: EngineProcess | None) -> asyncio.subprocess.Process:
        """Start an engine's process, or an API process; its Spec goes through stdin."""
        if engine is not None:  # it must not hold the listening socket: connections would wait there forever
            module, config, listener = ENGINE, engine.config, -1
            links = [replace(engine.link, alive=engine.held)]
        else:
            module, config, listener = API, self._configs[0], self._listener.fileno()
            links = [each.link for each in self._engines]
        spec = Spec(name, config, self._server, links, os.getpid(), listener)
        # progress bars are for terminals, and for one engine; on a full disk, one would fail the whole load
        bars = {} if sys.stderr.isatty() and not self._several else {"TQDM_DISABLE": "1"}
        with _sigint_blocked():
            child = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", module),
                stdin=asyncio.subprocess.PIPE,
                pass_fds=spec.descriptors,
                env={**os.environ, **bars},
            )
        assert child.stdin is not None
        child.stdin.write(msgspec.json.encode(spec))
        with contextlib.suppress(ConnectionError):  # it has died; its exit code tells why
            await child.stdin.drain()
        child.stdin.close()
        return child

    async def _start_api(self) -> None:
        name = f"api-{self._num_started}"
        self._num_started += 1
        child = await self._spawn(name, None)
        self._apis[asyncio.create_task(child.wait())] = (name, child)

    async def _watch(self) -> int:
        """Wait until a signal or the last engine's death ends the server; return the exit code."""
        stop, ready = asyncio.create_task(self._stop.wait()), asyncio.create_task(self._announce())
        living = {engine.ended: engine for engine in self._engines if engine.ended}
        while True:
            await asyncio.wait({stop, *living, *self._apis}, return_when=asyncio.FIRST_COMPLETED)
            if stop.done():
                break
            for ended in [task for task in living if task.done()]:
                engine = living.pop(ended)
                if self._several:
                    then = "the others go on" if living and self._ready else "the server ends"
                    logger.error("%s died: %s; %s", engine.link.name, _status(ended.result()), then)
                if not living or not self._ready:
                    ready.cancel()
                    return await self._outlive(ended.result())
            for task in [task for task in self._apis if task.done()]:
                name, _ = self._apis.pop(task)
                if not await self._replace(name, task.result()):
                    return 1
        ready.cancel()
        if self._signal == signal.SIGINT:
            return 130
        return 0 if self._ready else 128 + signal.SIGTERM

    async def _outlive(self, code: int) -> int:
        """Let the API processes tell of the engine's death, `code`; return the server's exit code."""
        if not self._ready:
            return code if code > 0 else 1  # the engine has logged the reason
        if not self._several:
            logger.error("the engine process has died (%s); the server ends", _status(code))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(self._stop.wait(), RED_SECONDS)
        return 1

    async def _replace(self, name: str, code: int) -> bool:
        """Start a new API process for one that died; return False if too many have died."""
        logger.error("API process %s has died (%s)", name, _status(code))
        for engine in self._engines:
            engine.send(Gone(name))
        now = time.monotonic()
        self._restarts.append(now)
        while now - self._restarts[0] > RESTART_SECONDS:
            self._restarts.popleft()
        if not self._ready or len(self._restarts) > MAX_RESTARTS:
            why = "too many deaths" if self._ready else "the model was not loaded yet"
            logger.error("%s; the server ends", why)
            return False
        await self._start_api()
        return True

    async def _announce(self) -> None:
        """Log what runs, once all engines are ready."""
        infos = await asyncio.gather(*(engine.ready() for engine in self._engines))
        for engine, info in zip(self._engines, infos, strict=True):
            for line in start_up_lines(info):
                logger.info("%s%s", f"{engine.link.name}: " if self._several else "", line)
        self._ready = True

    async def _end(self) -> None:
        """Drain and end the API processes, then the engines."""
        self._listener.close()
        if self._signal and self._ready:
            logger.info(
                "ending: running requests have %g s; a second signal ends now", self._server.shutdown_timeout
            )
        children = [(task, child) for task, (_, child) in self._apis.items()]
        await self._terminate(children, signal.SIGTERM, self._server.shutdown_timeout + END_SECONDS)
        engines = [(engine.ended, engine.child) for engine in self._engines if engine.ended]
        await self._terminate(engines, END_ENGINE, END_SECONDS)

    async def _terminate(
        self,
        children: list[tuple[asyncio.Task[int], asyncio.subprocess.Process]],
        number: signal.Signals,
        seconds: float,
    ) -> None:
        """Send a signal to children, and SIGKILL to those alive after `seconds` or a second signal."""
        for _, child in children:
            with contextlib.suppress(ProcessLookupError):
                child.send_signal(number)
        pending = {task for task, _ in children}
        now = asyncio.create_task(self._now.wait())
        deadline = time.monotonic() + seconds
        while pending and not now.done() and (left := deadline - time.monotonic()) > 0:
            await asyncio.wait({now, *pending}, timeout=left, return_when=asyncio.FIRST_COMPLETED)
            pending = {task for task in pending if not task.done()}
        now.cancel()
        for task, child in children:
            if not task.done():
                with contextlib.suppress(ProcessLookupError):
                    child.kill()
                await task


@contextlib.contextmanager
def _sigint_blocked() -> Iterator[None]:
    """Block SIGINT inside the block, and deliver it afterwards.

    A terminal's Ctrl-C goes to the children too. A child that is started in the block inherits the mask, so
    Ctrl-C cannot kill it while it imports.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def listen(server: ServerConfig) -> socket.socket:
    """Open the listening socket; OSError names an address that cannot be used."""
    try:
        listener = _listen_unix(server.uds) if server.uds else _listen_tcp(server.host, server.port)
    except OSError as error:
        where = server.uds or f"{server.host}:{server.port}"
        raise OSError(error.errno, f"{error.strerror}: {where}") from error
    listener.setblocking(False)
    return listener


def _listen_unix(path: str) -> socket.socket:
    if Path(path).is_socket():
        with socket.socket(socket.AF_UNIX) as caller:
            caller.setblocking(False)
            code = caller.connect_ex(path)
        if code != errno.ECONNREFUSED:
            raise OSError(errno.EADDRINUSE, os.strerror(errno.EADDRINUSE))
        Path(path).unlink()  # left by a server that was killed
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(path)
    listener.listen(BACKLOG)
    return listener


def _listen_tcp(host: str, port: int) -> socket.socket:
    family, _, _, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind(address)
    listener.listen(BACKLOG)
    return listener


def _unlink(path: Path, ours: os.stat_result) -> None:
    """Remove the socket file, unless another server has put its own there."""
    with contextlib.suppress(FileNotFoundError):
        if os.path.samestat(path.stat(), ours):
            path.unlink()


def address_of(listener: socket.socket, server: ServerConfig) -> str:
    """Return the URL for clients."""
    if server.uds:
        return f"unix:{server.uds}"
    host, port = listener.getsockname()[:2]
    return f"http{'s' if server.ssl_keyfile else ''}://{f'[{host}]' if ':' in host else host}:{port}"


def num_api_processes(server: ServerConfig) -> int:
    """Return the number of API processes: as given, or one for each engine while cores are left for it."""
    if server.api_server_count is not None:
        return server.api_server_count
    cores = len(os.sched_getaffinity(0))
    return max(1, min(server.data_parallel_size, cores - server.data_parallel_size))


def _status(code: int) -> str:
    return f"exit code {code}" if code >= 0 else signal.Signals(-code).name


def supervise(engine: EngineConfig, server: ServerConfig) -> int:
    """Serve until a signal or the engine's death; return the exit code."""
    return asyncio.run(Supervisor(engine, server).run())
