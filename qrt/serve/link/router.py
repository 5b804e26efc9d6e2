"""Router: the loop that connects all clients to one engine.

It takes requests and aborts of all API processes between two steps, runs the step, and sends each API process
one StepOutput with all that the step brought it. An API process whose requests get nothing receives an empty
StepOutput once a second, so that it knows that the engine works. One that chooses between engines also hears
when the load has changed. The engine process runs it; AsyncLLM runs it
in a thread.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import time
from collections import defaultdict
from collections.abc import Callable, Iterable
from typing import Protocol

import msgspec

from qrt.answers.pooling.task import vector_size
from qrt.engine.engine import Engine
from qrt.engine.schedule.output import StepDelta
from qrt.engine.schedule.request import FinishReason
from qrt.errors import QrtError
from qrt.model_files.location import api_name
from qrt.request.sampling import SamplingParams
from qrt.serve.link.messages import (
    Abort,
    Add,
    Answer,
    Ask,
    EngineInfo,
    Failed,
    Gone,
    Hello,
    Ready,
    Refusal,
    ToEngine,
    fields_of,
    params_of,
)
from qrt.serve.link.metric_names import MetricNames
from qrt.serve.link.metrics import EngineMetrics
from qrt.serve.link.step_output import FromEngine, StepOutput

logger = logging.getLogger(__name__)

FAILED_STEPS = 3  # this many failed steps in a row mean a broken device, not a bad request
WATCHDOG_RENEWAL_SECONDS = 1.0
HEARTBEAT_SECONDS = 1.0
LOAD_SECONDS = 0.05  # shortest time between two messages that tell only the load
LOG_SECONDS = 10.0
TRIM_SECONDS = 10.0


class Port(Protocol):
    """The connection over which messages reach the loop and leave it."""

    def receive(self, wait: bool) -> list[tuple[str, ToEngine]] | None:
        """Return the (sender, message) pairs that have come; None ends the loop.

        With `wait` it waits for a while if there are none.
        """

    def send(self, client: str, message: FromEngine) -> None:
        """Send a message to one API process; drop it if the process is gone."""


class EngineRouter:
    """Runs the requests of all clients on one engine.

    info     facts of the engine
    engine   only `run` calls it
    """

    def __init__(
        self,
        engine: Engine,
        *,
        names: MetricNames | None = None,
        watchdog_seconds: float | None = None,
        log_stats: bool = False,
    ) -> None:
        """Connect to an engine.

        names              of the metrics (default: the folder's name is the model's)
        watchdog_seconds   a longer step ends the process, with the stacks of all threads on stderr
        """
        self.engine = engine
        self.info = engine_info(engine)
        names = names or MetricNames(api_name(engine.config.model))
        self.metrics = EngineMetrics(engine, self.info, names)
        self._watchdog_seconds = watchdog_seconds
        self._watchdog_set = 0.0
        self._heartbeat_sent = 0.0
        self._log_seconds = LOG_SECONDS if log_stats else None
        self._clients: dict[str, str] = {}  # request id -> client that waits for it
        self._balancers: set[str] = set()  # clients that want to hear of the load
        self._load_told, self._load_sent = (0, 0), 0.0
        self._gone: set[str] = set()  # clients that have died; no name is used twice
        self._outputs: defaultdict[str, StepOutput] = defaultdict(lambda: StepOutput([], [], []))
        self._answers: list[tuple[str, FromEngine]] = []

    def run(self, port: Port) -> None:
        """Run until the port closes; an exception of a step ends the loop."""
        logged = trimmed = time.monotonic()
        try:
            while (messages := port.receive(wait=not self.engine.has_work)) is not None:
                for client, message in messages:
                    self._take(client, message)
                if self.engine.has_work:
                    self._watch()
                    self._step()
                else:
                    faulthandler.cancel_dump_traceback_later()
                    self._watchdog_set = 0.0
                self._send(port)
                if self.info.device == "cpu" and time.monotonic() - trimmed >= TRIM_SECONDS:
                    trimmed = time.monotonic()
                    _return_free_memory()
                if self._log_seconds and time.monotonic() - logged >= self._log_seconds:
                    logged = time.monotonic()
                    self.metrics.log(logger)
        finally:
            faulthandler.cancel_dump_traceback_later()

    def _take(self, client: str, message: ToEngine) -> None:
        match message:
            case Add() if client in self._gone:
                pass  # Gone may arrive before the last messages of the dead process
            case Add():
                self._add(client, message)
            case Abort(ids=ids, stopped=stopped):
                self._abort(ids, FinishReason.STOP if stopped else FinishReason.ABORT)
            case Ask(id=id, question=question):
                self._answers.append((client, Answer(id, QUESTIONS[question](self))))
            case Failed(code=code):
                self.metrics.failed(code)
            case Hello(balances=balances):
                if balances:
                    self._balancers.add(client)
                self._answers.append((client, Ready(self.info)))
            case Gone(client=gone):
                self._gone.add(gone)
                self._balancers.discard(gone)
                self._abort([id for id, owner in self._clients.items() if owner == gone])

    def _add(self, client: str, message: Add) -> None:
        output = self._outputs[client]
        try:
            self.engine.add(
                message.id,
                message.prompt_ids,
                params_of(message.params),
                generate=message.generate,
                priority=message.priority,
                cache_salt=message.cache_salt,
                thinking=message.thinking,
                pool=message.pool,
            )
        except QrtError as error:
            output.refused.append(Refusal.of(message.id, error))
            return
        self._clients[message.id] = client
        self.metrics.added(message)
        output.accepted.append(message.id)

    def _abort(self, ids: Iterable[str], reason: FinishReason = FinishReason.ABORT) -> None:
        for id in ids:
            if self._clients.pop(id, None) is not None:
                self.engine.abort(id)
                self.metrics.ended(id, reason)

    def _step(self) -> None:
        started = time.monotonic()
        deltas = self.engine.step()
        self.metrics.step(started, deltas)
        for delta in deltas:
            self._hand_over(delta)
        if self.engine.failed_steps >= FAILED_STEPS:
            raise RuntimeError(f"{FAILED_STEPS} steps in a row failed, the last one: {deltas[-1].error}")

    def _hand_over(self, delta: StepDelta) -> None:
        client = self._clients.get(delta.request_id)
        if client is not None:
            self._outputs[client].deltas.append(delta)
            if delta.finish_reason:
                del self._clients[delta.request_id]

    def _send(self, port: Port) -> None:
        now = time.monotonic()
        if now - self._heartbeat_sent >= HEARTBEAT_SECONDS:
            self._heartbeat_sent = now
            for client in set(self._clients.values()) - self._outputs.keys():
                _ = self._outputs[client]  # makes an empty one
        if self._balancers:
            self._tell_load(now)
        for client, output in self._outputs.items():
            port.send(client, output)
        self._outputs.clear()
        for client, answer in self._answers:
            port.send(client, answer)
        self._answers.clear()

    def _tell_load(self, now: float) -> None:
        """Put the load into the outputs of clients that want it; make some for those that have none."""
        scheduler = self.engine.scheduler
        load = len(scheduler.running) + len(scheduler.waiting), scheduler.waiting.num_tokens
        rested = now - self._load_sent >= LOAD_SECONDS or not self.engine.has_work  # then the loop may sleep
        if load != self._load_told and rested:
            self._load_told, self._load_sent = load, now
            for client in self._balancers:
                _ = self._outputs[client]
        for client in self._balancers & self._outputs.keys():
            self._outputs[client].num_requests, self._outputs[client].waiting_tokens = load

    def _watch(self) -> None:
        """Set the watchdog for this step; at most once a second, because each time starts a thread."""
        now = time.monotonic()
        if self._watchdog_seconds and now - self._watchdog_set > WATCHDOG_RENEWAL_SECONDS:
            faulthandler.dump_traceback_later(self._watchdog_seconds, exit=True)
            self._watchdog_set = now

    def reset_prefix_cache(self) -> bytes:
        """Forget cached prefixes that no running request reads."""
        self.engine.reset_prefix_cache()
        return b""


def _return_free_memory() -> None:
    """Return free heap memory to the system.

    On a CPU a step's tensors are on the heap, whose holes glibc keeps: with varied batches an engine that
    uses 300 MiB would hold gigabytes. On a GPU the tensors are elsewhere, and this is not called.
    """
    if (trim := getattr(ctypes.CDLL(None), "malloc_trim", None)) is not None:
        trim(0)


def engine_info(engine: Engine) -> EngineInfo:
    """Return the facts of a loaded engine."""
    default = fields_of(SamplingParams())
    given = fields_of(engine.generation.sampling)
    return EngineInfo(
        model=engine.config.model,
        weight_scheme=engine.model.scheme,
        weight_bytes=engine.model.num_bytes,
        dtype=str(engine.model.dtype).removeprefix("torch."),
        device=str(engine.model.device),
        kv=engine.pool.kv,
        kv_bytes_per_token=engine.kv_bytes_per_token,
        pool_tokens=engine.pool.num_slots,
        pool_bytes=engine.pool.num_bytes,
        concurrency=engine.pool.concurrency,
        kv_windows=engine.pool.about_windows,
        max_model_len=engine.max_model_len,
        max_num_seqs=engine.scheduler.limits.max_num_seqs,
        max_num_queued_reqs=engine.config.max_num_queued_reqs,
        max_num_queued_tokens=engine.config.max_num_queued_tokens,
        vocab_size=engine.model.arch.vocab_size,
        sampling={name: value for name, value in given.items() if value != default[name]},
        max_new_tokens=engine.generation.max_new_tokens,
        pooling=engine.pooling,
        vector_size=vector_size(engine.pooling, engine.model.arch.hidden_size),
    )


QUESTIONS: dict[str, Callable[[EngineRouter], bytes]] = {
    "metrics": lambda router: router.metrics.exposition(),
    "load": lambda router: msgspec.json.encode(router.metrics.load()),
    "reset_prefix_cache": EngineRouter.reset_prefix_cache,
}
