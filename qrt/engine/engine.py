"""Engine: token ids in, token ids out. Runs the loop of planned, launched and committed steps."""

from __future__ import annotations

import logging
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import torch

from qrt.config import EngineConfig
from qrt.engine.build import build, devices_of
from qrt.engine.check import RequestCheck
from qrt.engine.constrain.constraints import Constraints
from qrt.engine.preflight import Preflight, preflight
from qrt.engine.schedule.output import Cause, StepDelta
from qrt.engine.schedule.plan import Plan
from qrt.engine.schedule.request import FinishReason
from qrt.engine.schedule.scheduler import Scheduler
from qrt.engine.step.runner import Launched, Runner
from qrt.engine.step.timeline import Timeline
from qrt.errors import ConfigError
from qrt.grammar.matcher import Matcher
from qrt.grammar.spec import Grammar
from qrt.mem.manager import KVManager
from qrt.mem.sizing import slot_bytes
from qrt.mem.windows import WindowSlots, held_slots
from qrt.model.decoder import Decoder
from qrt.request.sampling import SamplingParams
from qrt.request.structured_outputs import StructuredOutputsParams
from qrt.request.thinking import Thinking

if TYPE_CHECKING:  # only ranks need what it imports
    from qrt.engine.ranks.group import RankGroup

logger = logging.getLogger(__name__)

LATE_S = {True: 200e-6, False: 20e-3}  # by whether a GPU runs the steps, which are that much shorter


class Engine:
    """Runs a model on requests. One thread at a time may call it.

    Usage:

        engine.add("a", [1, 2, 3], SamplingParams(max_tokens=8))
        while engine.has_work:
            for delta in engine.step(): ...

    With `overlap` a step is planned and launched while the one before it runs. It reads that step's tokens on
    the device. A request may finish while the next step is already running; the token of that extra step is
    discarded.

    model         the decoder
    formats       KV format of each layer
    pool          size of the KV pool
    pooling       how the model pools; None: it generates
    generation    the checkpoint's defaults
    scheduler     waiting and running requests, for counts
    failed_steps  how many steps in a row have failed; a request that ends by its own error fails none
    """

    def __init__(
        self,
        config: EngineConfig | Preflight,
        model: Decoder | None = None,
        *,
        eos_token_ids: Iterable[int] = (),
    ) -> None:
        """Load the checkpoint `config.model`, or take `model` (then nothing is read from disk).

        An EngineConfig is checked first; a Preflight has been checked already. `eos_token_ids` (the
        tokenizer's) end the text, and so do those that the checkpoint names. Raises the errors of the loader
        and the KV pool, all kinds of QrtError, and ConfigError for a max_model_len beyond the model's.
        """
        self._group = None
        if model is None:
            config = config if isinstance(config, Preflight) else preflight(config)
            self._group = _group_of(config.config)
        parts = build(config, model, eos_token_ids, None if self._group is None else self._group.peers)
        parts.runner.group = self._group
        if self._group is not None:
            self._leave = weakref.finalize(self, _leave, self._group, parts.runner)
        self.config = parts.config
        self.generation = parts.generation
        self.formats = parts.formats
        self.pool = parts.pool
        self.pooling = parts.pooling
        self.runner = parts.runner
        self.model = parts.runner.model
        self._limits, self._eos = parts.limits, parts.eos
        priorities = self.config.scheduling_policy == "priority"
        self._check = RequestCheck(
            self.model.arch.vocab_size, parts.eos, priorities=priorities, pooling=parts.pooling
        )
        overlap, on_gpu = self.config.overlap, self.model.device.type == "cuda"
        self._constraints = Constraints(
            self.model.arch.vocab_size, parts.eos, parts.grammars, late_s=LATE_S[on_gpu]
        )
        self._depth = 2 if (on_gpu if overlap is None else overlap) else 1
        self._forget()

    def _forget(self) -> None:
        """Start with no requests, no launched steps and an empty pool."""
        config = self.config
        windows = [WindowSlots(slots, window) for window, slots, _ in self.pool.windows]
        self.scheduler = Scheduler(
            KVManager(self.pool.num_slots, windows, prefix_caching=config.enable_prefix_caching),
            self._limits,
            self._eos,
            config.seed,
            conservative=config.admission == "conservative",
        )
        self.failed_steps = 0
        self._launched: deque[tuple[Plan, Launched]] = deque()
        self._constraints.clear()

    @property
    def max_model_len(self) -> int:
        """The most tokens of one request, prompt and output together."""
        return self.scheduler.limits.max_model_len

    @property
    def kv_bytes_per_token(self) -> int:
        """Bytes of one token's K and V in all layers, scales included."""
        config = self.model.arch
        return slot_bytes(self.formats, config.num_kv_heads, config.head_dim, self.model.dtype)

    def kv_bytes_read(self, length: float) -> float:
        """Return the bytes of K and V that the next token of a request of `length` tokens attends."""
        windows = self._windows
        return sum(min(length, window or length) * self._layer_bytes(i) for i, window in enumerate(windows))

    def kv_bytes_kept(self, length: int) -> int:
        """Return the bytes of K and V that a decoding request of `length` tokens keeps."""
        return sum(
            held_slots(window, length) * self._layer_bytes(i) for i, window in enumerate(self._windows)
        )

    @property
    def _windows(self) -> list[int]:
        """The most tokens that each layer attends, 0: all."""
        return [self.model.arch.reach(layer).most for layer in range(self.model.arch.num_layers)]

    def _layer_bytes(self, layer: int) -> int:
        """Return the bytes of one token in a layer."""
        config = self.model.arch
        return self.formats[layer].bytes_per_slot(config.num_kv_heads, config.head_dim, self.model.dtype)

    @property
    def has_work(self) -> bool:
        """Whether `step` has something to do: a request waits or runs, or a step has been launched."""
        return self.scheduler.has_work or bool(self._launched) or self._constraints.waits

    def add(
        self,
        request_id: str,
        prompt_ids: Sequence[int],
        params: SamplingParams,
        *,
        generate: bool = True,
        priority: int = 0,
        cache_salt: str | None = None,
        pool: str | None = None,
        thinking: Thinking | None = None,
    ) -> None:
        """Queue a request; generate=False only scores the prompt. `params.n` is ignored.

        `pool` asks a model that pools for vectors of that kind ("last", "mean", "all") instead of tokens.

        With the priority scheduling policy the smallest `priority` runs first. A request shares cached
        prefixes only with requests of the same `cache_salt`. `thinking` says where the model's thinking ends:
        a grammar of `params.structured_outputs` begins behind it, and it may have a budget. A request with a
        grammar joins the queue once that is compiled, which is done beside the steps. Raises ConfigError when
        the prompt is empty or too long, a token id is outside the vocabulary, or the id is in use;
        QueueFullError when the queue of requests or tokens is full.
        """
        self._check.job(pool)
        self._check.order(priority, cache_salt)
        ids = self._check.tokens(prompt_ids, params)
        generate = generate and pool is None
        self._check.constraint(params, thinking, generate=generate)
        if request_id in self._constraints:
            raise ConfigError(f"request id {request_id!r}: already in use; choose another id")

        def add(matcher: Matcher | None = None) -> None:
            self.scheduler.add(
                request_id,
                ids,
                params,
                generate=generate,
                priority=priority,
                cache_salt=cache_salt,
                pool=pool,
            )
            self._constraints.add(request_id, params, thinking, matcher)

        if params.structured_outputs is None:
            add()
        else:
            self.scheduler.check(request_id, len(ids), params, generate=generate)
            outputs = StructuredOutputsParams.of(params.structured_outputs)
            self._constraints.compile(request_id, Grammar.of(outputs), add)

    def abort(self, request_id: str) -> None:
        """Forget a request; do nothing if there is none of that id."""
        self.scheduler.abort(request_id)
        self._constraints.remove(request_id)

    def warm_up_grammars(self) -> None:
        """Load the compiler of grammars in the background, so that the first one need not wait for it."""
        self._constraints.warm_up()

    def step(self) -> list[StepDelta]:
        """Launch the next step and return what the oldest finished step added to each request.

        With overlap the first call returns nothing: the result of a step is read after the next is launched.
        An error in a step ends the requests that took part in it (`StepDelta.error`); the others go on.
        """
        deltas = self._start_ready()
        plan = self.scheduler.plan()
        if plan is not None:
            try:
                self._launch(plan, deltas)
            except Exception as error:
                while self._launched:  # report the results of earlier steps first
                    deltas += self._finish()
                return deltas + self._give_up(plan, error)
        while self._launched and (plan is None or len(self._launched) >= self._depth):
            deltas += self._finish()
        return deltas

    def _start_ready(self) -> list[StepDelta]:
        """Queue the requests whose grammar is compiled; return the end of those whose grammar is wrong."""
        if not self._constraints.waits:
            return []
        idle = not self.scheduler.has_work and not self._launched
        failed = self._constraints.start_ready(idle=idle)
        return [
            StepDelta(request_id, finish_reason=FinishReason.ABORT, error=error, cause=Cause.REQUEST)
            for request_id, error in failed.items()
        ]

    def _launch(self, plan: Plan, deltas: list[StepDelta]) -> None:
        """Launch a step; if some of its tokens are sampled by masks, once the steps before it are done.

        The device then computes hidden states while the host follows the last tokens and fills masks. The
        results of those steps are added to `deltas`.
        """
        masked = self._constraints.of(plan)
        if not masked:
            self._launched.append((plan, self.runner.launch(plan)))
            return
        forwarded = self.runner.forward(plan)
        while self._launched:
            deltas += self._finish()
        masks = self._constraints.fill(plan, masked, self.scheduler.length, self.runner.mask_rows())
        for index, error in masks.errors.items():
            deltas.append(self._ended(self.scheduler.give_up(plan.sampled[index].request_id, error)))
        for index in masks.late:
            if index not in masks.errors:
                self.scheduler.repeat(plan.sampled[index].request_id)
        skipped = set(masked).difference(masks.rows)
        self._launched.append((plan, self.runner.sample(forwarded, masks.rows, skipped)))

    def clear(self) -> None:
        """Forget all requests and cached prefixes, after waiting for launched steps.

        Call it after an exception that is not a QrtError, such as Ctrl-C: it may have left the engine in the
        middle of a step.
        """
        if self.model.device.type == "cuda":
            torch.cuda.synchronize(self.model.device)
        self._forget()

    def close(self) -> None:
        """End the processes of the other ranks, if there are any; the engine cannot be used any more."""
        if self._group is not None:
            self._leave()

    def start_timeline(self) -> Timeline:
        """Record from now on which steps the GPU runs, how long they take and how long it waits."""
        self.runner.timeline = Timeline()
        return self.runner.timeline

    def reset_prefix_cache(self) -> None:
        """Drop all cached prefixes that no running request reads."""
        self.scheduler.kv.reset()

    def _finish(self) -> list[StepDelta]:
        """Wait for the oldest launched step and commit its result."""
        plan, launched = self._launched.popleft()
        try:
            result = launched.result()
        except Exception as error:
            return self._give_up(plan, error)
        self.failed_steps = 0
        verdicts = self._constraints.take(plan, result.tokens, self.scheduler.length)
        if verdicts:
            result = replace(result, verdicts=verdicts)
        return [self._ended(delta) for delta in self.scheduler.commit(plan, result)]

    def _give_up(self, plan: Plan, error: Exception) -> list[StepDelta]:
        logger.error("a step failed; its %d requests are given up", len(plan.works), exc_info=error)
        self.failed_steps += 1
        deltas = self.scheduler.fail(f"{type(error).__name__}: {error}".splitlines()[0])
        return [self._ended(delta) for delta in deltas]

    def _ended(self, delta: StepDelta) -> StepDelta:
        """Forget the constraint of a request that has ended."""
        if delta.finish_reason is not None:
            self._constraints.remove(delta.request_id)
        return delta


def _group_of(config: EngineConfig) -> RankGroup | None:
    """Start the ranks of `config` beside this process's own, if there is more than one."""
    devices = devices_of(config)
    if len(devices) == 1:
        return None
    from qrt.engine.ranks.group import RankGroup

    return RankGroup(config, devices)


def _leave(group: RankGroup, runner: Runner) -> None:
    """End the other ranks, after what this one has recorded with them is dropped."""
    runner.forget()
    group.close()
