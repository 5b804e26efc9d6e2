"""`qrt-serve` as a user starts it, its processes, and long requests to it."""

import os
import socket
import subprocess
import sys
import threading
import time
from pathlib import Path

import httpx
import pytest

from qrt.assets import model_path  # one layer, by conftest.py

LONG = {
    "model": "tiny",
    "prompt": "The president of the",
    "max_tokens": 1900,
    "ignore_eos": True,
    "temperature": 0,
}
PATIENCE = 120.0  # seconds: ends a wait for what will never come, however busy the machine is


class Processes:
    """`qrt-serve` of a model named tiny, as a user starts it."""

    def __init__(self, tmp_path: Path, *flags: str, log: int | None = None, whole: bool = False) -> None:
        """Serve the first layer, or all with `whole`; `log` is a file descriptor instead of a file."""
        with socket.socket() as probe:
            probe.bind(("127.0.0.1", 0))
            self.port = probe.getsockname()[1]
        self.url = f"http://127.0.0.1:{self.port}"
        self.log = tmp_path / "log"
        command = [
            sys.executable,
            "-c",
            "import sys; from qrt.serve.command.cli import main; sys.exit(main())",
        ]
        model = "tiny" if whole else str(model_path("tiny"))
        own = ("--served-model-name", "tiny", "--port", str(self.port), "--kv-cache-memory-bytes", "64M")
        environment = {**os.environ, "TMPDIR": str(tmp_path), "OMP_NUM_THREADS": "1"}
        with self.log.open("wb") as file:
            to = file if log is None else log
            self.process = subprocess.Popen([*command, model, *own, *flags], stderr=to, env=environment)
        # a connection for each request: one that is kept would hold a process that dies or ends
        self.client = httpx.Client(base_url=self.url, timeout=PATIENCE, headers={"Connection": "close"})

    def get(self, path: str) -> httpx.Response:
        return self.client.get(path)

    def wait_ready(self) -> None:
        self.wait(lambda: self.get("/readiness").status_code == 200)

    def wait(self, condition) -> None:
        """Until it holds; a refused connection is no."""
        end = time.monotonic() + PATIENCE
        while time.monotonic() < end:
            try:
                if condition():
                    return
            except httpx.TransportError:
                pass
            time.sleep(0.05)
        pytest.fail(f"waited {PATIENCE} s for nothing; the log: {self.log.read_text()[-3000:]}")

    def children(self, module: str) -> list[int]:
        """Processes of that module that the server has started, oldest first."""
        found = subprocess.run(
            ["ps", "-o", "pid=,args=", "--ppid", str(self.process.pid)], capture_output=True
        )
        return [
            int(line.split()[0])
            for line in found.stdout.decode().splitlines()
            if f"qrt.serve.processes.{module}" in line
        ]

    def load(self) -> dict:
        return self.get("/load").raise_for_status().json()

    def idle(self) -> bool:
        load = self.load()
        return not (load["running"] or load["waiting"] or load["kv_used_tokens"])

    def stop(self) -> None:
        self.client.close()
        if self.process.poll() is None:
            self.process.kill()
        self.process.wait()


class Request(threading.Thread):
    """A long request in the background; `reply` is what came of it."""

    def __init__(self, server: Processes, stream: bool, **body) -> None:
        super().__init__(daemon=True)
        self.body, self.url = {**LONG, "stream": stream, **body}, f"{server.url}/v1/completions"
        self.began = threading.Event()
        self.reply: tuple[int, str] | Exception | None = None

    def run(self) -> None:
        try:
            with httpx.stream("POST", self.url, json=self.body, timeout=PATIENCE) as reply:
                text = ""
                for part in reply.iter_text():
                    text += part
                    self.began.set()
                self.reply = reply.status_code, text
        except httpx.TransportError as error:
            self.reply = error


def gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True
