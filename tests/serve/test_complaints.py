"""What users of other servers have complained about, and what operators rely
on: logprobs of the prompt, streams, limits, health and metrics."""

import json
import re
import subprocess
import sys

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families
from servers import KEY, ThreadServer, bearer, wait_idle

from qrt import LLM, SamplingParams
from qrt.serve.routes.app import PAGE

pytestmark = pytest.mark.model
PROMPT = "When a function is called, the"


@pytest.fixture(scope="module")
def server():
    with ThreadServer(kv="int8", enable_admin_endpoints=True) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key=KEY, max_retries=0)


@pytest.fixture(scope="module")
def http(server):
    with httpx.Client(base_url=server.url, headers=bearer(), timeout=60) as http:
        yield http


def complete(client, **body):
    return client.completions.create(
        **{"model": "tiny", "prompt": PROMPT, "temperature": 0, "max_tokens": 8, **body}
    )


@pytest.mark.parametrize("max_tokens", [1, 0])
def test_lm_eval_can_read_echo_with_logprobs(client, server, max_tokens):
    """Prompts as ids; the first token has no log-probability, the others those of the Python API; max_tokens
    0 generates nothing."""
    prompts = [
        server.tokenizer.encode(text) for text in (PROMPT, "A list is a", "Once upon a time there was")
    ]
    reply = complete(client, prompt=prompts, echo=True, logprobs=1, max_tokens=max_tokens)
    params = SamplingParams(temperature=0, max_tokens=1, prompt_logprobs=1)
    outputs = LLM("tiny", kv="int8").generate(prompts, params, use_tqdm=False)
    for choice, ids, output in zip(reply.choices, prompts, outputs, strict=True):
        logprobs = choice.logprobs
        assert len(logprobs.tokens) == len(ids) + max_tokens == len(logprobs.text_offset)
        assert logprobs.token_logprobs[0] is None and logprobs.top_logprobs[0] is None
        wanted = [output.prompt_logprobs[i][ids[i]].logprob for i in range(1, len(ids))]
        assert logprobs.token_logprobs[1 : len(ids)] == pytest.approx(wanted, abs=1e-4)
        assert (
            choice.text.startswith(server.tokenizer.decode(ids, False)) and choice.finish_reason == "length"
        )
    assert reply.usage.completion_tokens == 3 * max_tokens


def test_echo_streams_the_prompt_first(client):
    chunks = list(complete(client, echo=True, logprobs=0, stream=True))
    assert chunks[0].choices[0].text == PROMPT
    first = chunks[0].choices[0].logprobs
    assert first.token_logprobs[0] is None and len(first.tokens) == len(first.token_logprobs) > 3
    whole = complete(client, echo=True, logprobs=0).choices[0]
    assert "".join(chunk.choices[0].text for chunk in chunks) == whole.text
    tokens = [token for chunk in chunks for token in chunk.choices[0].logprobs.tokens]
    assert tokens == whole.logprobs.tokens


def test_streams_end_with_done_and_usage(http):
    """Every chunk has the same id, created and model; usage is null but in the last, which has no choices."""
    body = {
        "prompt": PROMPT,
        "max_tokens": 5,
        "stream": True,
        "stream_options": {"include_usage": True},
        "n": 2,
    }
    text = http.post("/v1/completions", json=body).text
    *chunks, done, rest = text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    chunks = [json.loads(chunk.removeprefix("data: ")) for chunk in chunks]
    assert len({(chunk["id"], chunk["created"], chunk["model"], chunk["object"]) for chunk in chunks}) == 1
    *chunks, last = chunks
    assert last["choices"] == [] and last["usage"]["completion_tokens"] == 10
    assert all(chunk["usage"] is None for chunk in chunks)
    assert sorted(
        chunk["choices"][0]["index"] for chunk in chunks if chunk["choices"][0]["finish_reason"]
    ) == [0, 1]
    body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
    chunks = http.post("/v1/completions", json=body).text.split("\n\n")[:-2]
    counts = [json.loads(chunk.removeprefix("data: "))["usage"]["completion_tokens"] for chunk in chunks]
    assert counts == sorted(counts) and counts[-1] == 10


def test_logprobs_come_in_streamed_chunks(client):
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "max_tokens": 6,
        "temperature": 0,
    }
    whole = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2).choices[0].logprobs.content
    chunks = client.chat.completions.create(**chat, logprobs=True, top_logprobs=2, stream=True)
    streamed = [
        entry for chunk in chunks if chunk.choices[0].logprobs for entry in chunk.choices[0].logprobs.content
    ]
    assert [entry.token for entry in streamed] == [entry.token for entry in whole]
    assert all(len(entry.top_logprobs) == 2 for entry in streamed)


def test_more_tokens_than_the_context(client, server):
    """As vLLM: more than the context is wrong, more than it has left is cut."""
    longest = server.service.client.info.max_model_len
    with pytest.raises(openai.BadRequestError, match=f"expected at most {longest}"):
        complete(client, max_tokens=longest + 1)
    near = complete(client, prompt=[5] * (longest - 3), max_tokens=longest, extra_body={"ignore_eos": True})
    assert near.usage.completion_tokens == 3 and near.choices[0].finish_reason == "length"


def test_seeded_output_does_not_depend_on_the_batch(client):
    arguments = {"temperature": 1.0, "seed": 5, "max_tokens": 10}
    alone = complete(client, **arguments).choices[0].text
    among = complete(client, prompt=["A", "The", PROMPT, "In"], **arguments).choices[2].text
    assert alone == among


def test_best_of_returns_the_likeliest(client):
    arguments = {"temperature": 1.0, "seed": 2, "max_tokens": 6, "logprobs": 0}
    all_five = complete(client, n=5, **arguments).choices
    best = complete(client, n=2, best_of=5, **arguments)
    ranked = sorted(all_five, key=lambda choice: -sum(choice.logprobs.token_logprobs))
    assert [choice.text for choice in best.choices] == [choice.text for choice in ranked[:2]]
    assert best.usage.completion_tokens == 30, "what was generated is counted"


def test_new_parameters_take_effect(client, server):
    token = server.tokenizer.encode(" very", add_special_tokens=False)[0]
    extra = {"allowed_token_ids": [token]}
    assert complete(client, extra_body=extra).choices[0].text == " very" * 8
    assert complete(client, logit_bias={str(token): 100}).choices[0].text == " very" * 8
    first = complete(client).choices[0].text
    word = first.split()[0]
    assert word not in complete(client, extra_body={"bad_words": [word]}).choices[0].text.split()


def test_tokenize_and_back(http, server):
    reply = http.post("/tokenize", json={"prompt": "Grüße 🎉", "return_token_strs": True}).json()
    assert reply["tokens"] == server.tokenizer.encode("Grüße 🎉") and reply["count"] == len(reply["tokens"])
    assert len(reply["token_strs"]) == reply["count"]
    assert http.post("/tokenize", json={"content": "Grüße 🎉"}).json()["tokens"] == reply["tokens"]
    assert "Grüße 🎉" in http.post("/detokenize", json={"tokens": reply["tokens"]}).json()["prompt"]
    chat = http.post("/tokenize", json={"messages": [{"role": "user", "content": "x"}]}).json()["tokens"]
    wanted = server.tokenizer.encode_chat([{"role": "user", "content": "x"}], add_generation_prompt=True)
    assert chat == wanted
    assert http.get("/tokenizer_info").json()["eos_token"] == "<|eos|>"


def test_the_shapes_of_vllm_bench(http):
    """What `vllm bench serve` sends to completions and chat."""
    common = {
        "model": "tiny",
        "temperature": 0.0,
        "repetition_penalty": 1.0,
        "ignore_eos": True,
        "stream": True,
    }
    common["stream_options"] = {"include_usage": True}
    completion = {**common, "prompt": PROMPT, "max_tokens": 4, "logprobs": None}
    content = [{"type": "text", "text": PROMPT}]
    chat = {**common, "messages": [{"role": "user", "content": content}], "max_completion_tokens": 4}
    for route, body in (("/v1/completions", completion), ("/v1/chat/completions", chat)):
        events = http.post(route, json=body).text.split("\n\n")
        assert json.loads(events[-3].removeprefix("data: "))["usage"]["completion_tokens"] == 4


def test_a_prompt_found_again_gives_the_same(client, http):
    prompt = "A text that is long enough to be found again, whatever has been asked in between."
    assert http.post("/reset_prefix_cache").status_code == 200
    first, second = (complete(client, prompt=prompt, max_tokens=12) for _ in range(2))
    assert (
        first.usage.prompt_tokens_details.cached_tokens
        == 0
        < second.usage.prompt_tokens_details.cached_tokens
    )
    assert first.choices[0].text == second.choices[0].text


def test_a_stuck_engine_turns_health_red(server, http, monkeypatch):
    monkeypatch.setattr(type(server.service.client), "silent_seconds", 1000.0)
    for probe in ("/health", "/readiness"):
        reply = http.get(probe)
        assert reply.status_code == 503 and "stuck" in reply.json()["error"]["message"]
    monkeypatch.undo()
    assert http.get("/health").status_code == 200 == http.get("/readiness").status_code


def test_watchdog_ends_a_hanging_step():
    code = (
        "import time; from qrt.serve.link.router import EngineRouter; r = EngineRouter.__new__(EngineRouter);"
        "r._watchdog_seconds, r._watchdog_set = 0.3, 0.0; r._watch(); time.sleep(60)"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=50)
    assert ended.returncode == 1 and "most recent call first" in ended.stderr


def read_metrics(http):
    """Values by name and labels, of which all have the model's name."""
    families = text_string_to_metric_families(http.get("/metrics").text)
    samples = [sample for family in families for sample in family.samples]
    assert all(sample.labels.pop("model_name") == "tiny" for sample in samples)
    return {(sample.name, *sorted(sample.labels.values())): sample.value for sample in samples}


def test_metrics_count_requests_and_tokens(client, http, server):
    before = read_metrics(http)
    for _ in range(3):
        complete(client, max_tokens=7, extra_body={"ignore_eos": True})
    assert http.post("/v1/completions", json={"prompt": 1.5}).status_code == 400
    wait_idle(server)
    after = read_metrics(http)

    def grown(*key):
        return after[key] - before.get(key, 0)

    assert grown("qrt:generation_tokens_total") == 21
    assert grown("qrt:prompt_tokens_total") == 3 * len(server.tokenizer.encode(PROMPT))
    assert grown("qrt:iteration_tokens_total_sum") == 21 + 3 * len(server.tokenizer.encode(PROMPT))
    assert grown("qrt:request_success_total", "length") == 3
    assert grown("qrt:request_errors_total", "400") == 1
    for name in ("time_to_first_token_seconds", "e2e_request_latency_seconds", "request_queue_time_seconds"):
        assert grown(f"qrt:{name}_count") == 3 == grown(f"qrt:{name}_bucket", "+Inf")
    assert grown("qrt:inter_token_latency_seconds_count") == 18
    assert 0 < grown("qrt:time_to_first_token_seconds_sum") <= grown("qrt:e2e_request_latency_seconds_sum")
    assert after["qrt:num_requests_running",] == after["qrt:kv_cache_usage_perc",] == 0


def test_a_stop_string_is_no_abort(client, http, server):
    """It is found in the API process, which ends the request: the figures are those of a finished one."""
    before = read_metrics(http)
    text = complete(client, max_tokens=40, temperature=0, extra_body={"ignore_eos": True}).choices[0].text
    stop = text[len(text) // 2 :][:3]
    choice = complete(client, max_tokens=40, temperature=0, stop=[stop], extra_body={"ignore_eos": True})
    assert choice.choices[0].finish_reason == "stop"
    with complete(client, max_tokens=1000, stream=True, extra_body={"ignore_eos": True}) as stream:
        next(iter(stream))
    wait_idle(server)
    after = read_metrics(http)
    for reason in ("stop", "length", "abort"):
        name = "qrt:request_success_total", reason
        assert after[name] - before[name] == 1, reason
    for name in ("e2e_request_latency_seconds", "request_generation_tokens", "request_decode_time_seconds"):
        assert after[f"qrt:{name}_count",] - before[f"qrt:{name}_count",] == 2, "not of who left"


def test_page_loads_nothing_from_other_hosts(http):
    page = http.get("/")
    files = re.findall(r'(?:src|href)="([^"]+)"', page.text)
    assert {"page/app.js", "page/vendor/purify.min.js", "page/style.css"} < set(files)
    for file in files:
        assert file.startswith(("page/", "data:"))
    for path in ("/", *[f"/{file}" for file in files if file.startswith("page/")]):
        reply = http.get(path)
        policy = dict(part.split(" ", 1) for part in reply.headers["Content-Security-Policy"].split("; "))
        assert reply.status_code == 200 and reply.headers["Cache-Control"] == "no-cache"
        assert policy["default-src"] == "'none'" and policy["script-src"] == policy["connect-src"] == "'self'"
        assert "unsafe" not in str(policy) and policy["frame-ancestors"] == "'none'"


def test_the_page_makes_no_markup_of_texts():
    for file in PAGE.glob("*.js"):
        found = re.findall(
            r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|\beval\b|new Function", file.read_text()
        )
        assert not found, f"{file.name}: {found}"
