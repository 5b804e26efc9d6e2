"""A storm of streams, most left before their end: `python storm.py URL SECONDS STREAMS [PID ...]`.

Prints what became of them, and what the server's processes (by PID) hold before and after.
"""

from __future__ import annotations

import asyncio
import json
import random
import sys
import time
from collections import Counter
from pathlib import Path
from urllib.parse import urlsplit

import httpx

STUCK_SECONDS = 300.0  # for a request, its time in the queue included


async def one(host: str, port: int, rng: random.Random) -> str:
    """One request on a connection of its own; what became of it."""
    stream, tokens = rng.random() < 0.8, rng.randrange(1, 25)
    leaves = rng.random() < 0.6
    body = json.dumps(
        {
            "prompt": f"In {rng.randrange(50)}",
            "max_tokens": tokens,
            "stream": stream,
            "n": rng.choice((1, 1, 1, 2)),
        }
    )
    head = f"POST /v1/completions HTTP/1.1\r\nHost: {host}\r\nConnection: close\r\n"
    head += f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    reader, writer = await asyncio.open_connection(host, port)
    try:
        writer.write((head + body).encode())
        if leaves and rng.random() < 0.3:  # before anything has come back
            await asyncio.sleep(rng.random())
            return "left"
        received = b""
        async with asyncio.timeout(STUCK_SECONDS):
            while piece := await reader.read(65536):
                received += piece
                if leaves and rng.random() < 0.2:
                    return "left"
        code = int(received.split(b" ", 2)[1])
        if code != 200:
            return str(code)
        whole = b"data: [DONE]" in received if stream else b'"usage"' in received
        if whole and b'"error":' not in received:
            return "answered"
        return f"broken: {received[-200:]!r}"
    except TimeoutError:
        return "stuck"
    finally:
        writer.close()


async def storm(url: str, seconds: float, streams: int, seed: int = 0) -> Counter[str]:
    """Keep `streams` requests going for `seconds`, and wait for the last ones."""
    at = urlsplit(url)
    assert at.hostname and at.port
    end, outcomes = time.monotonic() + seconds, Counter[str]()

    async def client(number: int) -> None:
        rng = random.Random(f"{seed} {number}")
        while time.monotonic() < end:
            try:
                outcome = await one(at.hostname, at.port, rng)
            except OSError as error:
                outcome = type(error).__name__
            outcomes[outcome] += 1
            if outcome == "429":
                await asyncio.sleep(rng.random())

    await asyncio.gather(*(client(number) for number in range(streams)))
    return outcomes


def idle_load(url: str, seconds: float = 60) -> dict[str, float]:
    """The server's load once nothing runs; fails when something still does."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
        load = httpx.get(f"{url}/load", timeout=30).json()
        if not (load["running"] or load["waiting"] or load["kv_used_tokens"]):
            return load
        time.sleep(0.1)
    raise AssertionError(f"still busy after {seconds} s: {load}")


def held(pids: list[int]) -> str:
    """Memory and file descriptors of processes."""
    found = []
    for pid in pids:
        status = Path(f"/proc/{pid}/status").read_text()
        rss = next(line.split()[1] for line in status.splitlines() if line.startswith("VmRSS"))
        files = len(list(Path(f"/proc/{pid}/fd").iterdir()))
        found.append(f"{pid}: {int(rss) / 1024:.0f} MiB, {files} files")
    return "; ".join(found)


if __name__ == "__main__":
    target, duration, count, *pids = sys.argv[1:]
    numbers = [int(pid) for pid in pids]
    asyncio.run(storm(target, 10, int(count)))  # caches are full before anything is measured
    idle_load(target, 300)
    print("before", held(numbers), flush=True)
    for part in range(5):
        outcomes = asyncio.run(storm(target, float(duration) / 5, int(count), part + 1))
        load = idle_load(target, 300)
        print(dict(outcomes), "generated", load["generation_tokens"], held(numbers), flush=True)
