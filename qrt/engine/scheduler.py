"""Scheduler: which requests run in the next step, and what a step's tokens mean for them.

First come, first served, continuous batching. A step decodes one token for every request whose prompt is
done and fills the rest of the token budget with chunks of prefill. When the pool has no slot left for a
decode, the request that came last is paused: its K/V go to the prefix cache (from where they may be evicted)
and it waits at the head of the queue. Requests run in the order they came, so the first one always advances.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from qrt.config import SamplingParams
from qrt.engine.logprobs import Scores
from qrt.engine.output import RequestDelta
from qrt.engine.plan import Chunk, Decode, Plan, Sampling, Scoring, StepResult
from qrt.engine.request import FinishReason, Request
from qrt.errors import ConfigError
from qrt.mem.manager import KVManager
from qrt.mem.slots import Ints

# A request is let in only when every running one can still grow by this much (or to its end): otherwise it
# would soon be paused again, and its prompt computed twice.
LOOKAHEAD_TOKENS = 64
# Slots a decoding request is given at a time while there is room: one call for so many steps.
GROW_TOKENS = 16


@dataclass(frozen=True)
class Limits:
    """The caps of `EngineConfig`, settled."""

    max_model_len: int
    max_num_seqs: int
    max_num_batched_tokens: int


class Scheduler:
    """Waiting and running requests, and the slots they hold. One thread at a time.

    running      in order of arrival, all of which came before those in `waiting`
    num_pauses   how often a request had to give its slots back so far
    """

    def __init__(
        self, kv: KVManager, limits: Limits, eos_token_ids: Iterable[int] = (), seed: int = 0
    ) -> None:
        self.kv = kv
        self.limits = limits
        self.waiting: deque[Request] = deque()
        self.running: list[Request] = []
        self.num_pauses = 0
        self._requests: dict[str, Request] = {}
        # each running request needs a token of the budget for its decode
        self._rows = list(range(min(limits.max_num_seqs, limits.max_num_batched_tokens)))[::-1]
        self._max_len = min(limits.max_model_len, kv.num_slots)
        self._eos = frozenset(eos_token_ids)
        self._seed = seed
        self._num_added = 0

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._requests)

    def max_len(self, prompt_len: int, max_tokens: int | None) -> int:
        """Tokens at which the request ends. Raises ConfigError when even one output would not fit."""
        if not prompt_len:
            raise ConfigError("prompt: got no tokens, wanted at least one")
        first = 0 if max_tokens == 0 else 1
        for name, limit in (("max_model_len", self.limits.max_model_len), ("KV pool", self.kv.num_slots)):
            if prompt_len + first > limit:
                raise ConfigError(
                    f"prompt: got {prompt_len} tokens, wanted at most {limit - first} ({name} {limit}"
                    f"{', one for the output' if first else ''}); shorten the prompt or raise the {name}"
                )
        return self._max_len if max_tokens is None else min(prompt_len + max_tokens, self._max_len)

    def add(self, request_id: str, prompt: Ints, params: SamplingParams, *, generate: bool = True) -> None:
        """Queue a request for `prompt` int32 [P]; generate=False only scores the prompt.

        Raises ConfigError when the id is in use, or the prompt is empty or can never fit.
        """
        if request_id in self._requests:
            raise ConfigError(f"request id {request_id!r}: already in use; ids of live requests must differ")
        max_len = self.max_len(len(prompt), params.max_tokens if generate else 0)
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        request = Request(request_id, prompt, params, self._sampling(params), stop_ids, max_len)
        self._num_added += 1
        self._requests[request_id] = request
        self.waiting.append(request)

    def abort(self, request_id: str) -> None:
        """Forget a request and free its slots; nothing happens when it is not, or no longer, there."""
        request = self._requests.pop(request_id, None)
        if request is not None and request.seq is not None:
            self._stop(request, keep=True)
        elif request is not None:
            self.waiting.remove(request)

    def plan(self) -> Plan | None:
        """The next step, or None when nothing can run."""
        decodes = self._plan_decodes()
        budget = self.limits.max_num_batched_tokens - len(decodes)
        chunks: list[Chunk] = []
        for request in self.running:
            if not request.decoding and budget > 0:
                chunks.append(self._chunk(request, budget))
                budget -= len(chunks[-1].tokens)
        admitted = []
        while budget > 0 and (new := self._admit()):
            admitted.append((new.row, new.sampling))
            chunks.append(self._chunk(new, budget))
            budget -= len(chunks[-1].tokens)
        return Plan(tuple(admitted), tuple(decodes), tuple(chunks)) if decodes or chunks else None

    def commit(self, plan: Plan, result: StepResult) -> list[RequestDelta]:
        """Take in what a step gave: advance its requests, end those that are done, report."""
        deltas = []
        for chunk in plan.chunks:
            if request := self._requests.get(chunk.request_id):
                request.num_computed = chunk.end
                request.num_scored = max(request.num_scored, min(chunk.end, len(request.prompt) - 1))
                if not chunk.samples:
                    scores = result.prompt_scores.get(request.id)
                    deltas.append(self._report(request, prompt_scores=scores))
        for index, (work, token) in enumerate(zip(plan.sampled, result.tokens, strict=True)):
            if request := self._requests.get(work.request_id):
                request.num_computed = len(request)
                request.output.append(token)
                scores = result.prompt_scores.get(request.id)
                deltas.append(self._report(request, (token,), result.logprobs.get(index), scores))
        return [delta for delta in deltas if delta.token_ids or delta.finish_reason or delta.prompt_scores]

    def fail(self, plan: Plan, error: str) -> list[RequestDelta]:
        """Give up the requests of a step that could not be run."""
        deltas = []
        for request_id in plan.request_ids:
            if request := self._requests.pop(request_id, None):
                self._stop(request, keep=False)
                deltas.append(RequestDelta(request_id, finish_reason=FinishReason.ABORT, error=error))
        return deltas

    def _sampling(self, params: SamplingParams) -> Sampling:
        """The parameters settled; without a seed the request draws from the engine's, by order of arrival."""
        seed = params.seed
        if seed is None:
            sequence = np.random.SeedSequence([self._seed % 2**64, self._num_added])
            seed = int(sequence.generate_state(1, np.uint64).view(np.int64)[0])
        temperature = 0.0 if params.greedy else params.temperature
        return Sampling(temperature, max(params.top_k, 0), params.top_p, seed, params.logprobs)

    def _plan_decodes(self) -> list[Decode]:
        """One decode for every request that is past its prefill, oldest first, pausing from the other end."""
        decodes = []
        for request in tuple(self.running):
            if request.seq is None or not request.decoding:
                continue
            position = len(request) - 1
            slot = self._slot(request, position)
            if slot is not None:
                decode = Decode(request.id, request.row, position, slot, request.sampling, request.banned)
                decodes.append(decode)
        return decodes

    def _slot(self, request: Request, position: int) -> int | None:
        """The slot of `position`, or None when the request itself had to be paused for lack of room."""
        while request.seq is not None:
            seq = request.seq
            if position < len(seq):
                return int(seq.slots[position])
            more = min(GROW_TOKENS, request.max_len - len(seq))
            if self.kv.extend(seq, more) is None and self.kv.extend(seq, 1) is None:
                assert len(self.running) > 1, "a request that fits the pool alone found no room"
                self._pause(self.running[-1])
        return None

    def _pause(self, request: Request) -> None:
        """Take back the slots of a running request; it waits first in the queue with what it has."""
        self._stop(request, keep=True)
        self.waiting.appendleft(request)
        self.num_pauses += 1

    def _stop(self, request: Request, keep: bool) -> None:
        """Take a running request's slots (kept as cache or not) and its row."""
        assert request.seq is not None
        self.kv.release(request.seq, request.ids[: request.num_computed], keep)
        request.seq = None
        self._rows.append(request.row)
        self.running.remove(request)

    def _admit(self) -> Request | None:
        """Start the first waiting request, or None when there is none or it must wait on."""
        if not self.waiting or not self._rows:
            return None
        request = self.waiting[0]
        spare = 0
        if self.running:
            growing = (*self.running, request)
            held = ((len(other) if other.seq is None else len(other.seq), other) for other in growing)
            spare = sum(min(other.max_len - slots, LOOKAHEAD_TOKENS) for slots, other in held)
        ids = request.ids
        seq = self.kv.start(ids, reuse=not request.scoring, spare=spare)
        if seq is None:
            return None
        self.waiting.popleft()
        self.running.append(request)
        request.seq = seq
        request.row = self._rows.pop()
        request.prefill_len = len(ids)
        request.num_computed = seq.num_cached
        if request.num_cached is None:
            request.num_cached = seq.num_cached
        return request

    def _chunk(self, request: Request, budget: int) -> Chunk:
        """The next tokens of a prefill, at most `budget`."""
        assert request.seq is not None
        start = request.num_computed
        end = min(start + budget, request.prefill_len)
        first_slot = 0 if start == request.seq.num_cached else start
        return Chunk(
            request.id,
            request.row,
            start,
            request.ids[start:end],
            request.seq.slots[first_slot:end].copy(),
            samples=request.generates and end == request.prefill_len,
            sampling=request.sampling,
            banned=request.banned,
            scoring=_scoring(request, start, end),
        )

    def _report(
        self,
        request: Request,
        token_ids: tuple[int, ...] = (),
        logprobs: Scores | None = None,
        prompt_scores: Scores | None = None,
    ) -> RequestDelta:
        """What the step added to a request that has been advanced; ends it when it is done."""
        reason = _finish_reason(request)
        if reason:
            del self._requests[request.id]
            self._stop(request, keep=request.generates)
        stop_reason = None
        if reason is FinishReason.STOP and token_ids[-1] not in self._eos:
            stop_reason = token_ids[-1]
        cached = request.num_cached or 0
        return RequestDelta(request.id, token_ids, reason, stop_reason, logprobs, prompt_scores, cached)


def _finish_reason(request: Request) -> FinishReason | None:
    if not request.decoding:
        return None
    if len(request.output) > request.params.min_tokens and request.output[-1] in request.stop_ids:
        return FinishReason.STOP
    return FinishReason.LENGTH if len(request) >= request.max_len else None


def _scoring(request: Request, start: int, end: int) -> Scoring | None:
    """The prompt tokens that follow positions [start, end) and have not been scored yet."""
    if not request.scoring or request.params.prompt_logprobs is None:
        return None
    first, last = max(start, request.num_scored), min(end, len(request.prompt) - 1)
    if first >= last:
        return None
    targets: Ints = request.prompt[first + 1 : last + 1]
    return Scoring(first - start, targets, request.params.prompt_logprobs)
