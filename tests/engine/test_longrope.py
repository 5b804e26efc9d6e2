"""LongRoPE by request, beside transformers: below the original context, beyond it, and across it.

transformers turns a sequence by its length at each forward, and drops its cache when that changes the table.
"""

import numpy as np
import pytest
import torch
from fake_decoder import run, tokens

from qrt import EngineConfig, SamplingParams
from qrt.engine.engine import Engine
from qrt.engine.step.graphs import TokenSteps
from zoo import make

SHORT = 24  # the original context of the model in the zoo
RANDOM = torch.Generator().manual_seed(5)
PREFIX = torch.randint(4, 512, (64,), generator=RANDOM).tolist()
# prompt and output lengths: within the original context, just within, across, just beyond, beyond
LENGTHS = {"below": (9, 8), "within": (20, 5), "across": (20, 12), "edge": (24, 6), "beyond": (40, 9)}


@pytest.fixture(scope="module")
def model(tmp_path_factory):
    folder = tmp_path_factory.mktemp("longrope")
    return make("phi3-longrope", folder), folder


@torch.inference_mode()
def truth(theirs, prompt, count):
    """Greedy tokens of transformers and their log-probabilities, each from a forward of the whole text."""
    ids, scores = list(prompt), []
    for _ in range(count):
        logits = theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        ids.append(int(logits.argmax()))
        scores.append(logits.log_softmax(-1)[ids[-1]])
    return ids[len(prompt) :], torch.stack(scores)


def check(engine, theirs, requests):
    """Run requests at once: name -> prompt, outputs."""
    for name, (prompt, count) in requests.items():
        params = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, logprobs=0)
        engine.add(name, prompt, params)
    deltas = run(engine)
    for name, (prompt, count) in requests.items():
        wanted, scores = truth(theirs, prompt, count)
        assert tokens(deltas[name]) == wanted, name
        got = np.concatenate([delta.logprobs.logprobs for delta in deltas[name]])
        torch.testing.assert_close(torch.from_numpy(got), scores, rtol=0, atol=1e-4)
    return deltas


def engine_of(folder, **settings):
    config = {"device": "cpu", "dtype": "float32", "kv_cache_memory_bytes": 4 << 20} | settings
    return Engine(EngineConfig(str(folder), **config))


@pytest.mark.parametrize(
    "settings",
    [{}, {"overlap": True, "max_num_batched_tokens": 7}, {"enable_prefix_caching": False, "max_num_seqs": 2}],
    ids=["plain", "overlap-chunks", "uncached"],
)
def test_requests_of_all_lengths_at_once(model, settings):
    theirs, folder = model
    requests = {name: (PREFIX[:length], count) for name, (length, count) in LENGTHS.items()}
    check(engine_of(folder, **settings), theirs, requests)


def test_padded_steps(model):
    """As on a GPU, where steps are recorded; most are padded."""
    theirs, folder = model
    engine = engine_of(folder, overlap=True)
    runner = engine.runner
    runner.token_steps = TokenSteps(runner.model, runner.kv, runner.table, [4, 8], [32, 200])
    requests = {name: (PREFIX[:length], count) for name, (length, count) in LENGTHS.items()}
    check(engine, theirs, requests)


def test_truth_is_what_transformers_generates(model):
    """Without a cache: transformers 5.17 drops it at the crossing, but then computes one token alone."""
    theirs, _ = model
    prompt = torch.tensor([PREFIX[:20]])
    made = theirs.generate(prompt, max_new_tokens=12, min_new_tokens=12, do_sample=False, use_cache=False)
    assert made[0, 20:].tolist() == truth(theirs, PREFIX[:20], 12)[0]


def test_cached_prefixes_are_of_one_table(model):
    """The same beginning is cached once for short and once for long requests."""
    theirs, folder = model
    engine = engine_of(folder)

    def cached(name, length, count=2):
        return check(engine, theirs, {name: (PREFIX[:length], count)})[name][-1].num_cached

    assert cached("short", 20) == 0
    assert cached("long", 40) == 0, "the short one's K are of another table"
    assert cached("short again", 23, 1) == 20 and cached("long again", 44) == 40
    assert cached("across", 22, 6) == 22 - 1
    beginning = check(engine, theirs, {"after": (PREFIX[:22], 6)})
    assert engine.scheduler.num_pauses == 0 and len(tokens(beginning["after"])) == 6


def test_prompts_are_scored_by_their_length(model):
    theirs, folder = model
    engine = engine_of(folder)
    for length in (SHORT, SHORT + 1):
        ids = PREFIX[:length]
        engine.add(str(length), ids, SamplingParams(prompt_logprobs=0), generate=False)
        (delta,) = run(engine)[str(length)]
        with torch.inference_mode():
            logits = theirs(input_ids=torch.tensor([ids]), use_cache=False).logits[0, :-1]
        wanted = logits.log_softmax(-1).gather(1, torch.tensor(ids[1:])[:, None])[:, 0]
        torch.testing.assert_close(torch.from_numpy(delta.prompt_scores.logprobs), wanted, rtol=0, atol=1e-4)


@pytest.mark.gpu
@pytest.mark.parametrize("eager", [True, False])
def test_on_a_gpu_recorded_or_not(model, eager):
    theirs, folder = model
    requests = {name: (PREFIX[:length], count) for name, (length, count) in LENGTHS.items()}
    settings = {"device": "cuda", "enforce_eager": eager, "cudagraph_capture_sizes": (1, 2, 4, 8)}
    check(engine_of(folder, **settings), theirs, requests)
