"""Test `qrt-eval serve` against a scripted server, and the arithmetic of its figures."""

import asyncio
import json
import threading

import numpy as np
import pytest
from aiohttp import web

from errors import assert_error, assert_names
from qrt_eval.cli import main
from qrt_eval.inputs import lengths
from qrt_eval.speed import load, serve
from result_schema import checked


class Server:
    """Answer each request in a thread with `output_len` chunks of one token, or as `script` says."""

    def __init__(self, script=None):
        self.bodies, self.level, self.most = [], 0, 0
        self._script = script
        self._loop = asyncio.new_event_loop()
        self._ready = threading.Event()

    def __enter__(self):
        threading.Thread(target=self._run, daemon=True).start()
        assert self._ready.wait(30)
        return self

    def __exit__(self, *error):
        self._loop.call_soon_threadsafe(self._loop.stop)

    def _run(self):
        asyncio.set_event_loop(self._loop)
        app = web.Application(client_max_size=1 << 26)
        app.add_routes([web.get("/v1/models", self._models), web.post("/v1/{path:.*}", self._complete)])
        runner = web.AppRunner(app)
        self._loop.run_until_complete(runner.setup())
        site = web.TCPSite(runner, "127.0.0.1", 0)
        self._loop.run_until_complete(site.start())
        self.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
        self._ready.set()
        self._loop.run_forever()

    async def _models(self, request):
        return web.json_response({"data": [{"id": "the-model"}]})

    async def _complete(self, request):
        body = await request.json()
        self.bodies.append((request.path, body, request.headers.get("Authorization")))
        self.level += 1
        self.most = max(self.most, self.level)
        try:
            if self._script and (said := self._script(len(self.bodies))):
                return web.Response(status=said[0], text=said[1], content_type=said[2])
            response = web.StreamResponse(headers={"Content-Type": "text/event-stream"})
            await response.prepare(request)
            for _ in range(body["max_tokens"]):
                await asyncio.sleep(0)
                chunk = {"choices": [{"index": 0, "text": "x", "delta": {"content": "y"}}]}
                await response.write(f"data: {json.dumps(chunk)}\n\n".encode())
            size = len(body.get("prompt") or "12345")
            usage = {"completion_tokens": body["max_tokens"], "prompt_tokens": size}
            await response.write(f"data: {json.dumps({'choices': [], 'usage': usage})}\n\n".encode())
            await response.write(b"data: [DONE]\n\n")
            return response
        finally:
            self.level -= 1


def words(server, **flags):
    given = {"tokenizer": "tiny", "num-prompts": 6, "input-len": 7, "output-len": 3, **flags}
    flat = [part for name, value in given.items() for part in (f"--{name}", *map(str, np.atleast_1d(value)))]
    return ["serve", "--base-url", server.url, *flat]


def test_figures_of_a_run(tmp_path, capsys):
    out = tmp_path / "s.json"
    with Server() as server:
        assert (
            main([*words(server, json=out, goodput=["e2el:60000"]), "--save-detailed", "--ignore-eos"]) == 0
        )
    result = checked(out)
    assert result["model_id"] == "the-model" and result["completed"] == 6 and result["failed"] == 0
    assert result["total_input_tokens"] == 42 and result["total_output_tokens"] == 18
    assert result["request_throughput"] == pytest.approx(6 / result["duration"])
    assert result["request_goodput"] == result["request_throughput"]
    assert result["total_token_throughput"] == pytest.approx(60 / result["duration"])
    assert [len(gaps) for gaps in result["itls"]] == [2] * 6 and result["generated_texts"] == ["xxx"] * 6
    assert result["mean_ttft_ms"] == pytest.approx(1e3 * np.mean(result["ttfts"]))
    assert result["p99_itl_ms"] == pytest.approx(1e3 * np.percentile(np.concatenate(result["itls"]), 99))
    path, body, _ = server.bodies[1]
    assert path == "/v1/completions" and len(body["prompt"]) == 7 and body["ignore_eos"] is True
    assert body["stream_options"] == {"include_usage": True} and body["temperature"] == 0
    assert len(server.bodies) == 7  # one of them warms up
    assert "TTFT" in capsys.readouterr().out


def test_chat_sends_text_and_concurrency_is_bounded():
    with Server() as server:
        flags = {"endpoint": "/v1/chat/completions", "max-concurrency": 2, "api-key": "k", "num-prompts": 9}
        assert main(words(server, **flags)) == 0
    assert server.most <= 2
    path, body, authorization = server.bodies[-1]
    assert path == "/v1/chat/completions" and authorization == "Bearer k"
    assert isinstance(body["messages"][0]["content"], str)


def test_lengths_are_those_of_throughput(tmp_path):
    """The same seed gives the same lengths, and each request asks for its own output length."""
    with Server() as server:
        asked = ["serve", "--base-url", server.url, "--tokenizer", "tiny", "--lengths", "sharegpt"]
        flags = ["--num-prompts", "5", "--seed", "3", "--json", str(tmp_path / "s.json")]
        assert main([*asked, *flags]) == 0
    result = checked(tmp_path / "s.json")
    bodies = [body for _, body, _ in server.bodies[1:]]
    sent = sorted((len(body["prompt"]), body["max_tokens"]) for body in bodies)
    drawn = [(len(r.ids), r.output_len) for r in lengths.ShareGPT().requests(5, 3, 4096)]
    assert sent == sorted(drawn) and all(body["ignore_eos"] is True for body in bodies)
    assert result["total_output_tokens"] == sum(out for _, out in drawn)
    assert result["total_input_tokens"] == sum(size for size, _ in drawn)
    assert (
        result["lengths"]["name"] == "sharegpt" and result["lengths"]["input_mu"] == lengths.ShareGPT.INPUT_MU
    )
    assert result["lengths"]["mean_output_len"] == pytest.approx(np.mean([out for _, out in drawn]))


@pytest.mark.parametrize("words, count", [("--lengths {file}", 2), ("--lengths {file} --num-prompts 3", 3)])
def test_a_file_has_as_many_requests_as_rows(words, count, tmp_path):
    file = tmp_path / "lengths.jsonl"
    file.write_text('{"input_len": 4, "output_len": 2}\n{"input_len": 8, "output_len": 3}\n')
    with Server() as server:
        given = words.format(file=file).split()
        assert main(["serve", "--base-url", server.url, "--tokenizer", "tiny", *given]) == 0
    sent = [(len(body["prompt"]), body["max_tokens"]) for _, body, _ in server.bodies[1:]]
    assert sorted(sent) == sorted([(4, 2), (8, 3), (4, 2)][:count])


def test_several_processes_send_one_load():
    """Each request is sent once, outcomes come in the prompts' order, and all processes share one bound."""
    prompts = [load.Prompt([1] * size, size, 2) for size in range(1, 8)]
    with Server() as server:
        url = f"{server.url}/v1/completions"
        sent = load.Load(url, prompts, {"stream": True}, [0.0] * 7, 4, "k")
        outcomes, seconds = load.send(sent, processes=3)
    assert [outcome.prompt_tokens for outcome in outcomes] == list(range(1, 8))
    assert sorted(len(body["prompt"]) for _, body, _ in server.bodies) == list(range(1, 8))
    assert server.most <= 4
    assert all(outcome.output_tokens == 2 and not outcome.error for outcome in outcomes)
    assert 0 < max(outcome.latency for outcome in outcomes) <= seconds


def test_idle_stream_takes_the_remaining_prompts(monkeypatch):
    """However long one request takes, the other streams send all remaining prompts."""
    done = []

    async def request(session, url, prompt, body):
        done.append(prompt)
        while len(done) == 1 or (done[0] is prompt and len(done) < 9):
            await asyncio.sleep(0)
        return load.Outcome(1)

    monkeypatch.setattr(load, "request", request)
    prompts = [load.Prompt([1], size, 1) for size in range(9)]
    outcomes, _ = load.send(load.Load("", prompts, {}, [0.0] * 9, 2, None))
    assert len(outcomes) == len(done) == 9


def test_failed_requests_are_counted_and_left_out(tmp_path):
    def script(count):
        return {
            3: (500, "boom", "text/plain"),
            4: (200, 'data: {"error": "full"}\n\n', "text/event-stream"),
        }.get(count)

    with Server(script) as server:
        assert (
            main([*words(server, json=tmp_path / "s.json", **{"max-concurrency": 1}), "--save-detailed"]) == 0
        )
    result = checked(tmp_path / "s.json")
    assert (result["completed"], result["failed"]) == (4, 2) and result["total_output_tokens"] == 12
    assert sum("500: boom" in error for error in result["errors"]) == 1 == result["errors"].count("full")


@pytest.mark.parametrize(
    "odd",
    [
        '{"choices": [{"te',
        '{"choices": [], "usage": {"prompt_tokens": 3}}',
        '{"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": null}}',
        '{"choices": null}',
        '{"choices": [7]}',
        '{"choices": [{"text": 7}]}',
        "[1]",
        "\\ud800",
    ],
)
def test_odd_event_fails_only_its_request(odd, tmp_path):
    said = f'data: {{"choices": [{{"text": "a"}}]}}\n\ndata: {odd}\n\n'

    def script(count):
        return (200, said, "text/event-stream") if count == 3 else None

    with Server(script) as server:
        assert (
            main([*words(server, json=tmp_path / "s.json", **{"max-concurrency": 1}), "--save-detailed"]) == 0
        )
    result = checked(tmp_path / "s.json")
    assert (result["completed"], result["failed"]) == (5, 1) and result["total_output_tokens"] == 15
    assert_names(result["errors"][1], "OpenAI", odd)


def test_null_error_is_no_error():
    line = b'data: {"error": null, "usage": null, "choices": [{"text": "a"}, {"delta": {"content": "b"}}]}'
    assert load.parse(line) == load.Event(["a", "b"])
    assert load.parse(b"data: [DONE]") is load.parse(b": a comment") is None


def test_refusing_or_missing_server_gives_an_error(capsys):
    with Server(lambda count: (401, "no key", "text/plain")) as server:
        assert main(words(server)) == 1
    assert_names(capsys.readouterr().err, "error: ", "401", "no key")
    assert main(["serve", "--base-url", "http://127.0.0.1:9", "--tokenizer", "tiny"]) == 1
    assert_error(capsys.readouterr().err, "127.0.0.1:9", "start the server")


@pytest.mark.parametrize(
    ("flags", "named"),
    [
        ("--goodput ttft", ["--goodput", "METRIC:MILLISECONDS", "'ttft'"]),
        ("--goodput itl:5", ["--goodput", "ttft", "tpot", "e2el", "itl:5"]),
        ("--base-url localhost:8000", ["--base-url", "//HOST:PORT", "'localhost:8000'"]),
        ("--endpoint v1/completions", ["--endpoint", "/v1/completions", "'v1/completions'"]),
        ("--max-concurrency 2 --processes 3", ["--processes", "1 to 2", "got 3"]),
        ("--num-prompts 3 --processes 4", ["--processes", "1 to 3", "got 4"]),
        ("--model nowhere", ["--tokenizer", "nowhere"]),
    ],
)
def test_bad_input(flags, named, capsys):
    assert main(["serve", *flags.split()]) == 1
    assert_error(capsys.readouterr().err, *named)


def test_arrivals_have_the_rate_and_repeat():
    times = load.delays(1000, 50.0, 1.0, 7)
    assert times == load.delays(1000, 50.0, 1.0, 7) and times[0] == 0
    assert times[-1] == pytest.approx(999 / 50) and times == sorted(times)
    gaps, smooth = np.diff(times), np.diff(load.delays(1000, 50.0, 100.0, 7))
    assert gaps.std() == pytest.approx(
        1 / 50, rel=0.15
    )  # in a Poisson process the gaps' deviation equals their mean
    assert smooth.std() == pytest.approx(0.1 / 50, rel=0.15)
    assert load.delays(3, float("inf"), 1.0, 0) == [0, 0, 0]


def outcome(started, ttft, itls, tokens):
    return load.Outcome(10, started, ttft, itls, ttft + sum(itls), tokens)


def test_metric_definitions():
    """TPOT counts tokens, not chunks; goodput needs all objectives; also the busiest second and overlap."""
    a, b = outcome(0.0, 0.5, [0.1, 0.3], 5), outcome(0.2, 1.0, [], 1)
    assert a.tpot == pytest.approx(0.1) and b.tpot is None
    result = serve.summarize([a, b], 2.0, {"ttft": 0.6, "tpot": 0.2}, [50.0])
    assert result["request_goodput"] == 0.5 and result["output_throughput"] == 3.0
    assert result["mean_itl_ms"] == pytest.approx(200) and result["p50_e2el_ms"] == pytest.approx(950)
    assert result["max_concurrent_requests"] == 2 and result["max_output_tokens_per_s"] == pytest.approx(5)
