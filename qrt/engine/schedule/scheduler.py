"""Scheduler: decides which requests run in the next step, and applies a step's tokens to them.

It batches continuously. A step decodes one token for every request whose prompt is done. It fills the rest of
the token budget with chunks of prefill, in the order of the requests: as they came, or by priority. When the
pool has no slot left for a decode, the last request in that order is paused. Its K/V go to the prefix cache,
which may evict them, and it waits first among its equals. The first request always advances. A request that
grows beyond `Limits.long_rope_switch` is preempted too: it then uses other RoPE tables, from its first
token.

The next step may be planned while one runs. `plan` advances the requests by what the step will surely do, and
`commit` adds the tokens when they are known. A request in a launched step cannot be paused: `plan` then
returns None until that step is committed. Slots may be given back at once: their next owner writes after
that step, on the same stream.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Iterable

import numpy as np

from qrt.arch.rope import rope_offset
from qrt.engine.schedule import lookahead
from qrt.engine.schedule.admission import Growing
from qrt.engine.schedule.finite import prompt_fault, token_fault
from qrt.engine.schedule.limits import Limits
from qrt.engine.schedule.logprobs import LogprobRows
from qrt.engine.schedule.lookahead import Lookahead, lacking_slots
from qrt.engine.schedule.output import Cause, StepDelta
from qrt.engine.schedule.plan import Admission, Chunk, Plan, SamplingRules, StepResult, Verdict
from qrt.engine.schedule.queue import Queue, insert, remove
from qrt.engine.schedule.request import FinishReason, Request
from qrt.engine.schedule.rows import Rows
from qrt.engine.schedule.sharing import Unpublished
from qrt.errors import ConfigError
from qrt.mem.manager import KVManager
from qrt.mem.slots import Ints
from qrt.request.sampling import SamplingParams

# In steps of more tokens than this, padding costs time. Smaller steps take as long as reading the weights.
PADDED_TOKENS = 512
# Plans for which a request that found no room is skipped: the expected peak hardly falls in between.
PATIENCE = 16


class Scheduler:
    """Holds the waiting and running requests and their slots. One thread at a time may call it.

    waiting, running   requests, sorted by their order
    num_pauses         how often a request was paused so far because slots ran out
    num_corrupted      requests that ended so far because the model gave NaN or infinity
    """

    def __init__(
        self,
        kv: KVManager,
        limits: Limits,
        eos_token_ids: Iterable[int] = (),
        seed: int = 0,
        *,
        conservative: bool = False,
    ) -> None:
        self.kv = kv
        self.limits = limits
        self.waiting = Queue(limits)
        self.running: list[Request] = []
        self.num_pauses = 0
        self.num_corrupted = 0
        self._requests: dict[str, Request] = {}
        self._planned: deque[list[Request]] = deque()  # of launched steps, in the order of `Plan.works`
        self._rows = Rows(limits)
        self._lookahead = Lookahead(kv)
        self._unpublished = Unpublished()
        self._growing: Growing | None = None  # the estimate of the plan that is being made
        self._refused: Request | None = None  # found no room, and no slots have been given back since
        self._patience = 0  # plans until `_refused` is tried again
        self._eos = frozenset(eos_token_ids)
        self._seed = seed
        self._conservative = conservative
        self._num_added = 0  # requests so far

    @property
    def has_work(self) -> bool:
        """Whether a request waits or runs."""
        return bool(self._requests)

    def add(
        self,
        request_id: str,
        prompt: Ints,
        params: SamplingParams,
        *,
        generate: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        pool: str | None = None,
    ) -> None:
        """Queue a request for `prompt` int32 [P], the smallest `priority` first.

        generate=False only scores the prompt, or makes vectors of it (`pool`, as in Request). Raises what
        `check` raises.
        """
        max_len = self.check(request_id, len(prompt), params, generate=generate, whole=bool(pool))
        stop_ids = frozenset(params.stop_token_ids) | (frozenset() if params.ignore_eos else self._eos)
        sampling = SamplingRules.of(params, len(prompt), self._seed_of(params))
        order = (priority, self._num_added)
        request = Request(request_id, prompt, params, sampling, stop_ids, max_len, order, cache_salt, pool)
        self._num_added += 1
        self._requests[request_id] = request
        self.waiting.add(request)

    def check(
        self,
        request_id: str,
        prompt_len: int,
        params: SamplingParams,
        *,
        generate: bool = True,
        whole: bool = False,
    ) -> int:
        """Return the length at which a request would end; `whole` as in `Limits.end`.

        Raises ConfigError when the id is in use, or the prompt is empty or can never fit; QueueFullError when
        the queue is full.
        """
        if request_id in self._requests:
            raise ConfigError(f"request id {request_id!r}: already in use; choose another id")
        most = params.max_tokens if generate else 0
        max_len = self.limits.end(prompt_len, most, self.kv.num_slots, whole=whole)
        self.waiting.check_room(prompt_len)
        return max_len

    def abort(self, request_id: str) -> None:
        """Forget a request and free its slots; do nothing if there is none of that id."""
        request = self._requests.pop(request_id, None)
        if request is not None and request.seq is not None:
            self._stop(request, keep=True)
        elif request is not None:
            self.waiting.remove(request)

    def plan(self) -> Plan | None:
        """Plan the next step; None when nothing can run, at least until the launched step is committed."""
        decoding = self._grow()
        if decoding is None:
            return None
        budget = self.limits.max_num_batched_tokens - len(decoding)
        cached = self.limits.max_cached_tokens
        prefilling: list[tuple[Request, Chunk]] = []
        for request in [r for r in self.running if r.num_computed < r.prefill_len]:
            if (
                budget > 0
                and request.num_computed <= cached
                and request.covered >= request.prefill_len
                and self._rope_offset(request.length) == request.rope_offset
                and (chunk := self._chunk(request, budget, len(decoding)))
            ):
                prefilling.append((request, chunk))
                budget -= len(chunk.tokens)
                cached -= chunk.start
        admitted = []
        self._growing = None
        if not prefilling and self._rows.wait_for_more(self.waiting):
            budget = 0
        while budget > 0 and (new := self._admit(cached)):
            admitted.append(Admission(new.row, new.sampling, new.prompt, tuple(new.output), new.rope_offset))
            chunk = self._chunk(new, budget, len(decoding))
            assert chunk is not None, "a request was admitted without room for a token"
            prefilling.append((new, chunk))
            budget -= len(chunk.tokens)
            cached -= chunk.start
        if not decoding and not prefilling:
            # prompts alone never fill a window group: each keeps at most what it was admitted with
            assert self._planned or not (self.running and self.kv.windows), "running requests without room"
            return None
        if decoding and prefilling:
            self._fit(len(decoding), prefilling)
        decodes = tuple([request.decode() for request in decoding])
        chunks = tuple([chunk for _, chunk in prefilling])
        placed = self._lookahead.taken(decodes + chunks)
        self._planned.append(decoding + [request for request, _ in prefilling])
        self._move_on(decoding, prefilling)
        return Plan(tuple(admitted), placed, decodes, chunks)

    def commit(self, plan: Plan, result: StepResult) -> list[StepDelta]:
        """Apply the result of the oldest launched step, `plan`: add tokens, end requests that are done.

        Requests that have ended or been aborted since are left alone.
        """
        requests = self._planned.popleft()
        deltas, index = [], len(plan.decodes)
        tokens, logprobs, verdicts = result.tokens, result.logprobs, result.verdicts
        for at, (request, token) in enumerate(zip(requests[:index], tokens[:index], strict=True)):
            request.in_flight -= 1
            if request.discard_next:
                request.discard_next = False
                continue
            request.pending -= 1
            if request.seq is not None:
                scores = logprobs.get(at) if logprobs else None
                deltas.append(self._take(request, token, scores, None, verdicts.get(at)))
        requests = requests[index:]
        for request, chunk in zip(requests, plan.chunks, strict=True):
            request.in_flight -= 1
            samples = chunk.samples and not request.discard_next
            request.discard_next = request.discard_next and not chunk.samples
            request.pending -= samples
            if request.seq is not None:
                deltas += self._commit_chunk(request, chunk, result, index if samples else None)
            index += chunk.samples
        return deltas

    def _commit_chunk(
        self, request: Request, chunk: Chunk, result: StepResult, at: int | None
    ) -> list[StepDelta]:
        """Apply the result of a chunk to its request; its token is number `at` of the step, if it has one."""
        scores, pooled = result.prompt_scores.get(request.id), result.pooled.get(request.id)
        fault = prompt_fault(chunk.scoring.first + chunk.start + 1 if chunk.scoring else 0, scores, pooled)
        if fault is None and at is not None:
            fault = self._fault(request, result.tokens[at], result.logprobs.get(at))
        if fault is not None:
            return [self._corrupted(request, fault)]
        request.num_scored = max(request.num_scored, min(chunk.end, len(request.prompt) - 1))
        self._publish(request, chunk.end)
        if at is not None:
            own = result.logprobs.get(at), scores, result.verdicts.get(at)
            return [self._take(request, result.tokens[at], *own)]
        if scores or pooled is not None or not chunk.samples and request.finish_reason:
            return [self._report(request, prompt_scores=scores)._replace(pooled=pooled)]
        return []

    def length(self, request_id: str) -> int | None:
        """Return the length of a running request for which the oldest launched step samples a token.

        None if it has ended, or if that token does not count.
        """
        request = self._requests.get(request_id)
        return None if request is None or request.seq is None or request.discard_next else request.length

    def repeat(self, request_id: str) -> None:
        """Let a request of the launched step compute its last token again, as that step samples none."""
        self._requests[request_id].repeat()

    def fail(self, error: str) -> list[StepDelta]:
        """End the requests of the oldest launched step, which failed with `error`."""
        deltas = []
        for request in self._planned.popleft():
            request.in_flight -= 1
            if self._requests.get(request.id) is request:
                deltas.append(self._give_up(request, error, Cause.STEP))
        return deltas

    def give_up(self, request_id: str, error: str) -> StepDelta:
        """End a running request with `error`, which is its own doing."""
        return self._give_up(self._requests[request_id], error, Cause.REQUEST)

    def _give_up(self, request: Request, error: str, cause: Cause) -> StepDelta:
        del self._requests[request.id]
        self._stop(request, keep=False)
        return StepDelta(request.id, finish_reason=FinishReason.ABORT, error=error, cause=cause)

    def _fault(self, request: Request, token: int, logprobs: LogprobRows | None) -> str | None:
        return token_fault(token, len(request.output) + 1, logprobs)

    def _corrupted(self, request: Request, fault: str) -> StepDelta:
        """End a request for which the model gave NaN or infinity."""
        self.num_corrupted += 1
        return self._give_up(request, fault, Cause.MODEL)

    def _seed_of(self, params: SamplingParams) -> int:
        """Return the request's seed; without one, make it from the engine's seed and the arrival number."""
        if params.seed is not None:
            return params.seed
        sequence = np.random.SeedSequence([self._seed % 2**64, self._num_added])
        return int(sequence.generate_state(1, np.uint64).view(np.int64)[0])

    def _grow(self) -> list[Request] | None:
        """Give each decoding request a slot for its next token and return these requests.

        Requests at the end of the order are paused when there is no room. Returns None if a request that
        would have to be paused is in a launched step.
        """
        decoding = [r for r in self.running if r.num_computed >= r.prefill_len and r.length < r.max_len]
        # tokens may have been appended to requests: they need slots, and may cross, as if they decoded
        appended = [r for r in self.running if r.num_computed < r.prefill_len and r.output]
        if self.limits.long_rope_switch:
            decoding = self._cross(decoding)
            appended = self._cross(appended)
        num_pauses = self.num_pauses
        for request in lacking_slots(decoding + appended):
            while request.seq is not None and not self._lookahead.give(request):
                last = self.running[-1]
                if last.in_flight:
                    return None
                assert len(self.running) > 1, "a request that fits the pool alone found no room"
                self._pause(last)
                self.num_pauses += 1
        if self.num_pauses > num_pauses:
            decoding = [request for request in decoding if request.seq is not None]
        self._lookahead.give_ahead(decoding)
        return decoding

    def _cross(self, decoding: list[Request]) -> list[Request]:
        """Preempt requests that have just outgrown the short RoPE factors, and return the rest.

        They are computed anew from their first token. One in a launched step waits for its commit.
        """
        crossing = [r for r in decoding if self._rope_offset(r.length) != r.rope_offset]
        for request in crossing:
            if not request.in_flight:
                self._pause(request)
                request.published = False  # under the other salt
        return [r for r in decoding if r not in crossing]

    def _rope_offset(self, length: int) -> int:
        return rope_offset(length, self.limits.long_rope_switch)

    def _chunk(self, request: Request, budget: int, decoding: int) -> Chunk | None:
        """Return the next tokens of a prefill, at most `budget`; None if window groups have no room.

        They keep some for the `decoding` requests, which would pause this one as soon as they lack a slot.
        """
        start = request.num_computed
        end = self._lookahead.reach(request, start, min(start + budget, request.prefill_len), decoding)
        return request.chunk(end - start) if end > start else None

    def _move_on(self, decoding: list[Request], prefilling: list[tuple[Request, Chunk]]) -> None:
        """Advance the requests by what the planned step will do."""
        for request in decoding:
            request.num_computed += 1
            request.length += 1
            request.pending += 1
            request.in_flight += 1
        for request, chunk in prefilling:
            request.num_computed = chunk.end
            request.length += chunk.samples
            request.pending += chunk.samples
            request.in_flight += 1

    def _publish(self, request: Request, end: int) -> None:
        """Share the first `end` tokens of a prompt; they have been computed."""
        if request.caches_prompt and request.seq is not None:
            self._lookahead.publish(request, request.prompt[:end])
            if end >= len(request.prompt):
                request.published = True
                self._unpublished.remove(request)

    def _pause(self, request: Request) -> None:
        """Take back the slots of a running request; it waits and keeps its tokens."""
        self._stop(request, keep=True)
        self.waiting.add(request)

    def _stop(self, request: Request, keep: bool) -> None:
        """Take back the row and slots of a running request; `keep` keeps its K/V in the prefix cache.

        The last token is not kept: nothing needs it, and at most a launched step has computed it.
        """
        assert request.seq is not None
        ids = request.ids
        self.kv.release(request.seq, ids[: min(request.num_computed, len(ids) - 1)], keep)
        request.seq = None
        self._rows.give_back(request.row)
        remove(self.running, request)
        self._unpublished.remove(request)
        self._refused = None

    def _admit(self, room: int) -> Request | None:
        """Start the first waiting request and return it; None if there is none or it must wait longer.

        Its cached prefix may have at most `room` tokens.
        """
        if not self.waiting or not self._rows:
            return None
        request = self.waiting.first
        if request is self._refused and self._patience:
            self._patience -= 1
            return None
        ids, reuse = request.ids, request.reuses
        request.rope_offset = self._rope_offset(len(ids))
        if not request.generates and not request.pool and len(ids) > 1:
            ids = ids[:-1]  # nothing is predicted from the last token
        cached = self.kv.cached(ids, request.salt) if reuse else 0
        if cached > room or reuse and self._unpublished.shares(request, ids, cached):
            return None
        if not self._has_window_slots(cached):  # which a chunk of another prompt may take for a moment
            return None
        spare = self._spare(request, len(ids), cached) if self.running else 0
        seq = None
        if self._growing is None or self._growing.fits_windows(self.limits.max_model_len):
            seq = self.kv.start(ids, reuse=reuse, spare=spare, salt=request.salt)
        if seq is None:
            self._refused, self._patience = request, PATIENCE
            return None
        self.waiting.remove(request)
        insert(self.running, request)
        request.seq = seq
        request.row = self._rows.take()
        request.prefill_len = len(ids)
        request.num_computed = seq.num_cached
        if request.num_cached is None:
            request.num_cached = seq.num_cached
        self._lookahead.start(request)
        if self.kv.prefix_caching and not request.published:
            self._unpublished.add(request)
        return request

    def _spare(self, request: Request, num_tokens: int, cached: int) -> int:
        """Return the slots that must stay free, besides those of a new request, so that all can grow.

        `cached` of its `num_tokens` tokens are cached. The request joins this plan's estimate.
        """
        if self._growing is None:
            self._growing = Growing(self.running, self.kv.windows, conservative=self._conservative)
        self._growing.add(request, num_tokens - cached)
        budget = max(1, self.limits.max_num_batched_tokens - len(self.running))
        slack = lookahead.GROW_TOKENS + self._growing.prefill // budget
        return self._growing.spare(slack, self.kv.available - num_tokens)

    def _has_window_slots(self, cached: int) -> bool:
        """Return whether window groups have a slot for a new request now.

        It comes beside those of its `cached` tokens that it attends, and those that others soon need.
        """
        soon = lookahead.GROW_TOKENS * len(self.running)
        return all(pool.available > min(cached, pool.window) + soon for pool in self.kv.windows)

    def _fit(self, decodes: int, prefilling: list[tuple[Request, Chunk]]) -> None:
        """Shorten the last chunk if the step is nearer to the padded size below than to the one above.

        The next step computes the rest of the chunk.
        """
        sizes = self.limits.step_sizes
        total = decodes + sum([len(chunk.tokens) for _, chunk in prefilling])
        index = bisect_left(sizes, total)
        if total <= PADDED_TOKENS or not 0 < index < len(sizes):
            return
        request, last = prefilling[-1]
        surplus, padding = total - sizes[index - 1], sizes[index] - total
        if surplus < min(padding, len(last.tokens)):
            prefilling[-1] = request, request.chunk(len(last.tokens) - surplus)

    def _take(
        self,
        request: Request,
        token: int,
        logprobs: LogprobRows | None,
        prompt_scores: LogprobRows | None = None,
        verdict: Verdict | None = None,
    ) -> StepDelta:
        """Add a token to a request, and end the request if it is done."""
        if (token < 0 or logprobs is not None) and (fault := self._fault(request, token, logprobs)):
            return self._corrupted(request, fault)
        if verdict is not None:
            return self._take_constrained(request, token, logprobs, prompt_scores, verdict)
        request.output.append(token)
        if token in request.stop_ids or request.length - request.pending >= request.max_len:
            return self._report(request, (token,), logprobs, prompt_scores)
        cached = request.num_cached or 0
        return StepDelta(request.id, (token,), None, None, logprobs, prompt_scores, cached)

    def _take_constrained(
        self,
        request: Request,
        token: int,
        logprobs: LogprobRows | None,
        prompt_scores: LogprobRows | None,
        verdict: Verdict,
    ) -> StepDelta:
        """Do `_take`, and what the request's constraint says of the token."""
        if verdict.error is not None:
            return self._give_up(request, verdict.error, Cause.REQUEST)
        request.output.append(token)
        added = 0
        if request.finish_reason is None:
            added = request.append(verdict.then) if verdict.then else 0
            request.is_whole = verdict.ends and added == len(verdict.then)
        token_ids = tuple(request.output[-1 - added :])
        return self._report(request, token_ids, logprobs, prompt_scores)

    def _report(
        self,
        request: Request,
        token_ids: tuple[int, ...] = (),
        logprobs: LogprobRows | None = None,
        prompt_scores: LogprobRows | None = None,
    ) -> StepDelta:
        """Return what the step added to a request that has been advanced; end it if it is done."""
        reason = request.finish_reason
        if reason:
            del self._requests[request.id]
            self._stop(request, keep=request.caches_prompt)
        stop_reason, is_whole = None, False
        if token_ids and reason is FinishReason.STOP:
            known_end = token_ids[-1] in self._eos
            is_whole = request.is_whole and not known_end
            if not request.is_whole and (request.params.ignore_eos or not known_end):
                stop_reason = token_ids[-1]
        cached = request.num_cached or 0
        return StepDelta(
            request.id, token_ids, reason, stop_reason, logprobs, prompt_scores, cached, is_whole=is_whole
        )
