"""Constraints: the constraints of all running requests, and the requests whose grammar is being compiled."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import NamedTuple, cast

import numpy as np
from numpy.typing import NDArray

from qrt.engine.constrain.constraint import GOES_ON, Constraint, Row, Rules, own_error
from qrt.engine.constrain.fillers import ROW_S, Fillers, default_threads
from qrt.engine.schedule.plan import Adjustment, Plan, Verdict
from qrt.engine.schedule.request import ALL
from qrt.errors import ConfigError
from qrt.grammar.batch import MatcherThreads
from qrt.grammar.compiled import Grammars
from qrt.grammar.matcher import Matcher
from qrt.grammar.spec import Grammar
from qrt.request.sampling import SamplingParams
from qrt.request.thinking import Thinking

MASK_S = 3.0  # a mask that takes longer ends its request
IDLE_S = 0.05  # longest wait for grammars while nothing else runs

SLOW_S = 3e-3  # a slow mask; a batch of them is slow if it takes ROW_S more for each row
# Known tokens are appended as a chunk, which makes the step of all rows longer. With JSON on an H200 that
# gains 0.8 % for one row, and costs 2 % for 4 and 16.
MOST_ROWS_FORCED = 1
APPENDED_CONTEXT = 4096  # a chunk copies the K and V before it, which costs more than it saves in longer ones


class Waiting(NamedTuple):
    """A request whose grammar is being compiled: how to add it, and its matcher."""

    add: Callable[[Matcher], None]
    matcher: Future[Matcher]


class Masks(NamedTuple):
    """What a step's rows may sample.

    rows      indices into `Plan.sampled` of the rows with a mask, in the order of the masks
    late      indices of rows whose mask is not ready: they must not be drawn
    errors    index -> why the request cannot go on
    """

    rows: Sequence[int]
    late: Sequence[int]
    errors: Mapping[int, str]


class _Mask:
    """A request's constraint, and its mask where that is filled alone.

    slow      whether its grammar may be slow, so that the others do not wait for it
    row       int32 [W]; None: it has none
    work      fills the row in a thread since `began`; None: it is filled
    """

    def __init__(self, constraint: Constraint) -> None:
        self.constraint = constraint
        self.slow = False
        self.row: Row | None = None
        self.work: Future[None] | None = None
        self.began = 0.0

    def fill(self) -> None:
        """Fill the row, and note whether that was slow."""
        assert self.row is not None
        start = time.thread_time()
        self.constraint.fill(self.row)
        self.slow = time.thread_time() - start > SLOW_S


class Constraints:
    """Holds the constraints by request. One thread may call it; its threads end with it."""

    def __init__(
        self,
        vocab_size: int,
        eos: Sequence[int],
        load: Callable[[], Grammars] | None,
        *,
        late_s: float,
    ) -> None:
        """Start with none.

        load     makes the compiler of the model's tokens, at the first grammar
        late_s   the wait that costs the other rows of a step as much as a repeated step costs a late one
        """
        self._width = -(-vocab_size // 32)
        self._eos = eos
        self._load = load
        self._loader = ThreadPoolExecutor(1, "qrt-grammars")
        self._grammars: Future[Grammars] | None = None
        self._fillers, self._batch = Fillers(late_s), MatcherThreads(default_threads())
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
        words = cast("tuple[tuple[int, ...], ...]", params.bad_words)  # the engine takes no text
        plain = params.logprobs is None and Adjustment.of(params, 0) is None and not words
        stops = bool(ends.difference(self._eos))
        rules = Rules(ends, stops, params.min_tokens, params.allowed_token_ids, plain, words)
        self._masks[request_id] = _Mask(Constraint(self._width, rules, thinking, matcher))

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

        `length` is that of a request before its token; None: its token does not count. A negative token is
        none.
        """
        if not self._masks:
            return {}
        enough = 2 if len(plan.sampled) <= MOST_ROWS_FORCED else ALL
        followed = [
            (i, mask, known)
            for i, work in enumerate(plan.sampled)
            if (mask := self._masks.get(work.request_id)) is not None
            and (known := length(work.request_id)) is not None
            and tokens[i] >= 0  # else it is no token, and the request ends
        ]
        matchers = [mask.constraint.reads(tokens[i]) for i, mask, _ in followed]
        read = [(m, tokens[i]) for m, (i, *_) in zip(matchers, followed, strict=True) if m is not None]
        if read:
            self._batch.accept(*zip(*read, strict=True))
        verdicts = {}
        for (i, mask, known), matcher in zip(followed, matchers, strict=True):
            least = enough if known < APPENDED_CONTEXT else ALL
            verdict = mask.constraint.take(tokens[i], least, accepted=matcher is not None)
            if verdict is not GOES_ON:
                verdicts[i] = verdict
            mask.row = None
        return verdicts

    def fill(
        self,
        plan: Plan,
        indices: Sequence[int],
        length: Callable[[str], int | None],
        masks: NDArray[np.int32],
    ) -> Masks:
        """Fill masks int32 [n, W] of these rows of a plan, in order; requests without a length get none."""
        together: list[tuple[int, _Mask, Matcher]] = []
        apart: list[tuple[int, _Mask]] = []
        for i in indices:
            request_id = plan.sampled[i].request_id
            mask = self._masks.get(request_id)
            if mask is None or length(request_id) is None:
                continue
            alone = mask.slow or mask.row is not None  # begun in an earlier step
            matcher = None if alone else mask.constraint.plain
            if matcher is None:
                apart.append((i, mask))
            else:
                together.append((i, mask, matcher))
        self._begin(apart)
        errors: dict[int, str] = {}
        rows, late = self._together(together, masks, errors), list[int]()
        self._fillers.wait([mask.work for _, mask in apart if mask.work is not None])
        for i, mask in apart:
            work = mask.work
            if work is not None and not work.done():
                late.append(i)
                if time.monotonic() - mask.began > MASK_S:
                    errors[i] = own_error(f"its grammar took longer than {MASK_S:.0f} s for one token")
                continue
            mask.work = None
            error = None if work is None else work.exception()
            failed = mask.constraint.error if error is None else own_error(str(error))
            if failed is not None:
                errors[i] = failed
            else:
                assert mask.row is not None
                masks[len(rows)] = mask.row
                rows.append(i)
        return Masks(rows, late, errors)

    def _begin(self, apart: Sequence[tuple[int, _Mask]]) -> None:
        """Begin to fill the masks that are filled one by one, in threads if a grammar is asked."""
        for _, mask in apart:
            if mask.work is None and mask.row is None:
                mask.row = np.zeros(self._width, np.int32)
                if mask.constraint.asks:
                    mask.work, mask.began = self._fillers.start(mask.fill), time.monotonic()
                else:
                    mask.fill()

    def _together(
        self, rows: Sequence[tuple[int, _Mask, Matcher]], masks: NDArray[np.int32], errors: dict[int, str]
    ) -> list[int]:
        """Fill the masks of these rows at once; return the indices of those that have one."""
        if not rows:
            return []
        start = time.perf_counter()
        self._batch.fill([matcher for *_, matcher in rows], masks)
        # one of them may be slow: next time each is filled alone, and its own time counts
        slow = time.perf_counter() - start > SLOW_S + ROW_S * len(rows)
        good: list[int] = []
        for place, (i, mask, matcher) in enumerate(rows):
            mask.slow = slow
            if matcher.failed:
                errors[i] = own_error(matcher.error)
                continue
            if place > len(good):
                masks[len(good)] = masks[place]
            good.append(i)
        return good
