"""The promises of docs/security.md, line by line: what is refused, how, and before what work.

Elsewhere: keys in test_keys.py, connections in test_connection.py, fields that are not run in test_fields.py,
sockets and processes in test_processes.py, templates in test_chat_template.py, safetensors and shard names in
tests/quant/test_checkpoint_reader.py.
"""

import asyncio
import json
import logging
import re
import threading
import time
from pathlib import Path

import httpx
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from servers import ThreadServer, bearer, refused, wait_idle, wait_until

import qrt.serve.http.http_errors as http_errors
import qrt.serve.http.service as service
from qrt.cli import LineFormatter
from qrt.compat.fields import FIELDS as PEER_FIELDS
from qrt.serve.routes.lightllm import GenerateRequest
from qrt.serve.routes.messages.body import MessagesRequest
from qrt.serve.routes.protocol import ChatCompletionRequest, CompletionRequest
from qrt.serve.routes.replies import CompletionReply
from qrt.serve.routes.responses.body import ResponsesRequest
from qrt.serve.routes.tokens import Detokenize, TokenizeChat

pytestmark = pytest.mark.model
JSON = {**bearer(), "Content-Type": "application/json"}
ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def server():
    with ThreadServer(
        kv="fp16",
        engine={"max_num_queued_reqs": 8, "max_num_queued_tokens": 4000, "max_num_seqs": 4},
        allowed_origins=("https://a.example",),
        enable_request_id_headers=True,
    ) as running:
        yield running


@pytest.fixture(scope="module")
def client(server):
    with httpx.Client(base_url=server.url, headers=JSON, timeout=30) as client:
        yield client


# Source


def test_no_dangerous_call_in_the_source():
    """No pickle on any socket, nothing evaluated, no shell, no YAML or torch file that runs code."""
    wrong = re.compile(
        r"\bpickle\b|recv_pyobj|send_pyobj|\beval\(|\bexec\(|yaml\.load\(|shell=True|trust_remote_code=True"
        r"|torch\.load\(|os\.system\("
    )
    allowed = {"never pickle", "self.eval(", "model.eval(", ".eval()", "|eval(uation)?"}
    for path in [*ROOT.glob("qrt/**/*.py"), *ROOT.glob("calibrate/**/*.py"), *ROOT.glob("eval/**/*.py")]:
        for number, line in enumerate(path.read_text().splitlines(), 1):
            if wrong.search(line) and not any(words in line for words in allowed):
                pytest.fail(f"{path}:{number}: {line.strip()}")


# Origins


def test_origins(server):
    asked = {"Access-Control-Request-Method": "POST", "Access-Control-Request-Headers": "authorization"}
    reply = httpx.options(f"{server.url}/v1/completions", headers={"Origin": "https://a.example", **asked})
    assert reply.status_code == 200, "a preflight has no key"
    assert reply.headers["Access-Control-Allow-Origin"] == "https://a.example"
    reply = httpx.options(f"{server.url}/v1/completions", headers={"Origin": "https://b.example", **asked})
    assert "Access-Control-Allow-Origin" not in reply.headers


# Bodies


@pytest.fixture
def untouched(server, monkeypatch):
    """Fails a test whose requests make work: a text that is tokenized beyond an "x", more errors than a few,
    more than one question to the engine, or anything that the engine takes."""
    texts, errors, asked, taken = [], [], [], []
    encode, wrong_field, add = server.service.tokenizer.encode, http_errors.wrong_field, server.engine.add

    def counted_add(id, *arguments, **options):
        asked.append(id)
        add(id, *arguments, **options)
        taken.append(id)

    monkeypatch.setattr(
        server.service.tokenizer, "encode", lambda text, *more: texts.append(text) or encode(text, *more)
    )
    monkeypatch.setattr(
        http_errors, "wrong_field", lambda all, body: errors.extend(all) or wrong_field(all, body)
    )
    monkeypatch.setattr(server.engine, "add", counted_add)
    yield
    assert sum(map(len, texts)) <= 1 and len(errors) < 10 and len(asked) <= 1 and not taken


@pytest.mark.parametrize(
    "route",
    ["/v1/completions", "/v1/chat/completions", "/v1/responses", "/generate", "/tokenize", "/detokenize"],
)
@pytest.mark.parametrize(
    "body",
    [
        b"",
        b"{",
        b"null",
        b"[]",
        b'"x"',
        b"\xff\xfe",
        b'{"prompt": "x", "temperature": NaN}',
        b'{"prompt": "x", "temperature": Infinity}',
        b'{"prompt": "x", "temperature": 1e999}',
        b"[" * 100_000,
        b'{"a":' * 5000 + b"1" + b"}" * 5000,
        b'{"prompt": "x", "extra": ' + b"[" * 200 + b"]" * 200 + b"}",
        b'{"prompt": ' + b"9" * 10_000 + b"}",
        b'{"prompt": "\\ud800"}',
    ],
    ids=range(14),
)
def test_invalid_json_is_refused(client, untouched, route, body):
    refused(client.post(route, content=body))


def test_other_media_types(client):
    for kind in ("text/plain", "application/x-www-form-urlencoded", ""):
        refused(
            client.post("/v1/completions", content=b'{"prompt": "x"}', headers={"Content-Type": kind}), 415
        )


@pytest.mark.parametrize(
    "field",
    [
        {"n": 10**9}, {"n": 0}, {"n": True}, {"n": 1.5}, {"n": "3"}, {"best_of": 10**6}, {"n": 9},
        {"temperature": -1}, {"temperature": 3}, {"temperature": "hot"}, {"temperature": True},
        {"temperature": "1"}, {"stream": "true"}, {"echo": 1}, {"top_p": 0}, {"top_p": 2},
        {"min_p": 7},
        {"top_k": 2**40}, {"top_k": True}, {"seed": 2**63}, {"seed": 0.5}, {"max_tokens": -1},
        {"max_tokens": 10**12},
        {"max_tokens": 3000}, {"logprobs": 21}, {"logprobs": 10**9}, {"prompt_logprobs": -1},
        {"prompt_logprobs": 21},
        {"stop": ["x"] * 17}, {"stop": "x" * 300}, {"stop": [""]}, {"stop": [1]},
        {"stop_token_ids": [0] * 2000}, {"stop_token_ids": [10**6]}, {"allowed_token_ids": []},
        {"allowed_token_ids": [0] * 2000}, {"allowed_token_ids": [5000]}, {"bad_words": ["x"] * 129},
        {"logit_bias": {str(i): 1 for i in range(2000)}}, {"logit_bias": {"x": 1}},
        {"logit_bias": {"5000": 1}}, {"logit_bias": {"²": 1}}, {"logit_bias": {"1": 1, "01": 2}},
        {"logit_bias": {"1": 101}}, {"presence_penalty": 3}, {"frequency_penalty": -3},
        {"repetition_penalty": 0},
        {"prompt": []}, {"prompt": [[]]}, {"prompt": [-1]}, {"prompt": [10**6]}, {"prompt": ["x"] * 2049},
        {"prompt": [[1], ["x"]]}, {"prompt": "x" * 200_000}, {"prompt": [5] * 3000},
        {"prompt": [[5] * 1500] * 3}, {"prompt": [5] * 1500, "n": 3},
        {"stream_options": {"include_usage": True}}, {"model": "x" * 5000}, {"cache_salt": "x" * 1000},
    ],
    ids=lambda field: f"{next(iter(field))}={str(next(iter(field.values())))[:20]}",
)  # fmt: skip
def test_amplifiers_are_capped(client, untouched, field):
    """4xx, with the field's name and little else, and nothing runs."""
    reply = client.post("/v1/completions", json={"prompt": "x", "max_tokens": 2, **field})
    assert len(refused(reply, 404 if "model" in field else 400)) < 1100


@pytest.mark.parametrize("asked", [{"echo": True, "logprobs": 20}, {"prompt_logprobs": 20}])
def test_log_probabilities_of_prompts_are_capped(client, untouched, monkeypatch, asked):
    """Each completion's reply repeats them: a small request would be answered by gigabytes."""
    monkeypatch.setattr(service, "MAX_SCORES", 3 * 100 * 21)
    body = {"prompt": [5] * 100, "max_tokens": 1, "n": 4, **asked}
    assert refused(client.post("/v1/completions", json=body)).endswith(
        "numbers about prompts per body, got 8400"
    )


@pytest.mark.parametrize(
    "field", [{"logit_bias": {"5": 1, "6": 1}}, {"allowed_token_ids": [5, 6]}, {"stop_token_ids": [5, 6]}]
)
def test_lists_of_token_ids_are_capped_together(client, untouched, monkeypatch, field):
    """Each request has its own, to be checked twice: 40 KB would be millions, and seconds of engine and
    server."""
    monkeypatch.setattr(service, "MAX_LISTED", 15)
    body = {"prompt": [[5], [6]], "max_tokens": 1, "n": 4, **field}
    assert refused(client.post("/v1/completions", json=body)).endswith("token ids in lists per body, got 16")


def test_large_logprob_reply_is_written_in_a_thread(server, client, monkeypatch):
    """It would stand still for seconds."""
    real, inside = CompletionReply.body, []

    def body(reply):
        inside.append(threading.current_thread() is server.thread)
        return real(reply)

    monkeypatch.setattr(CompletionReply, "body", body)
    for asked in ({"prompt_logprobs": 20}, {"logprobs": 20, "echo": True}, {"logprobs": 1}):
        body = {"prompt": [5] * 300, "max_tokens": 2, **asked}
        assert client.post("/v1/completions", json=body).status_code == 200
    assert inside == [False, False, True], "a thread takes its time, too"


def test_long_token_lists_do_not_block_the_event_loop(server, client, monkeypatch):
    """Their texts are looked up in a thread; a prompt that is too long is not decoded for its echo; and
    between two prompts of a body others have their turn."""
    tokenizer, inside, decoded, turns = server.service.tokenizer, [], [], []
    token_text, decode, encode = tokenizer.token_text, tokenizer.decode, tokenizer.encode
    here = threading.current_thread
    monkeypatch.setattr(tokenizer, "token_text", lambda id: inside.append(here()) or token_text(id))
    body = {"prompt": "a b " * 5000, "return_token_strs": True}
    strings = client.post("/tokenize", json=body).json()["token_strs"]
    assert strings[1:3] == ["a", " b"] and len(strings) == len(inside) > 9000 and server.thread not in inside
    monkeypatch.setattr(
        tokenizer, "decode", lambda ids, *more: decoded.append(len(ids)) or decode(ids, *more)
    )
    reply = client.post("/v1/completions", json={"prompt": [5] * 5000, "echo": True})
    assert refused(reply).startswith("prompt: ") and ", got 5000." in refused(reply)
    assert not decoded

    async def count_turns():
        while True:
            turns.append(None)
            await asyncio.sleep(0)

    seen = []
    monkeypatch.setattr(tokenizer, "encode", lambda *text: seen.append(len(turns)) or encode(*text))
    counting = asyncio.run_coroutine_threadsafe(count_turns(), server.service.client._loop)
    assert client.post("/v1/completions", json={"prompt": ["x"] * 8, "max_tokens": 1}).status_code == 200
    counting.cancel()
    assert len(set(seen)) == len(seen) == 8


@pytest.mark.parametrize(
    "field",
    [
        {"chat_template": "{{ 1 }}"}, {"chat_template_kwargs": {"messages": []}},
        {"chat_template_kwargs": {"raise_exception": 1}},
        {"tools": [{"type": "function", "function": {"name": "f"}}] * 129},
        {"messages": []}, {"messages": [{"role": "user"}] * 5000},
        {"messages": [{"role": "x" * 100, "content": ""}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "http://x"}}]}]},
        {"top_logprobs": 5}, {"top_logprobs": 500, "logprobs": True}, {"tool_choice": "required"},
    ],
    ids=lambda field: next(iter(field)),
)  # fmt: skip
def test_chats_are_capped(client, field):
    body = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 2, **field}
    refused(client.post("/v1/chat/completions", json=body))


VALUES = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-2, 5)
    | st.integers()
    | st.floats(allow_nan=False, allow_infinity=False)
    | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)
WHOLE = {
    "/v1/completions": {"prompt": "x"},
    "/v1/chat/completions": {"messages": [{"role": "user", "content": "x"}]},
    "/v1/responses": {"input": "x"},
    "/v1/messages": {"messages": [{"role": "user", "content": "x"}]},
    "/generate": {"inputs": "x", "parameters": {"max_new_tokens": 1}},
    "/tokenize": {"prompt": "x"},
    "/detokenize": {"tokens": [5]},
}
BODIES = (CompletionRequest, ChatCompletionRequest, GenerateRequest, TokenizeChat, Detokenize)
FIELDS = {name for body in (*BODIES, ResponsesRequest, MessagesRequest) for name in body.model_fields}


@pytest.fixture(scope="module")
def short():
    """A client of a server whose answers are short, whatever is asked."""
    with ThreadServer(kv="fp16", engine={"max_model_len": 64, "max_num_queued_reqs": 8}) as running:
        with httpx.Client(base_url=running.url, headers=JSON, timeout=120) as client:
            yield client


@settings(deadline=None)
@given(
    route=st.sampled_from(sorted(WHOLE)),
    whole=st.booleans(),
    body=st.dictionaries(
        st.sampled_from(sorted(FIELDS)) | st.sampled_from(sorted(PEER_FIELDS)), VALUES, max_size=6
    ),
)
def test_random_bodies(short, route, whole, body):
    """Any value in any field: an answer or a refusal, never a failure of the server. Ten thousand of them:
    pytest --hypothesis-profile thorough tests/serve/test_security.py -k random_bodies"""
    limit = "max_output_tokens" if route == "/v1/responses" else "max_tokens"
    reply = short.post(route, json={**(WHOLE[route] if whole else {}), limit: 1, **body})
    assert reply.status_code in (200, 400, 404, 501), reply.text
    assert "InternalServerError" not in reply.text, "of a stream, which has begun"


# The queue


def test_full_queue_answers_429_and_others_run_on(server, client, monkeypatch):
    """One runs, with a token, until whoever finds no room is refused."""
    step = server.engine.step

    def step_once():
        return time.sleep(0.01) or [] if server.engine.scheduler.running else step()

    async def run():
        async with httpx.AsyncClient(base_url=server.url, headers=JSON, timeout=60) as client:
            body = {"prompt": "x", "max_tokens": 6, "ignore_eos": True}
            with monkeypatch.context() as held:
                held.setattr(server.engine, "step", step_once)
                asked = [asyncio.create_task(client.post("/v1/completions", json=body))]
                await wait_until(lambda: server.engine.scheduler.running)
                asked += [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(39)]
                await wait_until(lambda: sum(task.done() for task in asked) >= 40 - 8 - 1)
            return await asyncio.gather(*asked)

    replies = asyncio.run(run())
    codes = [reply.status_code for reply in replies]
    assert set(codes) == {200, 429} and codes.count(200) == 8 + 1
    assert all(reply.json()["usage"]["completion_tokens"] == 6 for reply in replies if reply.is_success)
    full = next(reply for reply in replies if reply.status_code == 429)
    assert "queue is full" in refused(full, 429) and full.headers["Retry-After"] == "1"
    assert 'request_errors_total{code="429",model_name="tiny"}' in client.get("/metrics").text
    wait_idle(server)


def test_a_request_has_its_time():
    with ThreadServer(kv="fp16", request_timeout=0.5) as server:
        body = {"prompt": "x", "max_tokens": 1900, "ignore_eos": True}
        with httpx.Client(base_url=server.url, headers=JSON, timeout=30) as client:
            assert "0.5 s" in refused(client.post("/v1/completions", json=body), 504)
            text = client.post("/v1/completions", json={**body, "stream": True}).text
        *_, error, done, _ = text.split("\n\n")
        assert json.loads(error.removeprefix("data: "))["error"]["code"] == 504 and done == "data: [DONE]"
        wait_idle(server)


def test_the_wall_clock_may_jump(monkeypatch):
    """Times are those of the monotonic clock: a day forth and back ends no request, turns nothing red."""
    now, jump = time.time, [0.0]
    monkeypatch.setattr(time, "time", lambda: now() + jump[0])
    with ThreadServer(kv="fp16", request_timeout=60) as server:
        body = {"prompt": "x", "max_tokens": 60, "ignore_eos": True, "stream": True}
        with (
            httpx.Client(base_url=server.url, headers=JSON, timeout=30) as client,
            client.stream("POST", "/v1/completions", json=body) as reply,
        ):
            text = ""
            for count, part in enumerate(reply.iter_text()):
                jump[0] = (86400.0, -86400.0)[count % 2]
                text += part
                assert count or client.get("/health").status_code == 200
        assert text.endswith("data: [DONE]\n\n") and "error" not in text and text.count("data: ") >= 2
        wait_idle(server)
        load = json.loads(httpx.get(f"{server.url}/load", headers=JSON).text)
        assert load["generation_tokens"] == 60 and 0 <= load["generation_tokens_per_second"] < 1e5


# Errors and logs


def test_a_defect_is_a_number_and_a_log_line(server, monkeypatch, caplog):
    """One, which is counted and has the headers of every reply."""
    monkeypatch.setattr(server.service.tokenizer, "encode", lambda *_: 1 / 0)
    headers = {**JSON, "X-Request-Id": "mine-2", "Origin": "https://a.example"}
    reply = httpx.post(f"{server.url}/tokenize", json={"prompt": "x"}, headers=headers)
    message = refused(reply, 500)
    reference = re.fullmatch(r"internal error, logged as (\w{12})", message)[1]
    assert reference in caplog.text and caplog.text.count("Traceback") == 1
    assert "ZeroDivisionError" in caplog.text
    assert reply.headers["X-Request-Id"] == "mine-2" and reply.headers["X-Content-Type-Options"] == "nosniff"
    assert reply.headers["Access-Control-Allow-Origin"] == "https://a.example"
    figures = httpx.get(f"{server.url}/metrics", headers=JSON).text
    assert 'request_errors_total{code="500",model_name="tiny"} 1.0' in figures


def test_request_ids_and_log_lines_cannot_be_forged(server):
    reply = httpx.get(f"{server.url}/health", headers={"X-Request-Id": "mine-1"})
    assert reply.headers["X-Request-Id"] == "mine-1"
    reply = httpx.get(f"{server.url}/health", headers={"X-Request-Id": "a" * 500})
    assert reply.headers["X-Request-Id"].startswith("http-")
    import logging

    record = logging.LogRecord("x", logging.INFO, "", 0, "model %s", ("a\nERROR forged\x1b[0m",), None)
    assert LineFormatter("%(message)s").format(record) == "model a\\x0aERROR forged\\x1b[0m"


def test_prompts_and_keys_are_not_logged(caplog):
    settings = {"enable_log_requests": True, "enable_request_id_headers": True}
    with ThreadServer(kv="fp16", **settings, api_keys=("a-secret-key",)) as server:
        logging.getLogger().setLevel(logging.DEBUG)
        headers = {**bearer("a-secret-key"), "X-Request-Id": "mine-3", "Content-Type": "application/json"}
        with httpx.Client(base_url=server.url, headers=headers, timeout=30) as client, caplog.at_level(10):
            chat = {"messages": [{"role": "user", "content": "a secret word"}], "max_tokens": 2}
            assert client.post(
                "/v1/completions", json={"prompt": "a secret word", "max_tokens": 2}
            ).is_success
            assert client.post("/v1/chat/completions", json=chat).is_success
            assert client.post("/v1/completions", json={"prompt": "a secret word", "n": 0}).is_client_error
    assert len(re.findall(r"req-\w+ of mine-3: \d+ prompt tokens", caplog.text)) == 2, "requests are logged"
    assert "secret" not in caplog.text


# Prefix cache


def test_cache_salts_keep_prefixes_apart(client):
    """Without the salt nobody can learn by the clock what somebody else has asked."""

    def cached(salt):
        body = {
            "prompt": "A prompt that is long enough to be found again.",
            "max_tokens": 1,
            "cache_salt": salt,
        }
        usage = client.post("/v1/completions", json=body).json()["usage"]
        return usage["prompt_tokens_details"]["cached_tokens"]

    assert [cached("a") > 0, cached("a") > 0, cached("b") > 0] == [False, True, False]
