"""Engines: the replicas of a server as one client, which picks an engine for each request.

A request goes to the engine that took the longest known prefix of its prompt last, whose cache may hold it,
unless that engine has much more to do than the least busy one. All samples of a request go together.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Collection, Mapping, Sequence

from msgspec.structs import replace
from prometheus_client import generate_latest

from qrt.serve.link.answers import MERGES, EnginesUp
from qrt.serve.link.engine_client import (
    AnyCollector,
    EngineClient,
    EngineError,
    EngineLoad,
    RequestStream,
)
from qrt.serve.link.messages import EngineInfo, Message
from qrt.serve.link.metric_names import MetricNames
from qrt.serve.link.prefixes import Prefixes, prefix_hashes

# An engine may have so much more to do than the least busy one and still get a prompt that it knows. With 64
# requests on each of 8 engines, a limit of 2 alone would send every fourth such prompt elsewhere.
MORE_REQUESTS = 2
MORE_SHARE = 1 / 8  # of the least busy one's requests, if that is more
MORE_TOKENS = 4096  # in waiting requests
SILENT_SECONDS = 10.0  # an engine that has sent nothing for so long gets no request while others speak


def pick(loads: Mapping[int, EngineLoad], picked: Sequence[int], known: int | None) -> int:
    """Return the engine for a request.

    loads    of the engines to choose from
    picked   when each engine was picked last; among equals the one of longest ago is picked
    known    the engine that took the prompt's longest known prefix; None: it is known to none
    """
    least = min(loads, key=lambda engine: (_size(loads[engine]), picked[engine]))
    if known is None or known not in loads:
        return least
    most = loads[least].requests + max(MORE_REQUESTS, loads[least].requests * MORE_SHARE)
    most_tokens = loads[least].waiting_tokens + MORE_TOKENS
    return known if loads[known].requests <= most and loads[known].waiting_tokens <= most_tokens else least


def _size(load: EngineLoad) -> float:
    """Return a load as one number, in requests."""
    return load.requests + load.waiting_tokens * MORE_REQUESTS / MORE_TOKENS


class Engines:
    """Clients of equal engines with the interface of one EngineClient.

    info      of the first engine, with the devices of all and the shortest of their context lengths
    ready     set when all engines that live are ready
    stopped   the error that ended the last engine; None while one lives
    """

    def __init__(
        self,
        clients: Sequence[EngineClient],
        names: Sequence[str],
        *,
        metrics: Sequence[MetricNames],
        prefixes: Prefixes | None,
    ) -> None:
        """Connect to engines.

        names      of the engines, for people
        metrics    names of the engines' metrics
        prefixes   who took which prompt; None: only the load counts
        """
        self.info: EngineInfo
        self.ready = asyncio.Event()
        self.stopped: EngineError | None = None
        self.clients = clients
        self._names = names
        self._metrics = metrics
        self._prefixes = prefixes
        self._picked = [0] * len(clients)
        self._starts: list[asyncio.Task[bool]] = []  # each ends when its engine is ready

    async def start(self) -> None:
        """See EngineClient."""
        for client in self.clients:
            await client.start()
        self._starts = [asyncio.create_task(client.ready.wait()) for client in self.clients]
        for task, client in zip(self._starts, self.clients, strict=True):
            if client.stopped:  # it has died before
                task.cancel()
        self._waiting = asyncio.create_task(self._become_ready())

    async def _become_ready(self) -> None:
        await asyncio.wait(self._starts)
        infos = [client.info for client in self.clients if client.ready.is_set()]
        if self.stopped is None and infos:
            devices = ", ".join(dict.fromkeys(info.device for info in infos))
            shortest = min(info.max_model_len for info in infos)
            self.info = replace(infos[0], device=devices, max_model_len=shortest)
            self.ready.set()

    async def close(self) -> None:
        """See EngineClient."""
        self._waiting.cancel()
        for client in self.clients:
            await client.close()

    async def submit(
        self, collectors: Sequence[AnyCollector], arrived: float | None = None, *, whole: bool = False
    ) -> RequestStream:
        """See EngineClient; the collectors may go to several engines."""
        if self.stopped:
            raise self.stopped
        stream, arrived = RequestStream(self, collectors, whole=whole), arrived or time.monotonic()
        for collector in collectors:
            self.clients[self._pick(collector)].add(collector, stream, arrived)
        await stream.accepted()
        return stream

    def _pick(self, collector: AnyCollector) -> int:
        """Pick the engine of a collector, and note that it has its prompt."""
        living = [engine for engine, client in enumerate(self.clients) if not client.stopped]
        able = [engine for engine in living if self.clients[engine].silent_seconds < SILENT_SECONDS]
        loads = {engine: self.clients[engine].load for engine in able or living}
        known, hashes = None, []
        if self._prefixes is not None:
            hashes = prefix_hashes(collector.prompt_ids, collector.cache_salt)
            known = self._prefixes.find(hashes, loads)
        engine = pick(loads, self._picked, known)
        self._picked[engine] = max(self._picked) + 1
        if self._prefixes is not None:
            self._prefixes.note(hashes, engine)
        return engine

    async def ask(self, question: str) -> bytes:
        """Ask all engines that live, and merge their answers; EngineError when one of them has none."""
        if self.stopped:
            raise self.stopped
        asked = [client for client in self.clients if not client.stopped]
        found = await asyncio.gather(*(client.ask(question) for client in asked), return_exceptions=True)
        answers = [answer for answer in found if isinstance(answer, bytes)]
        for client, answer in zip(asked, found, strict=True):
            if isinstance(answer, BaseException) and not (client.stopped and answers):
                raise answer
        if question == "metrics":
            up = [not client.stopped for client in self.clients]
            answers.append(generate_latest(EnginesUp(self._metrics, up)))
        return MERGES[question](answers)

    def forget(self, request_ids: Collection[str], *, abort: bool, stopped: bool = False) -> None:
        """See EngineClient."""
        for client in self.clients:
            if own := [id for id in request_ids if client.owns(id)]:
                client.forget(own, abort=abort, stopped=stopped)

    @property
    def num_running(self) -> int:
        """See EngineClient."""
        return sum(client.num_running for client in self.clients)

    @property
    def silent_seconds(self) -> float:
        """How long all engines that live have sent nothing, though requests wait for each of them."""
        return min((client.silent_seconds for client in self.clients if not client.stopped), default=0.0)

    @property
    def dead(self) -> list[str]:
        """The names of the engines that have died."""
        return [name for name, client in zip(self._names, self.clients, strict=True) if client.stopped]

    def tell(self, message: Message) -> None:
        """Send one engine, the first that lives, a message that has no answer."""
        for client in self.clients:
            if not client.stopped:
                client.tell(message)
                return

    def died(self, engine: int) -> None:
        """See EngineClient; the other engines go on."""
        self.clients[engine].stop(f"{self._names[engine]} has died")
        if self._starts:
            self._starts[engine].cancel()
        if all(client.stopped for client in self.clients):
            self.stopped = self.clients[engine].stopped

    def stop(self, reason: str, kind: type[EngineError] = EngineError) -> None:
        """See EngineClient."""
        for client in self.clients:
            client.stop(reason, kind)
        self.stopped = self.stopped or kind(reason)


AnyClient = EngineClient | Engines
