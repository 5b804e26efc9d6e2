"""Send the load of `qrt-eval serve` to an OpenAI-compatible API, and time each request."""

from __future__ import annotations

import asyncio
import json
import multiprocessing
import operator
import time
from collections.abc import AsyncIterator, Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from multiprocessing.connection import Connection
from multiprocessing.sharedctypes import Synchronized
from typing import Any

import aiohttp
import numpy as np

from qrt.errors import QrtError

TIMEOUT_S = 6 * 3600  # for a whole request; the queue may be long


@dataclass(frozen=True)
class Prompt:
    """Hold one prompt, as text or token ids, and how many tokens to ask for."""

    content: str | list[int]
    num_tokens: int
    output_len: int


@dataclass
class Outcome:
    """Hold the timing of one request, in seconds from `started` (a perf_counter).

    ttft   time until the first chunk that holds a choice
    itls   gaps between later such chunks; one chunk may hold several tokens
    """

    prompt_tokens: int
    started: float = 0.0
    ttft: float = 0.0
    itls: list[float] = field(default_factory=list)
    latency: float = 0.0
    output_tokens: int = 0
    text: str = ""
    error: str = ""

    @property
    def tpot(self) -> float | None:
        """Return the time per output token after the first; None if there is only one."""
        return (self.latency - self.ttft) / (self.output_tokens - 1) if self.output_tokens > 1 else None


def delays(count: int, rate: float, burstiness: float, seed: int) -> list[float]:
    """Return when each of `count` requests is sent, in seconds after the start; 0 for a rate of inf.

    Gaps are gamma-distributed with mean 1/rate and shape `burstiness` (1: a Poisson process), stretched to
    the expected total.
    """
    if rate == float("inf"):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    gaps[0] = 0.0
    times = np.cumsum(gaps)
    wanted = (count - 1) / rate
    return list(times * (wanted / times[-1]) if times[-1] > 0 else times)


@dataclass(frozen=True)
class Load:
    """Say what is sent: prompts, each at its time in seconds after the start, at most `most` at once."""

    url: str
    prompts: Sequence[Prompt]
    body: dict[str, Any]
    at: Sequence[float]
    most: int
    key: str | None


def send(load: Load, processes: int = 1) -> tuple[list[Outcome], float]:
    """Send a load from `processes` processes; return the outcomes in order, and the seconds it took.

    One process reads some ten thousand chunks per second; a faster server needs several. The processes share
    the `most` requests that may run at once. Each takes the next prompt whenever one of its own requests has
    ended.
    """
    if processes == 1:
        found, seconds = asyncio.run(_send(load, load.most, count().__next__, time.perf_counter()))
        return [found[i] for i in range(len(load.prompts))], seconds
    context = multiprocessing.get_context("spawn")
    taken = context.Value("q", 0)
    children = []
    for index in range(processes):
        here, there = context.Pipe()
        streams = load.most // processes + (index < load.most % processes)
        child = context.Process(target=_child, args=(there, load, streams, taken), daemon=True)
        child.start()
        there.close()  # so `recv` ends if the child dies
        children.append((here, child))
    try:
        for here, _ in children:
            here.recv()  # the child is ready
        begin = time.perf_counter() + 0.01  # perf_counter is the same in all processes
        for here, _ in children:
            here.send(begin)
        results = [here.recv() for here, _ in children]
    except EOFError:
        raise QrtError("--processes: a process that sends requests died; see its error above") from None
    finally:
        for _, child in children:
            child.terminate()
    found = {i: outcome for some, _ in results for i, outcome in some.items()}
    return [found[i] for i in range(len(load.prompts))], max(seconds for _, seconds in results)


def _child(pipe: Connection, load: Load, streams: int, taken: Synchronized[int]) -> None:
    def take() -> int:
        with taken.get_lock():
            taken.value += 1
            return taken.value - 1

    pipe.send(None)
    pipe.send(asyncio.run(_send(load, streams, take, pipe.recv())))


async def _send(
    load: Load, streams: int, take: Callable[[], int], begin: float
) -> tuple[dict[int, Outcome], float]:
    """Send the prompts whose numbers `take` gives, `streams` at once; return outcomes by number."""
    headers = {"Authorization": f"Bearer {load.key}"} if load.key else {}
    timeout = aiohttp.ClientTimeout(total=TIMEOUT_S)
    connector = aiohttp.TCPConnector(limit=0)
    outcomes: dict[int, Outcome] = {}
    async with aiohttp.ClientSession(headers=headers, timeout=timeout, connector=connector) as session:

        async def stream() -> None:
            while (number := take()) < len(load.prompts):
                await asyncio.sleep(begin + load.at[number] - time.perf_counter())
                outcomes[number] = await request(session, load.url, load.prompts[number], load.body)

        await asyncio.gather(*(stream() for _ in range(streams)))
        return outcomes, time.perf_counter() - begin


async def request(session: aiohttp.ClientSession, url: str, prompt: Prompt, body: dict[str, Any]) -> Outcome:
    """Stream one completion and time its chunks."""
    outcome = Outcome(prompt.num_tokens, started=time.perf_counter())
    last, chunks = outcome.started, 0
    try:
        async with session.post(url, json=body | payload(url, prompt)) as response:
            if response.status != 200:
                outcome.error = f"HTTP {response.status}: {(await response.text())[:300]}"
                return outcome
            async for line in lines(response.content):
                event = parse(line)
                if event is None:
                    continue
                if event.error:
                    outcome.error = event.error
                    return outcome
                if event.tokens:
                    outcome.prompt_tokens, outcome.output_tokens = event.tokens
                for text in event.texts:
                    now = time.perf_counter()
                    if chunks:
                        outcome.itls.append(now - last)
                    else:
                        outcome.ttft = now - outcome.started
                    last, chunks = now, chunks + 1
                    outcome.text += text
    except (aiohttp.ClientError, TimeoutError, OSError) as error:
        outcome.error = f"{type(error).__name__}: {error}"
        return outcome
    if not chunks:
        outcome.error = "expected a choice in the stream, got none"
    outcome.latency = last - outcome.started
    outcome.output_tokens = outcome.output_tokens or chunks  # if the server sends no usage
    return outcome


async def lines(content: aiohttp.StreamReader) -> AsyncIterator[bytes]:
    """Yield the lines of a body as they arrive. StreamReader's own iterator waits once per line."""
    rest = b""
    async for piece in content.iter_any():
        *whole, rest = (rest + piece).split(b"\n")
        for line in whole:
            yield line
    yield rest


def payload(url: str, prompt: Prompt) -> dict[str, Any]:
    """Return the part of the body that differs between requests."""
    if url.endswith("/chat/completions"):
        return {"messages": [{"role": "user", "content": prompt.content}], "max_tokens": prompt.output_len}
    return {"prompt": prompt.content, "max_tokens": prompt.output_len}


@dataclass(frozen=True)
class Event:
    """Hold what one event of a stream says: the text of each choice, (prompt, output) tokens, or an error."""

    texts: Sequence[str] = ()
    tokens: tuple[int, int] | None = None
    error: str = ""


def parse(line: bytes) -> Event | None:
    """Read the event in one line of a server-sent event stream; None if the line holds none.

    Anything that an OpenAI API does not send becomes an event with an error.
    """
    if not line.startswith(b"data:"):
        return None
    data = line[5:].strip()
    if data == b"[DONE]":
        return None
    try:
        event = json.loads(data)
        if error := event.get("error"):
            return Event(error=str(error)[:300])
        tokens = None
        if usage := event.get("usage"):
            tokens = operator.index(usage["prompt_tokens"]), operator.index(usage["completion_tokens"])
        return Event([_text(choice) for choice in event.get("choices", ())], tokens)
    except (ValueError, AttributeError, KeyError, TypeError):
        return Event(error=f"expected an event of an OpenAI API, got {data[:200].decode(errors='replace')}")


def _text(choice: Mapping[str, Any]) -> str:
    """Return the text of a completion's or a chat's chunk."""
    text = choice.get("text") or (choice.get("delta") or {}).get("content") or ""
    if not isinstance(text, str):
        raise TypeError(text)
    return text


def concurrency(outcomes: Sequence[Outcome]) -> int:
    """Return the most requests that were in progress at once."""
    edges = sorted(edge for o in outcomes for edge in ((o.started, 1), (o.started + o.latency, -1)))
    level = most = 0
    for _, step in edges:
        level += step
        most = max(most, level)
    return most


def chunk_times(outcome: Outcome) -> Iterator[float]:
    """Yield when each chunk arrived, as a perf_counter."""
    at = outcome.started + outcome.ttft
    yield at
    for gap in outcome.itls:
        at += gap
        yield at
