"""Constraints: the constraints of all running requests, and the requests whose grammar is being compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from qrt.engine.constrain.constraint import Constraint, Rules
from qrt.engine.constrain.fillers import Fillers, Work
from qrt.engine.schedule.plan import Adjustment, Plan, Verdict
from qrt.engine.schedule.request import ALL
from qrt.errors import ConfigError
from qrt.grammar.compiled import Grammars
from qrt.grammar.matcher import Matcher
from qrt.grammar.spec import Grammar
from qrt.request.thinking import Thinking
from qrt.sampling_params import SamplingParams

MASK_S = 3.0  # a mask that takes longer ends its request
IDLE_S = 0.05  # longest wait for grammars while nothing else runs

# Known tokens are appended as a chunk, which makes the step of all rows longer: one for so many rows pays.
ROWS_PER_FORCED, MOST_ROWS_FORCED = 4, 16
APPENDED_CONTEXT = 4096  # a chunk copies the K and V before it, which costs more than it saves in longer ones


class Waiting(NamedTuple):
    """A request whose grammar is being compiled: how to add it, and its matcher."""

    add: Callable[[Matcher], None]
    matcher: Future[Matcher]


class Masks(NamedTuple):
    """What a step's rows may sample.

    rows      (index into `Plan.sampled`, int32 [W]) of the rows with a mask
    late      indices of rows whose mask is not ready: they must not be drawn
    errors    index -> why the request cannot go on
    """

    rows: Sequence[tuple[int, NDArray[np.int32]]]
    late: Sequence[int]
    errors: Mapping[int, str]


class _Mask:
    """A request's constraint, its row of bits and the work on them."""

    def __init__(self, constraint: Constraint, width: int) -> None:
        self.constraint = constraint
        self.row = np.zeros(width, np.int32)
        self.work: Work | None = None
        self.began = 0.0
        self.is_fresh = False  # whether `row` says what may follow now

    def fill(self) -> None:
        self.constraint.fill(self.row)


class Constraints:
    """Holds the constraints by request. One thread may call it; the fillers' threads work for it."""

    def __init__(self, vocab_size: int, eos: Sequence[int], load: Callable[[], Grammars] | None) -> None:
        """Start with none; `load` makes the compiler of the model's tokens, at the first grammar."""
        self._width = -(-vocab_size // 32)
        self._eos = eos
        self._load = load
        self._loader = ThreadPoolExecutor(1, "qrt-grammars")
        self._grammars: Future[Grammars] | None = None
        self._fillers = Fillers()
        self._masks: dict[str, _Mask] = {}
        self._waiting: dict[str, Waiting] = {}

    def __contains__(self, request_id: str) -> bool:
        """Whether a request's grammar is being compiled."""
        return request_id in self._waiting

    @property
    def waits(self) -> bool:
        """Whether the grammar of some request is being compiled."""
        return bool(self._waiting)

    def compile(self, request_id: str, grammar: Grammar, add: Callable[[Matcher], None]) -> None:
        """Compile a grammar in the background; `start_ready` then calls `add` with its matcher."""
        if self._load is None:
            raise ConfigError(
                "structured_outputs: expected a model with a tokenizer, got one without; leave it out"
            )
        self._waiting[request_id] = Waiting(add, self._matcher(grammar))

    def warm_up(self) -> None:
        """Load the compiler in the background."""
        if self._grammars is None and self._load is not None:
            self._grammars = self._loader.submit(self._load)

    def _matcher(self, grammar: Grammar) -> Future[Matcher]:
        self.warm_up()
        grammars = self._grammars
        assert grammars is not None
        if grammars.done():
            return grammars.result().get(grammar)
        return self._loader.submit(lambda: grammars.result().get(grammar).result())

    def start_ready(self, *, idle: bool) -> dict[str, str]:
        """Add the requests whose grammar is compiled; return why others cannot be added.

        If the engine is `idle` it waits for one, for a moment.
        """
        if idle:
            wait([each.matcher for each in self._waiting.values()], IDLE_S, FIRST_COMPLETED)
        failed = {}
        for request_id, each in [*self._waiting.items()]:
            if each.matcher.done():
                del self._waiting[request_id]
                try:
                    each.add(each.matcher.result())
                except Exception as error:
                    failed[request_id] = str(error)
        return failed

    def add(
        self,
        request_id: str,
        params: SamplingParams,
        thinking: Thinking | None = None,
        matcher: Matcher | None = None,
    ) -> None:
        """Follow a request, if its thinking has a budget or its answer a grammar."""
        if matcher is None and (thinking is None or thinking.budget is None):
            return
        ends = {*params.stop_token_ids, *(() if params.ignore_eos else self._eos)}
        plain = params.logprobs is None and Adjustment.of(params, 0) is None
        rules = Rules(ends, params.min_tokens, params.allowed_token_ids, appends=plain)
        constraint = Constraint(self._width, rules, thinking, matcher)
        self._masks[request_id] = _Mask(constraint, self._width)

    def remove(self, request_id: str) -> None:
        """Forget a request."""
        self._masks.pop(request_id, None)
        self._waiting.pop(request_id, None)

    def clear(self) -> None:
        """Forget all requests."""
        self._masks.clear()
        self._waiting.clear()

    def of(self, plan: Plan) -> list[int]:
        """Return the indices into `plan.sampled` of rows that may need a mask."""
        if not self._masks:
            return []
        found = [(i, self._masks.get(work.request_id)) for i, work in enumerate(plan.sampled)]
        # the token before it is not known yet, if it is one that a launched step samples
        return [i for i, mask in found if mask is not None and mask.constraint.needs_mask(1)]

    def take(
        self, plan: Plan, tokens: Sequence[int], length: Callable[[str], int | None]
    ) -> dict[int, Verdict]:
        """Follow a step's sampled tokens; return what they mean, by index into `plan.sampled`.

        `length` is that of a request before its token; None: its token does not count.
        """
        if not self._masks:
            return {}
        rows = len(plan.sampled)
        enough = max(2, rows // ROWS_PER_FORCED) if rows <= MOST_ROWS_FORCED else ALL
        verdicts = {}
        for i, work in enumerate(plan.sampled):
            mask = self._masks.get(work.request_id)
            if mask is not None and (known := length(work.request_id)) is not None:
                verdicts[i] = mask.constraint.take(tokens[i], enough if known < APPENDED_CONTEXT else ALL)
                mask.is_fresh = False
        return verdicts

    def fill(self, plan: Plan, indices: Sequence[int], length: Callable[[str], int | None]) -> Masks:
        """Fill the masks of these rows of a plan; requests without a length get none."""
        named = [(i, plan.sampled[i].request_id) for i in indices]
        masks = [(i, self._masks[id]) for i, id in named if id in self._masks and length(id) is not None]
        asked = [mask for _, mask in masks if mask.work is None and not mask.is_fresh]
        for mask in asked:
            mask.work, mask.began = Work(mask.fill), time.monotonic()
        if asked:
            self._fillers.run_most([mask.work for mask in asked if mask.work is not None])
        rows, late, errors = [], [], {}
        for i, mask in masks:
            if mask.work is not None and not mask.work.done:
                late.append(i)
                if time.monotonic() - mask.began > MASK_S:
                    errors[i] = f"its grammar took longer than {MASK_S:.0f} s for one token"
                continue
            failed = mask.work and mask.work.error
            mask.work, mask.is_fresh = None, True
            if failed or mask.constraint.error:
                errors[i] = str(failed or mask.constraint.error)
            else:
                rows.append((i, mask.row))
        return Masks(rows, late, errors)
