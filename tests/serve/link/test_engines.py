"""Engines without processes: the test plays the engines, and checks who gets which request."""

import asyncio
import json
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client.parser import text_string_to_metric_families

from qrt.answers.output import TextDelta
from qrt.engine.schedule.output import StepDelta
from qrt.engine.schedule.request import FinishReason
from qrt.errors import QueueFullError
from qrt.request.sampling import SamplingParams
from qrt.serve.link.engine_client import EngineClient, EngineError, EngineLoad
from qrt.serve.link.engines import MORE_REQUESTS, MORE_SHARE, MORE_TOKENS, Engines, pick
from qrt.serve.link.messages import Abort, Add, Answer, Ask, EngineInfo, Failed, Ready, Refusal
from qrt.serve.link.metric_names import MetricNames
from qrt.serve.link.prefixes import CHUNK, Prefixes
from qrt.serve.link.step_output import StepOutput

loads = st.builds(EngineLoad, st.integers(0, 40), st.integers(0, 3 * MORE_TOKENS))
INFO = EngineInfo(
    model="tiny", weight_scheme="fp16", weight_bytes=1, dtype="float32", device="cuda:0", kv="fp16",
    kv_bytes_per_token=1, pool_tokens=10, pool_bytes=10, concurrency=1.0, kv_windows="", max_model_len=100,
    max_num_seqs=4, max_num_queued_reqs=None, max_num_queued_tokens=None, vocab_size=4096, sampling={},
    max_new_tokens=None,
)  # fmt: skip


class Engine(EngineClient):
    """A client whose engine does what the test says."""

    def __init__(self) -> None:
        super().__init__()
        self.sent = []

    async def start(self) -> None: ...

    async def close(self) -> None:
        self.stop("closed")

    def _send(self, message) -> None:
        self.sent.append(message)
        if isinstance(message, Add):
            self._handle(StepOutput([message.id], [], [], self.num_running, 0))

    @property
    def ids(self) -> list[str]:
        """Requests that it has got."""
        return [message.id for message in self.sent if isinstance(message, Add)]


def engines(count: int, prefixes: Prefixes | None = None) -> Engines:
    names = [f"engine {i} (cuda:{i})" for i in range(count)]
    metrics = [MetricNames("m", "qrt", i) for i in range(count)]
    return Engines([Engine() for _ in range(count)], names, metrics=metrics, prefixes=prefixes)


class Prompt:
    """A collector of no tokenizer."""

    generate, priority, thinking, pool = True, 0, None, None

    def __init__(self, id: str, prompt_ids: list[int], n: int = 1, salt: str | None = None) -> None:
        self.prompt_ids, self.cache_salt = prompt_ids, salt
        self.engine_ids = [id] if n == 1 else [f"{id}.{i}" for i in range(n)]

    def engine_requests(self):
        for id in self.engine_ids:
            yield id, SamplingParams()

    def process(self, delta: StepDelta) -> TextDelta:
        return TextDelta(0, "", delta.token_ids, None, delta.finish_reason, None, abort=False)


def taken(served: Engines) -> list[list[str]]:
    return [client.ids for client in served.clients]


@given(st.dictionaries(st.integers(0, 7), loads, min_size=1), st.permutations(range(8)), st.integers(0, 8))
def test_the_known_engine_or_the_least_busy(loads, picked, known):
    """Who knows the prompt gets it, unless some engine has by far less to do; else nobody has less to do."""
    chosen = pick(loads, picked, known if known < 8 else None)
    size = {engine: load.requests + load.waiting_tokens / 2048 for engine, load in loads.items()}
    assert chosen in loads
    if chosen != known:
        assert size[chosen] == min(size.values())
        equals = [engine for engine in size if size[engine] == size[chosen]]
        assert picked[chosen] == min(picked[engine] for engine in equals), "they take turns"
    if known in loads:
        least = loads[chosen]
        more = loads[known].requests - least.requests
        far = more > max(MORE_REQUESTS, least.requests * MORE_SHARE)
        assert (chosen == known) or far or loads[known].waiting_tokens - least.waiting_tokens > MORE_TOKENS


@given(st.integers(1, 5), st.lists(st.integers(0, 3), max_size=40))
def test_requests_that_come_at_once_are_spread(count, prompts):
    """However they repeat each other, no engine gets many more than another; new prompts take turns."""
    served = engines(count, Prefixes())

    async def submit() -> None:
        for i, prompt in enumerate(prompts):
            await served.submit([Prompt(f"{i}", [prompt] * CHUNK)])

    asyncio.run(submit())
    sizes = list(map(len, taken(served)))
    assert sum(sizes) == len(prompts) and max(sizes) - min(sizes) <= MORE_REQUESTS + 1
    served = engines(count)
    asyncio.run(served.submit([Prompt(f"{i}", [5, 6]) for i in range(2 * count)]))
    assert taken(served) == [[f"{i}", f"{i + count}"] for i in range(count)]


def test_a_conversation_stays_with_its_engine():
    """Where its requests have ended or not; one of another salt is another conversation."""

    async def run() -> None:
        served = engines(3, Prefixes())
        for turn in range(1, 4):
            for who in range(3):
                stream = await served.submit([Prompt(f"{who}.{turn}", [who + 1] * CHUNK * turn)])
                stream.close()
                for client in served.clients:
                    client._handle(StepOutput([], [], []))
        assert [{id[0] for id in ids} for ids in taken(served)] == [{"0"}, {"1"}, {"2"}]
        await served.submit([Prompt("salted", [1] * CHUNK * 3, salt="s")])
        assert "salted" in taken(served)[0], "it is the turn of this engine, which has done nothing longest"
        await served.submit([Prompt("again", [1] * CHUNK * 3)])
        await served.submit([Prompt("salted too", [1] * CHUNK * 3, salt="t")])
        assert "salted too" in taken(served)[1]

    asyncio.run(run())


def test_samples_of_one_request_stay_together():
    served = engines(2)
    asyncio.run(served.submit([Prompt("r", [5, 6], n=4), Prompt("s", [5, 6], n=3)]))
    assert sorted(map(len, taken(served))) == [3, 4]


def test_who_owns_a_request_hears_of_its_end():
    """An error of HTTP is counted once."""

    async def run() -> None:
        served = engines(2)
        streams = [await served.submit([Prompt(f"{i}", [5, 6])]) for i in range(2)]
        assert served.num_running == 2
        streams[1].close()
        assert [[m for m in client.sent if isinstance(m, Abort)] for client in served.clients] == [
            [], [Abort(["1"])],
        ]  # fmt: skip
        served.clients[0]._handle(StepOutput([], [], [StepDelta("0", (7,), FinishReason.LENGTH)]))
        assert [index async for index, _ in streams[0]] == [0] and served.num_running == 0
        served.tell(Failed(404))
        assert sum(client.sent.count(Failed(404)) for client in served.clients) == 1

    asyncio.run(run())


def test_a_refused_request_ends_the_others_of_its_body():
    async def run() -> None:
        served = engines(2)
        served.clients[1]._send = lambda message: (
            served.clients[1]._handle(StepOutput([], [Refusal(message.id, "full", True)], []))
            if isinstance(message, Add) else None
        )  # fmt: skip
        with pytest.raises(QueueFullError, match="full"):
            await served.submit([Prompt(f"{i}", [5, 6]) for i in range(2)])
        assert Abort(["0"]) in served.clients[0].sent and served.num_running == 0

    asyncio.run(run())


def test_one_death_leaves_the_others():
    """Its requests fail with its name, all later ones go elsewhere; with the last one all is over."""

    async def run() -> None:
        served = engines(2, Prefixes())
        await served.start()
        for client in served.clients:
            client._handle(Ready(INFO))
        await served.ready.wait()
        prompt = [9] * CHUNK
        streams = [await served.submit([Prompt(f"{i}", [i] * CHUNK)]) for i in (0, 1)]
        await served.submit([Prompt("known", prompt)])
        (owner,) = (i for i, ids in enumerate(taken(served)) if "known" in ids)
        served.died(owner)
        assert served.stopped is None and served.dead == [f"engine {owner} (cuda:{owner})"]
        with pytest.raises(EngineError, match=rf"^engine {owner} \(cuda:{owner}\) has died$"):
            await anext(streams[owner])
        served.clients[1 - owner]._handle(StepOutput([], [], [StepDelta(f"{1 - owner}", (7,))]))
        assert (await anext(streams[1 - owner]))[0] == 0
        for i in range(9):
            await served.submit([Prompt(f"later-{i}", prompt)])
        assert len(taken(served)[1 - owner]) == 10
        served.died(1 - owner)
        assert str(served.stopped) == f"engine {1 - owner} (cuda:{1 - owner}) has died"
        for coroutine in (served.submit([Prompt("r", prompt)]), served.ask("load")):
            with pytest.raises(EngineError, match="has died"):
                await coroutine

    asyncio.run(run())


@pytest.mark.parametrize("before", [True, False])
def test_an_engine_that_died_is_not_waited_for(before):
    """As an API process finds it that is started later."""

    async def run() -> None:
        served = engines(2)
        if before:
            served.died(0)
        await served.start()
        if not before:
            served.died(0)
        served.clients[1]._handle(Ready(INFO))
        await asyncio.wait_for(served.ready.wait(), 10)
        assert served.info == INFO

    asyncio.run(run())


def test_a_silent_engine_gets_no_request(monkeypatch):
    async def run() -> None:
        served = engines(2)
        await served.submit([Prompt("0", [5, 6])])
        monkeypatch.setattr(Engine, "silent_seconds", property(lambda own: 60.0 * (own is served.clients[1])))
        await served.submit([Prompt(f"{i}", [5, 6]) for i in range(1, 6)])
        assert Counter(map(len, taken(served))) == {6: 1, 0: 1} and served.silent_seconds == 0

    asyncio.run(run())


def exposition(engine: int) -> bytes:
    label = f'{{engine="{engine}"}}'
    return (
        f"# HELP a_total A.\n# TYPE a_total counter\na_total{label} {engine + 1}\n"
        f'# HELP b B.\n# TYPE b histogram\nb_bucket{{engine="{engine}",le="+Inf"}} 4\nb_count{label} 4\n'
        "# HELP c_total C.\n# TYPE c_total counter\n"
    ).encode()


def test_answers_of_all_are_one():
    """Metrics by engine, each family once; sums of loads; who is dead has no part in them, and is named."""
    load = {"running": 1, "kv_usage": 0.5, "kv_pool_tokens": 100}
    bodies = {
        "metrics": [exposition(i) for i in range(3)],
        "load": [
            json.dumps({**load, "kv_pool_tokens": 100 * (i + 1), "kv_usage": i}).encode() for i in range(3)
        ],
        "reset_prefix_cache": [b""] * 3,
    }

    async def ask(served: Engines, question: str) -> bytes:
        asking = asyncio.create_task(served.ask(question))
        await asyncio.sleep(0.01)
        for i, client in enumerate(served.clients):
            (asked,) = (m for m in client.sent if isinstance(m, Ask)) if not client.stopped else (None,)
            if asked:
                client._handle(Answer(asked.id, bodies[question][i]))
                client.sent.remove(asked)
        return await asking

    async def run() -> None:
        served = engines(3)
        assert await ask(served, "reset_prefix_cache") == b""
        total = json.loads(await ask(served, "load"))
        assert total == {"running": 3, "kv_pool_tokens": 600, "kv_usage": (200 + 2 * 300) / 600}
        served.died(1)
        text = (await ask(served, "metrics")).decode()
        assert text.count("# TYPE a_total counter") == text.count("# TYPE b ") == 1
        families = {family.name: family.samples for family in text_string_to_metric_families(text)}
        assert [(s.labels["engine"], s.value) for s in families["a"]] == [("0", 1), ("2", 3)]
        up = [(s.labels, s.value) for s in families["qrt:engine_up"]]
        assert up == [({"model_name": "m", "engine": str(i)}, float(i != 1)) for i in range(3)]

    asyncio.run(run())


def test_a_death_while_it_is_asked():
    """The others answer; when there is none, the question fails."""

    async def run() -> None:
        served = engines(2)
        asking = asyncio.create_task(served.ask("load"))
        await asyncio.sleep(0.01)
        served.died(0)
        (asked,) = (message for message in served.clients[1].sent if isinstance(message, Ask))
        served.clients[1]._handle(Answer(asked.id, b'{"kv_usage": 0.5, "kv_pool_tokens": 4}'))
        assert json.loads(await asking)["kv_usage"] == 0.5
        asking = asyncio.create_task(served.ask("load"))
        await asyncio.sleep(0.01)
        served.died(1)
        with pytest.raises(EngineError, match="engine 1"):
            await asking

    asyncio.run(run())
