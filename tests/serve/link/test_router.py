"""The engine's loop, its clients and its clock played by the test."""

import pytest
from prometheus_client.parser import text_string_to_metric_families

from qrt.config import EngineConfig
from qrt.engine.engine import Engine
from qrt.request.sampling import SamplingParams
from qrt.serve.link import router as router_module
from qrt.serve.link.messages import Add, Gone, Hello, fields_of
from qrt.serve.link.metric_names import MetricNames
from qrt.serve.link.router import EngineRouter
from qrt.serve.link.step_output import StepOutput

pytestmark = pytest.mark.model


class Port:
    """What comes before each step; then the loop ends. Also its clock: a quarter of a second a step.

    sent   (when, to whom, what)
    """

    def __init__(self, *rounds) -> None:
        self.rounds, self.now, self.sent = list(rounds), 0.0, []

    def monotonic(self) -> float:
        return self.now

    def receive(self, wait):
        self.now += 0.25
        return self.rounds.pop(0) if self.rounds else None

    def send(self, client, message) -> None:
        self.sent.append((self.now, client, message))


def add(id: str) -> Add:
    params = SamplingParams(temperature=0, max_tokens=50, ignore_eos=True)
    return Add(id, [5, 6, 7], fields_of(params), 0.0)


@pytest.fixture
def router():
    return EngineRouter(Engine(EngineConfig("tiny", max_num_seqs=1, kv_cache_memory_bytes=2**25)))


def test_waiting_clients_get_a_heartbeat(router, monkeypatch):
    """Though every step is another client's. Who waits for nothing hears nothing."""
    port = Port([("api-0", add("a")), ("api-1", add("b")), ("api-2", Hello())], *[[] for _ in range(19)])
    monkeypatch.setattr(router_module, "time", port)
    router.run(port)
    (first, message), *later = [(when, message) for when, who, message in port.sent if who == "api-1"]
    assert (first, message.accepted) == (0.25, ["b"])
    assert [when for when, _ in later] == [1.0, 2.0, 3.0, 4.0, 5.0]
    assert all(message == StepOutput([], [], []) for _, message in later)
    assert sum(bool(m.deltas) for _, who, m in port.sent if who == "api-0") > 15
    assert [type(m).__name__ for _, who, m in port.sent if who == "api-2"] == ["Ready"]


def test_metrics_of_a_step(router):
    """The prompt's tokens beside those sampled, as in vLLM; and the load under vLLM's name."""
    router.run(Port([("api-0", add("a")), ("api-1", add("b"))], [], []))
    (steps,) = (f for f in router.metrics.collect() if f.name == "qrt:iteration_tokens_total")
    values = {sample.name: sample.value for sample in steps.samples}
    assert (values["qrt:iteration_tokens_total_sum"], values["qrt:iteration_tokens_total_count"]) == (6, 3)
    load = router.metrics.load()
    assert load["server_load"] == 2 == load["running"] + load["waiting"]


def test_metrics_name_the_model():
    """As it is served, else as its folder; one of several engines is named too."""
    engine = Engine(EngineConfig("tiny", kv_cache_memory_bytes=2**25))
    for names, prefix, labels in (
        (None, "qrt:", {"model_name": "tiny"}),
        (MetricNames("a/b", "vllm", 1), "vllm:", {"model_name": "a/b", "engine": "1"}),
    ):
        samples = [
            s for family in EngineRouter(engine, names=names).metrics.collect() for s in family.samples
        ]
        assert samples and all(labels.items() <= sample.labels.items() for sample in samples)
        assert all(("engine" in sample.labels) == ("engine" in labels) for sample in samples)
        assert all(sample.name.startswith(prefix) for sample in samples)


def test_the_pool_in_blocks_as_routers_for_vllm_read_it(router):
    router.metrics.names = MetricNames("m", "vllm")
    text = router.metrics.exposition().decode()
    (info,) = (f for f in text_string_to_metric_families(text) if f.name == "vllm:cache_config_info")
    labels = info.samples[0].labels
    blocks, block = int(labels["num_gpu_blocks"]), int(labels["block_size"])
    assert blocks * block <= router.info.pool_tokens < (blocks + 1) * block
    for gauge in ("num_requests_waiting", "num_requests_running", "kv_cache_usage_perc"):
        assert f'vllm:{gauge}{{model_name="m"}} 0.0' in text


def test_nothing_is_generated_for_who_is_gone(router):
    """Gone, which is the supervisor's, may overtake what the dead process has sent."""
    before = [("api-0", add("a")), ("api-1", add("b")), ("supervisor", Gone("api-0"))]
    port = Port([*before, ("api-0", add("c")), ("api-1", add("d"))], [("api-0", add("e"))], [])
    router.run(port)
    accepted = [id for _, who, message in port.sent if who == "api-1" for id in message.accepted]
    scheduler = router.engine.scheduler
    assert accepted == ["b", "d"] == [request.id for request in [*scheduler.running, *scheduler.waiting]]


def test_those_who_balance_hear_of_the_load(router, monkeypatch):
    """All of it, in each output and soon after a change; nobody else does."""
    both = [("api-1", Hello(balances=True)), ("api-2", Hello(balances=True))]
    added = [("api-0", add("a")), ("api-1", add("b"))]
    port = Port(
        [("api-0", Hello()), *both], added, [], [("supervisor", Gone("api-2"))], [("api-1", add("c"))]
    )
    monkeypatch.setattr(router_module, "time", port)
    router.run(port)

    def told(client: str) -> set[tuple[int, int]]:
        outputs = [
            message for _, who, message in port.sent if who == client and isinstance(message, StepOutput)
        ]
        return {(output.num_requests, output.waiting_tokens) for output in outputs}

    assert told("api-0") == {(0, 0)}, "it has outputs, and has not asked"
    assert told("api-1") == {(2, 3), (3, 6)}, "3 tokens wait in each prompt but the first"
    assert told("api-2") == {(2, 3)}, "it is gone before the change"
