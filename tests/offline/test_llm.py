"""LLM against transformers on a random-weight Llama in float32, and the shape of what it returns."""

import json
import shutil
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

import qrt
import small_tokenizers
from qrt import LLM, SamplingParams
from qrt.engine.schedule import admission
from qrt.engine.step.graphs import TokenSteps
from qrt.errors import CheckpointError, ConfigError, QrtError, UnsupportedError
from tiny_models import random_checkpoint

SOURCE = str(Path(qrt.__file__).parent)
KV_BYTES = 4 << 20
INTERRUPTS = [14, pytest.param(40, marks=pytest.mark.exhaustive)]  # at random lines
GREEDY = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
PROMPTS = ["The quick brown", "今天的天气", "the next token is often the most likely one. " * 3, "x"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llm")
    tokenizer = small_tokenizers.byte_level()
    random_checkpoint(folder, "LlamaForCausalLM", vocab_size=tokenizer.get_vocab_size(), eos_token_id=1)
    generation = {
        "eos_token_id": [1, 300, -1, 9999],  # two that are none
        "temperature": 0.6,
        "top_p": 0.9,
        "top_k": 20,
        "max_new_tokens": 7,
    }
    (folder / "generation_config.json").write_text(json.dumps(generation))
    return small_tokenizers.save(tokenizer, folder)


@pytest.fixture(scope="module")
def reference(folder):
    return transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def make(folder, **settings) -> LLM:
    return LLM(str(folder), device="cpu", **{"kv_cache_memory_bytes": KV_BYTES, **settings})


@pytest.fixture(scope="module")
def llm(folder):
    return make(folder)


@pytest.fixture(scope="module")
def expected(folder, reference, llm):
    """What transformers continues PROMPTS with, greedily, 64 tokens each."""
    outputs = []
    for prompt in PROMPTS:
        ids = torch.tensor([llm.tokenizer.encode(prompt)])
        options = {"max_new_tokens": 64, "do_sample": False, "eos_token_id": None, "pad_token_id": 0}
        out = reference.generate(ids, attention_mask=torch.ones_like(ids), **options)
        outputs.append(out[0, ids.shape[1] :].tolist())
    return outputs


def ids_of(outputs):
    return [output.outputs[0].token_ids for output in outputs]


def test_greedy_tokens_match_transformers(llm, expected):
    together = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    assert ids_of(together) == expected
    assert ids_of(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)) == expected[:1]
    for output, prompt in zip(together, PROMPTS, strict=True):
        tokenizer = llm.tokenizer
        assert output.prompt == prompt and output.prompt_token_ids == tokenizer.encode(prompt)
        assert output.outputs[0].text == tokenizer.decode(output.outputs[0].token_ids)
        assert output.finished and output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize(
    "settings",
    [
        {"max_num_batched_tokens": 5},
        {"enable_prefix_caching": False, "max_num_seqs": 2},
        {"attend_cache": True, "max_num_batched_tokens": 16},
    ],
    ids=["chunked", "no prefix cache", "attend cache"],
)
def test_greedy_tokens_do_not_depend_on_how_it_runs(folder, expected, settings):
    llm = make(folder, **settings)
    assert ids_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert ids_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected, "and now from the cache"


def test_greedy_tokens_after_a_pause(folder, expected, monkeypatch):
    monkeypatch.setattr(admission, "expected_output", lambda done, most, conservative: done)
    slot_bytes = 2 * 2 * 2 * 64 * 4  # layers, K and V, heads, values, float32
    llm = make(folder, kv_cache_memory_bytes=240 * slot_bytes, max_model_len=200)
    assert ids_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == expected
    assert llm.engine.scheduler.num_pauses > 0


def test_seeded_sampling_repeats_alone_and_in_any_batch(folder, llm):
    params = SamplingParams(temperature=0.9, top_p=0.95, seed=42, max_tokens=24, ignore_eos=True)
    alone = llm.generate(PROMPTS[1], params, use_tqdm=False)[0].outputs[0].token_ids
    others = SamplingParams(temperature=1.0, max_tokens=24, ignore_eos=True)
    batch = llm.generate(PROMPTS, [others, params, others, GREEDY], use_tqdm=False)
    assert batch[1].outputs[0].token_ids == alone
    assert batch[0].outputs[0].token_ids != llm.generate(PROMPTS[0], others)[0].outputs[0].token_ids
    fresh = [make(folder, seed=s).generate(PROMPTS[0], others)[0].outputs[0].token_ids for s in (5, 5, 6)]
    assert fresh[0] == fresh[1] != fresh[2], "without a seed the engine's decides"


def test_n_completions_differ_and_repeat(llm):
    params = SamplingParams(n=3, temperature=1.0, seed=1, max_tokens=12, ignore_eos=True, prompt_logprobs=0)
    first, second = (llm.generate(PROMPTS[:2], params, use_tqdm=False) for _ in range(2))
    assert first == second or [o.outputs for o in first] == [o.outputs for o in second]
    for output in first:
        assert [completion.index for completion in output.outputs] == [0, 1, 2]
        assert len({tuple(completion.token_ids) for completion in output.outputs}) == 3
        assert len(output.prompt_logprobs) == len(output.prompt_token_ids)


def truth_logprobs(reference, ids):
    with torch.no_grad():
        return reference(torch.tensor([ids])).logits[0].double().log_softmax(-1)


def test_logprobs_are_those_of_transformers(llm, reference):
    params = SamplingParams(
        temperature=0.8, seed=3, max_tokens=9, logprobs=3, prompt_logprobs=2, ignore_eos=True
    )
    output = llm.generate(PROMPTS[2], params, use_tqdm=False)[0]
    completion, prompt = output.outputs[0], output.prompt_token_ids
    truth = truth_logprobs(reference, prompt + completion.token_ids)
    assert output.prompt_logprobs[0] is None and len(output.prompt_logprobs) == len(prompt)
    rows = [*output.prompt_logprobs[1:], *completion.logprobs]
    for place, (row, token) in enumerate(zip(rows, (prompt + completion.token_ids)[1:], strict=True)):
        top = 2 if place < len(prompt) - 1 else 3
        assert next(iter(row)) == token, "the token that came is named first"
        likeliest = truth[place].topk(top).indices.tolist()
        assert set(row) == {token, *likeliest}
        for other, logprob in row.items():
            assert logprob.logprob == pytest.approx(float(truth[place, other]), abs=1e-4)
            assert logprob.rank == int((truth[place] > truth[place, other]).sum()) + 1
            assert logprob.decoded_token == llm.tokenizer.decode([other])
    total = sum(
        row[token].logprob for row, token in zip(completion.logprobs, completion.token_ids, strict=True)
    )
    assert completion.cumulative_logprob == pytest.approx(total, abs=1e-4)
    special = llm.generate({"prompt_token_ids": [5, 1, 7]}, params, use_tqdm=False)[0].prompt_logprobs
    assert special[1][1].decoded_token == llm.get_tokenizer().convert_ids_to_tokens(1)
    plain = llm.generate(PROMPTS[2], GREEDY, use_tqdm=False)[0]
    assert plain.prompt_logprobs is None and plain.outputs[0].logprobs is None
    assert plain.outputs[0].cumulative_logprob is None


@pytest.mark.parametrize("settings", [{}, {"max_num_batched_tokens": 50, "attend_cache": True}])
def test_score_is_the_log_probability_of_every_token(folder, reference, settings):
    llm = make(folder, **settings)
    rng = np.random.default_rng(0)
    windows = [rng.integers(3, 400, n).tolist() for n in (513, 40, 1, 2, 300)]
    windows.append(windows[1][:20] + windows[4][:7])  # a prefix in common
    for window, scores in zip(windows, llm.score(windows), strict=True):
        assert scores.dtype == torch.float32 and len(scores) == len(window) - 1
        truth = truth_logprobs(reference, window)[:-1].gather(1, torch.tensor(window)[1:, None])[:, 0]
        torch.testing.assert_close(scores.double(), truth, rtol=1e-4, atol=1e-4)
    with pytest.raises(ConfigError, match="expected at most 513 tokens .*, got 514"):
        llm.score([windows[0], [5] * 514])
    assert not llm.engine.has_work


def test_attend_cache_shows_the_loss_of_the_kv_format(folder):
    """Served prefill attends its own chunk unquantized, so only attend_cache makes a scored text pay."""
    window = [np.random.default_rng(1).integers(3, 400, 200).tolist()]
    exact = make(folder, attend_cache=True).score(window)[0]
    served = make(folder, kv="int4").score(window)[0]
    torch.testing.assert_close(served, exact, rtol=1e-4, atol=1e-4)
    errors = {
        kv: float((make(folder, kv=kv, attend_cache=True).score(window)[0] - exact).abs().mean())
        for kv in ("int8", "int4")
    }
    assert 1e-4 < errors["int8"] < 0.1 * errors["int4"] and errors["int4"] < 1.0


def test_stop_strings_and_stop_ids(llm, expected):
    text = llm.tokenizer.decode(expected[0])
    stop = text[20:23]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, stop=[stop, "never there"])
    completion = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    assert completion.text == text[: text.index(stop)]
    assert (completion.finish_reason, completion.stop_reason) == ("stop", stop)
    assert stop in llm.tokenizer.decode(completion.token_ids) and not llm.engine.has_work
    last = expected[0][20]
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True, stop_token_ids=[last])
    completion = llm.generate(PROMPTS[0], params, use_tqdm=False)[0].outputs[0]
    end = expected[0].index(last)
    assert completion.token_ids == expected[0][: end + 1] and completion.stop_reason == last
    assert completion.text == llm.tokenizer.decode(expected[0][:end]), "the stop token is no text"


def test_defaults_and_ends_come_from_generation_config(llm):
    assert llm.get_default_sampling_params() == SamplingParams(
        temperature=0.6, top_p=0.9, top_k=20, max_tokens=7
    )
    output = llm.generate(PROMPTS[0], use_tqdm=False)[0].outputs[0]
    assert len(output.token_ids) <= 7
    assert llm.engine.scheduler._eos == {1, 300}


def test_damaged_generation_config(folder, tmp_path):
    shutil.copytree(folder, tmp_path / "m")
    for damage in ("{", '{"temperature": -1}', "[]"):
        (tmp_path / "m" / "generation_config.json").write_text(damage)
        with pytest.raises(CheckpointError, match="generation_config.json"):
            make(tmp_path / "m")


def test_prompts_in_every_form_give_the_same(llm, expected):
    ids = llm.tokenizer.encode(PROMPTS[0])
    forms = [PROMPTS[0], {"prompt": PROMPTS[0]}, {"prompt_token_ids": ids}, ids]
    assert ids_of(llm.generate(forms, GREEDY, use_tqdm=False)) == [expected[0]] * 4
    for form in forms:
        assert ids_of(llm.generate(form, GREEDY, use_tqdm=False)) == expected[:1]
    assert llm.generate([], GREEDY, use_tqdm=False) == []
    outputs = llm.generate(PROMPTS, [SamplingParams(max_tokens=i + 1, ignore_eos=True) for i in range(4)])
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4]


def test_token_ids_may_be_arrays_or_tensors(llm, expected):
    ids, few = llm.tokenizer.encode(PROMPTS[0]), SamplingParams(temperature=0, max_tokens=2)
    array, tensor = np.array(ids, np.int32), torch.tensor(ids)
    forms = [array, tensor, [*array], [*tensor], {"prompt_token_ids": array}, {"prompt_token_ids": tensor}]
    outputs = llm.generate(forms, few, use_tqdm=False)
    outputs += [llm.generate(one, few, use_tqdm=False)[0] for one in forms[:4]]
    outputs += llm.generate(np.array([ids, ids]), few, use_tqdm=False)
    for output in outputs:
        assert output.outputs[0].token_ids == expected[0][:2] and output.prompt_token_ids == ids
        assert all(type(id) is int for id in output.prompt_token_ids)
    torch.testing.assert_close(llm.score([array, tensor]), llm.score([ids, ids]))
    for wrong in (np.array([0.5, 1.5]), torch.ones(3), np.array([True, False]), np.zeros((2, 2, 2), int)):
        with pytest.raises(ConfigError, match="prompt: expected a list of token ids, got"):
            llm.generate([wrong], few, use_tqdm=False)


def test_outputs_have_vllms_members(llm):
    before = time.time()
    output = llm.generate(PROMPTS[0], SamplingParams(n=2, max_tokens=3, ignore_eos=True), use_tqdm=False)[0]
    metrics = output.metrics
    times = [before, metrics.arrival_time, metrics.first_token_time, metrics.last_token_time]
    times += [metrics.finished_time, time.time()]
    assert times == sorted(times) and output.finished
    assert [completion.finished() for completion in output.outputs] == [True, True]
    params = SamplingParams(stop=["a"], logit_bias={5: 1.0}, structured_outputs={"choice": ["a"]})
    copy = params.clone()
    assert copy == params and copy is not params and copy.logit_bias is not params.logit_bias
    copy.max_tokens = 99
    assert params.max_tokens == 16


def test_chat(llm, expected):
    messages = [{"role": "user", "content": "the dog"}]
    rendered = "<|user|>the dog</s>"
    output = llm.chat(messages, GREEDY, use_tqdm=False)[0]
    assert output.prompt == rendered
    assert output.prompt_token_ids == llm.tokenizer.encode(rendered)
    parts = [{"type": "text", "text": "the"}, {"type": "text", "text": "dog"}]
    joined = llm.chat([{"role": "user", "content": parts}, {"role": "user", "content": None}], use_tqdm=False)
    assert joined[0].prompt == "<|user|>the\ndog<|user|></s>"
    for content in ([{"type": "image_url", "image_url": "x"}], 5):
        with pytest.raises(ConfigError, match=r"messages\.0\.content.*: expected .*text.*, got"):
            llm.chat([{"role": "user", "content": content}])
    two = llm.chat([messages, messages], GREEDY, use_tqdm=False)
    assert ids_of(two) == [output.outputs[0].token_ids] * 2


def test_refusals_leave_the_engine_clean(llm, folder, expected, tmp_path):
    with pytest.raises(ConfigError, match="expected at most 511 tokens .*, got 600"):
        llm.generate([PROMPTS[0], [5] * 600], GREEDY, use_tqdm=False)
    assert not llm.engine.has_work
    for prompt, message in (
        ([5, 420], "expected token ids of 0 to 419, .*, got 420"),
        ([5, -1], "expected token ids .*, got -1"),
        ({"promt": "x"}, "'promt'; did you mean 'prompt'"),
        ([0.5, 1.5], "expected a list of token ids"),
        ([1, [2, 3]], "expected a list of token ids"),
        ({"prompt_token_ids": None}, "expected text, token ids or a dictionary, got NoneType"),
        ({"prompt": "x", "cache_salt": ["a"]}, r"cache_salt: expected text, not empty, got \['a'\]"),
        ({"prompt": "x", "cache_salt": ""}, "cache_salt: expected text, not empty, got ''"),
        ("a\ud800", "expected text without lone surrogates"),
        ("", "expected at least one token"),
    ):
        with pytest.raises(ConfigError, match=message):
            llm.generate([prompt], GREEDY, use_tqdm=False)
    for priority, message in (
        ("a", "expected an integer, got 'a'"),
        (5, "set scheduling_policy to 'priority'"),
    ):
        with pytest.raises(ConfigError, match=f"priority: .*{message}"):
            llm.generate(PROMPTS[:1], GREEDY, priority=[priority])
    with pytest.raises(ConfigError, match="sampling_params: expected .*got 3 for 2"):
        llm.generate(PROMPTS[:2], [GREEDY] * 3)
    for prompts in (iter(PROMPTS), set(PROMPTS), None, 5, b"text"):
        with pytest.raises(ConfigError, match=f"prompts: expected text.*, got {type(prompts).__name__}"):
            llm.generate(prompts, GREEDY)
    for params in ({"temperature": 0}, [GREEDY, None], iter([GREEDY] * 2)):
        with pytest.raises(ConfigError, match=f"sampling_params: expected .*, got {type(params).__name__}"):
            llm.generate(PROMPTS[:2], params)
    with pytest.raises(ConfigError, match="stop_token_ids: expected token ids of 0 to 419, .*, got 420"):
        llm.generate(PROMPTS[:1], SamplingParams(stop_token_ids=[420]))
    with pytest.raises(ConfigError, match="unknown setting 'max_modle_len'; did you mean 'max_model_len'"):
        make(folder, max_modle_len=5)
    with pytest.raises(UnsupportedError, match="LLM: pipeline_parallel_size: qrt runs on the GPUs"):
        make(folder, pipeline_parallel_size=2)
    for wrong in (None, "hi", {"role": "user", "content": "hi"}):
        with pytest.raises(
            ConfigError, match=f"messages: expected a list such as .*, got {type(wrong).__name__}"
        ):
            llm.chat(wrong)
    with pytest.raises(ConfigError, match="max_model_len: expected at most the model's 512, got 513"):
        make(folder, max_model_len=513)
    for device in ("", "gpu", {}, "cuda:99"):
        with pytest.raises(ConfigError, match=f"device: expected c.*, got {device!r}"):
            LLM(str(folder), device=device)
    with pytest.raises(UnsupportedError, match="unknown KV format 'int5'"):
        make(folder, kv="int5")
    with pytest.raises(CheckpointError, match="org/name: no such folder here, .*hf download"):
        LLM("org/name")
    with pytest.raises(CheckpointError, match="no config.json"):  # not that the tokenizer is missing
        LLM(str(tmp_path))
    assert ids_of(llm.generate(PROMPTS[0], GREEDY, use_tqdm=False)) == expected[:1]


def test_an_error_in_a_step_is_named(folder, monkeypatch):
    llm = make(folder)

    def fail(*_):
        raise RuntimeError("device lost")

    monkeypatch.setattr(llm.engine.model, "hidden", fail)
    with pytest.raises(QrtError, match="RuntimeError: device lost"):
        llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    monkeypatch.undo()
    assert not llm.engine.has_work and len(llm.generate(PROMPTS, GREEDY, use_tqdm=False)) == 4


def test_calls_of_several_threads_run_one_after_the_other(llm, expected):
    def ids(_):
        return ids_of(llm.generate(PROMPTS, GREEDY, use_tqdm=False))

    with ThreadPoolExecutor(4) as threads:
        assert list(threads.map(ids, range(8))) == [expected] * 8


@contextmanager
def interrupted(after: int):
    """Ctrl-C at that line of qrt's own code; gives a list that counts them."""
    counted = [0]

    def line(frame, event, argument):
        counted[0] += event == "line"
        if event == "line" and counted[0] == after:
            sys.settrace(None)
            raise KeyboardInterrupt
        return line

    def call(frame, event, argument):
        return line if frame.f_code.co_filename.startswith(SOURCE) else None

    sys.settrace(call)
    try:
        yield counted
    finally:
        sys.settrace(None)


@pytest.mark.parametrize("interrupts", INTERRUPTS)
@pytest.mark.parametrize("way", ["one by one", "overlapped", "padded"])
def test_an_interrupt_anywhere_leaves_the_engine_whole(folder, expected, way, interrupts):
    llm = make(folder, overlap=way != "one by one", max_num_seqs=2, max_num_batched_tokens=40)
    if way == "padded":
        runner = llm.engine.runner
        runner.token_steps = TokenSteps(runner.model, runner.kv, runner.table, [2])
    params = replace(GREEDY, max_tokens=8)
    short = [tokens[:8] for tokens in expected]
    with interrupted(0) as lines:
        llm.generate(PROMPTS, params, use_tqdm=False)
    for after in np.random.default_rng(len(way)).integers(1, lines[0], interrupts).tolist():
        llm.engine.reset_prefix_cache()  # as many lines as at first
        with pytest.raises(KeyboardInterrupt), interrupted(after):
            llm.generate(PROMPTS, params, use_tqdm=False)
        assert not llm.engine.has_work, after
        assert ids_of(llm.generate(PROMPTS, params, use_tqdm=False)) == short, after
        llm.engine.scheduler.kv.check()


def test_banned_tokens_are_never_sampled(llm):
    """A penalty that grows beyond fp32 gives back no token that min_tokens bans; where nothing may be drawn
    the request is refused."""
    for temperature in (0, 1):
        params = SamplingParams(
            temperature=temperature, max_tokens=160, min_tokens=150, exponential_decay_length_penalty=(0, 2.0)
        )
        ids = llm.generate("x", params, use_tqdm=False)[0].outputs[0].token_ids
        assert len(ids) == 151 and ids[-1] in (1, 300) and not {1, 300} & set(ids[:-1])
        assert len(set(ids)) > 1
    for settings in ({"min_tokens": 4}, {"bad_words": [(1,)]}, {"bad_words": [(1, 1)], "ignore_eos": True}):
        with pytest.raises(ConfigError, match=r"allowed_token_ids: .* leave none of \[1\]"):
            llm.generate("x", SamplingParams(allowed_token_ids=[1], **settings))
    llm.generate("x", SamplingParams(allowed_token_ids=[1], min_tokens=4, ignore_eos=True), use_tqdm=False)


def test_properties_of_the_model(folder, llm, capfd):
    assert (llm.max_model_len, llm.weight_scheme, llm.dtype) == (512, "fp16", "float32")
    assert llm.kv_bytes_per_token == 2 * 2 * 2 * 64 * 4
    quantized = make(folder, kv_cache_dtype="int8")
    assert quantized.kv_bytes_per_token == 2 * 2 * 2 * (64 + 2 * 2)
    assert make(folder, kv="bf16").kv_bytes_per_token == llm.kv_bytes_per_token
