"""The engine processes of a server: the settings of each, and what the supervisor holds of it."""

from __future__ import annotations

import asyncio
import os
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from qrt.config import EngineConfig
from qrt.errors import ConfigError
from qrt.serve.link.messages import EngineInfo, Hello, Message, Ready, decode_ready
from qrt.serve.link.sockets import ClientSocket
from qrt.serve.processes.process import EngineLink

COUNT_GPUS = "import torch; print(torch.cuda.device_count() if torch.cuda.is_available() else 0)"
GIB = 1 << 30


def engine_configs(config: EngineConfig, count: int) -> list[EngineConfig]:
    """Return the settings of `count` engines: those of `config`, each with GPUs of its own.

    The GPUs are counted from the one that `config` names, or from the first. On a CPU all engines share it.
    Raises ConfigError if there are too few GPUs.
    """
    device = str(config.device or "cuda")
    if count == 1 or device.startswith("cpu"):
        return [config] * count
    there, each = _count_gpus(), config.tensor_parallel_size
    if config.device is None and not there:
        return [replace(config, device="cpu")] * count
    first = int(re.sub(r"\D", "", device) or 0)
    if first + count * each > there:
        most = max(there - first, 0) // each
        raise ConfigError(
            f"data_parallel_size: expected at most {most}, got {count}; there are {there} GPUs, counted from "
            f"cuda:{first}, and an engine takes {each}; CUDA_VISIBLE_DEVICES says which are visible"
        )
    return [replace(config, device=f"cuda:{first + index * each}") for index in range(count)]


def _count_gpus() -> int:
    """Count the GPUs in a process of its own, so that this one does not load torch."""
    command = [sys.executable, "-c", COUNT_GPUS]
    return int(subprocess.run(command, stdout=subprocess.PIPE, check=True).stdout)


def engine_name(index: int, config: EngineConfig) -> str:
    """Return the name of one engine of several: "engine 1 (cuda:1)"."""
    more = config.tensor_parallel_size - 1
    kind, _, first = str(config.device).partition(":")
    return f"engine {index} ({config.device}{f'-{int(first) + more}' if more and first else ''})"


class EngineProcess:
    """An engine's process, and the supervisor's connection to it.

    config   the engine's settings
    link     what its clients need
    held     file descriptor of the end of the pipe that the process holds
    """

    def __init__(self, index: int, config: EngineConfig, socket: Path, name: str) -> None:
        alive, self.held = os.pipe()
        self.config = config
        self.link = EngineLink(index, name, str(socket), alive)
        self.child: asyncio.subprocess.Process
        self.ended: asyncio.Task[int] | None = None
        self._socket: ClientSocket[Ready] | None = None

    def started(self, child: asyncio.subprocess.Process) -> None:
        """Take the process, which now holds its end of the pipe."""
        os.close(self.held)
        self.held = -1
        self.child, self.ended = child, asyncio.create_task(child.wait())
        self._socket = ClientSocket(self.link.socket, "supervisor", decode_ready)

    async def ready(self) -> EngineInfo:
        """Wait until the engine is ready and return its facts."""
        assert self._socket is not None
        self._socket.send(Hello())
        return (await self._socket.receive()).info

    def send(self, message: Message) -> None:
        """Send the engine a message, unless it has ended."""
        if self._socket is not None and self.ended is not None and not self.ended.done():
            self._socket.send(message)

    def close(self) -> None:
        """Close what the supervisor holds."""
        if self._socket is not None:
            self._socket.close()
        for descriptor in {self.link.alive, self.held} - {-1}:
            os.close(descriptor)


def start_up_lines(info: EngineInfo) -> list[str]:
    """Return the lines that are logged when an engine is ready."""
    return [
        f"model: {info.model}, weights {info.weight_scheme}, {info.weight_bytes / GIB:.2f} GiB, "
        f"activations {info.dtype} on {info.device}",
        f"KV cache: {info.kv}, {info.kv_bytes_per_token:,} bytes per token, {info.pool_bytes / GIB:.2f} GiB",
        f"KV pool: {info.pool_tokens:,} tokens; maximum concurrency for {info.max_model_len:,} tokens per "
        f"request: {info.concurrency:.2f}x, at most {info.max_num_seqs} requests{info.kv_windows}",
    ]
