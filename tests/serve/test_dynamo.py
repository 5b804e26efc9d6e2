"""Dynamo's worker: tokens of LLM, what requests may ask, the ends. With ai-dynamo where it is installed, and
with a stand-in everywhere."""

import asyncio
import dataclasses
import importlib
import inspect
import os
import signal
import subprocess
import sys
import time

import dynamo_standin
import httpx
import pytest

from qrt import LLM, EngineConfig, SamplingParams
from qrt.errors import ConfigError, UnsupportedError
from qrt.serve.dynamo import TokenEngine, engine_class, main, sampling_params

pytestmark = pytest.mark.model
IDS = [5, 6, 7, 8]
SMALL = {"kv": "int8", "kv_cache_memory_bytes": 2**25, "max_model_len": 512}
GREEDY = {"temperature": 0.0, "top_p": None}


@pytest.fixture(params=["standin", "package"])
def context(request, monkeypatch):
    """The class of Dynamo's contexts, with the modules in place."""
    if request.param == "package":
        pytest.importorskip("dynamo._core", reason="ai-dynamo is not installed (pip install ai-dynamo)")
        return importlib.import_module("dynamo._core").Context
    for name, module in dynamo_standin.modules().items():
        monkeypatch.setitem(sys.modules, name, module)
    return dynamo_standin.Context


def asked(ids=IDS, sampling=GREEDY, stop=None, **others):
    """A request as the frontend sends it: options that a client leaves out are None."""
    stop = {"max_tokens": 6, "stop": None, "min_tokens": None, **(stop or {})}
    output = {"logprobs": None, "prompt_logprobs": None, "skip_special_tokens": True}
    return {"model": "tiny", "token_ids": ids, "sampling_options": sampling, "stop_conditions": stop,
            "output_options": output, **others}  # fmt: skip


def made(**settings):
    return engine_class()(EngineConfig("tiny", **SMALL, **settings), "mine")


async def chunks(engine, request, context):
    return [chunk async for chunk in engine.generate(request, context)]


async def refused(engine, request, context, kind, match):
    with pytest.raises(getattr(sys.modules["dynamo.llm.exceptions"], kind), match=match):
        await chunks(engine, request, context)


def test_tokens_are_those_of_llm(context):
    params = SamplingParams(temperature=0, max_tokens=6, logprobs=2, prompt_logprobs=1)
    wanted = LLM("tiny", **SMALL).generate([IDS], params, use_tqdm=False)[0].outputs[0]

    async def run():
        engine = made()
        config = await engine.start(7)
        scored = asked(output_options={"logprobs": 2, "prompt_logprobs": 1})
        got = [await chunks(engine, each, context(str(i))) for i, each in enumerate((scored, asked()))]
        payload = await engine.health_check_payload()
        (probe,) = await chunks(engine, payload, context("p"))
        await engine.cleanup()
        return config, got, payload, probe

    config, got, payload, probe = asyncio.run(run())
    facts = dataclasses.asdict(config.llm)
    pool = facts["total_kv_blocks"] * facts["kv_cache_block_size"]
    assert (config.served_model_name, facts["kv_cache_block_size"], facts["context_length"]) == (
        "mine",
        16,
        512,
    )
    assert 2**16 < pool < 2**17 and (facts["max_num_seqs"], facts["max_num_batched_tokens"]) == (256, 8192)
    assert os.path.exists(f"{config.model}/tokenizer.json"), "the frontend reads the tokenizer there"
    for stream in got:
        assert [token for chunk in stream for token in chunk["token_ids"]] == wanted.token_ids
        assert {chunk["index"] for chunk in stream} == {0} and stream[-1]["finish_reason"] == "length"
        assert not any("finish_reason" in chunk for chunk in stream[:-1])
    scores = [logprob for chunk in got[0] for logprob in chunk["log_probs"]]
    assert scores == [
        pytest.approx(own[token].logprob)
        for own, token in zip(wanted.logprobs, wanted.token_ids, strict=True)
    ]
    first = [(each["token_id"], each["token"]) for each in got[0][0]["top_logprobs"][0]]
    assert first == [(token, own.decoded_token) for token, own in wanted.logprobs[0].items()]
    prompt = got[0][-1]["engine_data"]["prompt_logprobs"]
    assert prompt[0] is None and [str(token) in own for token, own in zip(IDS[1:], prompt[1:], strict=True)]
    usage = got[1][-1]["completion_usage"]
    assert usage["prompt_tokens_details"] == {"cached_tokens": 3}, "a prompt that was just computed"
    assert (usage["prompt_tokens"], usage["completion_tokens"], usage["total_tokens"]) == (4, 6, 10)
    assert payload["_HEALTH_CHECK"] and len(probe["token_ids"]) == 1


def test_aborts_refusals_and_the_end(context):
    long = asked(stop={"max_tokens": 500, "ignore_eos": True})

    async def run():
        engine = made(max_num_seqs=1, max_num_queued_reqs=1)
        await refused(engine, asked(), context("a"), "EngineShutdown", "has not been started")
        await engine.cleanup()  # as after a start that has failed
        await engine.start(1)
        own, got = context("a"), []
        async for chunk in engine.generate(long, own):
            got.append(chunk)
            if len(got) == 3:
                others = [asyncio.create_task(chunks(engine, long, context(name))) for name in "bc"]
                full = (await asyncio.wait(others, return_when=asyncio.FIRST_COMPLETED))[0].pop()
                assert full.exception().code == 429 and "queue is full" in str(full.exception())
                await engine.abort(own)
        assert got[-1]["finish_reason"] == "cancelled"
        waiting = next(task for task in others if task is not full)
        waiting.cancel()  # as where Dynamo drops the stream
        await asyncio.wait([waiting])
        left = context("d")
        left.stop_generating()
        assert (await chunks(engine, asked(), left))[0]["finish_reason"] == "cancelled"
        await engine.abort(left)  # it has ended, so nothing happens
        for request, match in (
            (asked(ids=[]), "at least one token"),
            (asked(ids=[5] * 600), "expected at most 511 tokens"),
            (asked(routing={"lora_name": "x"}), "lora_name: expected none, got 'x'"),
            (asked(prefill_result={"disaggregated_params": {}}), "prefill_result: expected none"),
            (asked(multi_modal_data={"image_url": [1]}), "multi_modal_data: expected none"),
            (asked(routing={"priority": 3}), "priority: expected 0.*got -3"),
            (asked(sampling={"guided_decoding": {"regex": "("}}), "structured_outputs.regex"),
        ):
            await refused(engine, request, context("e"), "InvalidArgument", match)
        shape = {"guided_decoding": {"choice": ["yes", "no"], "json": None, "backend": "xgrammar"}}
        answer = await chunks(engine, asked(sampling=shape, routing={"cache_salt": "s"}), context("f"))
        assert answer[-1]["finish_reason"] == "stop"
        client, router = engine._llm.client, engine._llm.client.router.engine
        assert not engine._running and not client.num_running and not router.has_work
        assert router.scheduler.kv.available == router.pool.num_slots
        running = engine.generate(long, context("g"))
        await anext(running)
        ending = asyncio.create_task(engine.cleanup())
        with pytest.raises(sys.modules["dynamo.llm.exceptions"].EngineShutdown, match="shut down"):
            async for _ in running:
                pass
        await ending
        await engine.cleanup()  # a second one does nothing
        await refused(engine, asked(), context("h"), "EngineShutdown", "shut down")

    asyncio.run(run())


DEFAULTS = SamplingParams(temperature=0.6, top_p=0.9, max_tokens=16)


@pytest.mark.parametrize(
    "request_, wanted",
    [({}, {"max_tokens": None}),
     ({"sampling_options": None, "stop_conditions": {"max_tokens": 5}}, {"max_tokens": 5}),
     ({"sampling_options": {"temperature": 0.25, "top_k": 7, "min_p": 0.1, "seed": 3, "top_p": None,
                            "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5}},
      {"temperature": 0.25, "top_k": 7, "min_p": 0.1, "seed": 3, "top_p": 0.9,
       "presence_penalty": 0.5, "frequency_penalty": 0.5, "repetition_penalty": 1.5}),
     ({"sampling_options": {"allowed_token_ids": [4, 5], "bad_words_token_ids": [[1, 2], [3]]}},
      {"allowed_token_ids": (4, 5), "bad_words": ((1, 2), (3,))}),
     ({"stop_conditions": {"stop_token_ids": [4, 9], "stop_token_ids_hidden": [9, 0], "min_tokens": 2,
                           "ignore_eos": True, "max_thinking_tokens": 3}},
      {"stop_token_ids": (4, 9, 0), "min_tokens": 2, "ignore_eos": True, "thinking_token_budget": 3}),
     ({"stop_conditions": {"stop": ["x"]}, "output_options": {"logprobs": 2, "skip_special_tokens": False},
       "sampling_options": {"include_stop_str_in_output": True, "n": 1, "best_of": 1}},
      {"stop": (), "logprobs": 2, "detokenize": False}),
     ({"sampling_options": {"guided_decoding": {"json": None, "choice": []}}}, {"structured_outputs": None})],
)  # fmt: skip
def test_options(request_, wanted):
    """What a request gives, by SamplingParams' names; what it leaves out is the checkpoint's."""
    params = sampling_params(request_, DEFAULTS, None)
    assert {name: getattr(params, name) for name in wanted} == wanted
    assert params.temperature == wanted.get("temperature", 0.6)


def test_the_checkpoint_bounds_the_tokens():
    for given, wanted in ((None, 100), (50, 50), (200, 100)):
        assert sampling_params({"stop_conditions": {"max_tokens": given}}, DEFAULTS, 100).max_tokens == wanted


@pytest.mark.parametrize(
    "options, error, message",
    [({"temperature": -1.0}, ConfigError, "temperature: expected 0 to"),
     ({"n": 2}, UnsupportedError, "n: expected 1, got 2"),
     ({"n": 1, "best_of": 3}, UnsupportedError, "n: expected 1, got 3"),
     ({"use_beam_search": True}, UnsupportedError, "use_beam_search: beam search is not supported"),
     ({"length_penalty": 2.0}, UnsupportedError, "length_penalty"),
     ({"temprature": 1.0}, ConfigError, "unknown argument 'temprature'.*temperature"),
     ({"guided_decoding": {"structural_tag": {}}}, ConfigError, "got 'structural_tag'")],
)  # fmt: skip
def test_wrong_options(options, error, message):
    with pytest.raises(error, match=message):
        sampling_params({"sampling_options": options}, DEFAULTS, None)


def test_arguments(context, capsys):
    def read(*words):
        engine, worker = asyncio.run(engine_class().from_args(["tiny", "--kv", "int8", *words]))
        return engine, worker

    sizes = ("--tensor-parallel-size", "2", "--max-num-seqs", "9", "--device", "cpu")
    places = ("--endpoint", "dyn://a.b.c", "--discovery-backend", "file")
    engine, worker = read(*sizes, *places, "--served-model-name", "mine")
    assert isinstance(engine, TokenEngine) and engine.config == EngineConfig(
        "tiny", kv="int8", tensor_parallel_size=2, max_num_seqs=9, device="cpu"
    )
    assert (worker.namespace, worker.component, worker.endpoint) == ("a", "b", "c")
    assert (worker.served_model_name, worker.discovery_backend, worker.structural_tag) == (
        "mine",
        "file",
        None,
    )
    _, worker = read()
    assert (worker.namespace, worker.component, worker.endpoint) == ("dynamo", "backend", "generate")
    assert worker.served_model_name == "tiny" and os.path.exists(f"{worker.model_name}/config.json")
    with pytest.raises(ConfigError, match="model: give one"):
        read("--model", "tiny")
    with pytest.raises(UnsupportedError, match="int9"):
        read("--kv", "int9")
    with pytest.raises(SystemExit):
        read("--port", "1")
    assert "unknown flag --port" in capsys.readouterr().err


def test_without_dynamo(monkeypatch, capsys):
    for name in [name for name in sys.modules if name.split(".")[0] == "dynamo"]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "dynamo", None)
    assert main(["tiny"]) == 1
    assert "ai-dynamo is not installed; pip install 'qrt[serve]' ai-dynamo" in capsys.readouterr().err


def test_the_stand_in_is_faithful():
    """Its names are Dynamo's, and so are the parameters, fields and abstract methods."""
    pytest.importorskip("dynamo._core", reason="ai-dynamo is not installed (pip install ai-dynamo)")
    for name, parts in dynamo_standin.PARTS.items():
        module = importlib.import_module(f"dynamo.{name}")
        for part in parts:
            real = getattr(module, part.__name__)
            if dataclasses.is_dataclass(part):
                known = {each.name for each in dataclasses.fields(real)}
                assert {each.name for each in dataclasses.fields(part)} <= known, part
            elif inspect.isfunction(part):
                assert set(inspect.signature(part).parameters) <= set(inspect.signature(real).parameters), (
                    part
                )
    real = importlib.import_module("dynamo.common.backend").LLMEngine
    assert real.__abstractmethods__ == dynamo_standin.LLMEngine.__abstractmethods__
    for name in ("from_args", "start", "generate", "abort", "cleanup", "health_check_payload"):
        wanted = inspect.signature(getattr(dynamo_standin.LLMEngine, name)).parameters
        assert list(wanted) == list(inspect.signature(getattr(real, name)).parameters), name


@pytest.mark.slow
def test_behind_dynamos_frontend(tmp_path):
    """Its HTTP server, router and Worker, each as users start them: answers are LLM's."""
    pytest.importorskip("dynamo._core", reason="ai-dynamo is not installed (pip install ai-dynamo)")
    llm = LLM("tiny", **SMALL)
    prompt = llm.tokenizer.encode("The president of", add_special_tokens=False)  # as the frontend does
    wanted = llm.generate([prompt], SamplingParams(temperature=0, max_tokens=8), use_tqdm=False)[0].outputs[0]
    env = {**os.environ, "DYN_FILE_KV": str(tmp_path), "PYTHONPATH": os.pathsep.join(sys.path)}
    flags = ["--discovery-backend", "file"]
    sizes = ["--kv", "int8", "--kv-cache-memory-bytes", "32M", "--max-model-len", "512"]
    commands = (
        ["dynamo.frontend", "--http-port", "8397", *flags],
        ["qrt.serve.dynamo", "tiny", *sizes, *flags],
    )
    processes = [subprocess.Popen([sys.executable, "-m", *words], env=env) for words in commands]
    body = {"model": "tiny", "prompt": "The president of", "max_tokens": 8, "temperature": 0}
    try:
        with httpx.Client(base_url="http://127.0.0.1:8397/v1", timeout=60) as client:
            for _ in range(120):
                try:
                    if client.post("/completions", json=body).status_code == 200:
                        break
                except httpx.TransportError:
                    pass
                time.sleep(0.5)
            reply = client.post("/completions", json=body).json()
            assert reply["choices"][0]["text"] == wanted.text and reply["usage"]["total_tokens"] == 12
            stopped = client.post("/completions", json={**body, "max_tokens": 400, "stop": ["proj"]}).json()
            assert stopped["choices"][0]["text"] == wanted.text[: wanted.text.index("proj")]
            error = client.post("/completions", json={**body, "n": 2, "temperature": 1})
            assert error.status_code == 400 and "n: expected 1, got 2" in error.text
            chat = {"model": "tiny", "messages": [{"role": "user", "content": "hi"}], "max_tokens": 4}
            assert client.post("/chat/completions", json=chat).json()["usage"]["completion_tokens"] == 4
    finally:
        processes[1].send_signal(signal.SIGTERM)
        ended = processes[1].wait(30)
        processes[0].kill()
        processes[0].wait()
    assert ended == 0, "the worker cleans up and ends by itself"
