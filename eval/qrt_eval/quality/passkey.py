"""Hide a five-digit key in a long text and ask for it at the end, in each KV format: `qrt-eval passkey`.

After "Landmark Attention" (arXiv:2305.16300). It works with any model, because it reports how the model ranks
the true key as well as what the model writes:

    retrieved   share of trials in which greedy decoding writes the key; by chance 0
    chosen      share of trials in which the key is likelier than each of nine others; by chance 0.1
    logprob     mean log-probability of the key in nats; by chance about -11.5
"""

from __future__ import annotations

import random
from argparse import Namespace
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from rich.table import Table
from tqdm import tqdm

from qrt.errors import ConfigError
from qrt.model_files.location import model_name
from qrt.offline.llm import LLM
from qrt.request.sampling import SamplingParams
from qrt_eval.quality.kld import release
from qrt_eval.quality.ppl import check_finite, scorer
from qrt_eval.results.console import show
from qrt_eval.results.record import model_facts, save

TASK = "There is an important number hidden in a lot of irrelevant text. Find it and remember it.\n"
FILLER = "The grass is green. The sky is blue. The sun is yellow. Here we go. There and back again.\n"
NEEDLE = "The pass key is {key}. Remember it. {key} is the pass key.\n"
QUESTION = "What is the pass key? The pass key is"
OTHERS = 9
SHORTEST = 512
ANSWER_TOKENS = 16  # enough for the key in any tokenizer


@dataclass(frozen=True)
class PasskeyTrial:
    """Hold one prompt and the ids of the keys that may follow it, the true one first."""

    prompt: list[int]
    keys: list[list[int]]
    key: str


def run(arguments: Namespace) -> None:
    """Run `qrt-eval passkey`: measure every KV format, length and depth; write the JSON, print a table."""
    cells: list[dict[str, Any]] = []
    facts: dict[str, Any] = {}
    for kv in arguments.kv:
        llm = scorer(arguments.model, kv, arguments.dtype)
        facts = facts or model_facts(llm)
        lengths = arguments.context or default_lengths(llm.max_model_len)
        places = [(length, depth) for length in lengths for depth in arguments.depth]
        for length, depth in tqdm(places, unit="place", desc=f"Passkey, KV {kv}"):
            cells.append({"kv": kv, **measure(llm, length, depth, arguments.trials, arguments.seed)})
        del llm
        release()
    save(arguments, {**facts, "cells": cells})
    print_table(model_name(arguments.model), cells)


def default_lengths(longest: int) -> list[int]:
    """Return the lengths from SHORTEST on, doubled each time, and the model's context last."""
    lengths = [SHORTEST << i for i in range(32) if SHORTEST << i < longest]
    return [*lengths, longest]


def measure(llm: LLM, length: int, depth: float, trials: int, seed: int) -> dict[str, Any]:
    """Return one cell: `trials` keys at `depth` of a context of `length` tokens, the answer included."""
    chosen = list(make_trials(llm, length, depth, trials, seed))
    params = SamplingParams(temperature=0, max_tokens=ANSWER_TOKENS)
    outputs = llm.generate([{"prompt_token_ids": trial.prompt} for trial in chosen], params, use_tqdm=False)
    written = [o.outputs[0].text.strip().startswith(t.key) for o, t in zip(outputs, chosen, strict=True)]
    ids = [trial.prompt + key for trial in chosen for key in trial.keys]
    found = llm.score(ids)
    check_finite(llm, torch.cat(found))
    scores = iter(found)
    first, won = [], []
    for trial in chosen:
        logprobs = [float(next(scores)[len(trial.prompt) - 1 :].sum()) for _ in trial.keys]
        first.append(logprobs[0])
        won.append(logprobs[0] > max(logprobs[1:]))
    return {
        "context_tokens": length,
        "depth": depth,
        "trials": trials,
        "retrieved": sum(written) / trials,
        "chosen": sum(won) / trials,
        "logprob": sum(first) / trials,
    }


def make_trials(llm: LLM, length: int, depth: float, trials: int, seed: int) -> Iterator[PasskeyTrial]:
    """Yield prompts of exactly length - ANSWER_TOKENS tokens: task, filler with a needle in it, question."""
    tokenizer = llm.tokenizer

    def encode(text: str) -> list[int]:
        return tokenizer.encode(text, add_special_tokens=False)

    head, filler, question = tokenizer.encode(TASK), encode(FILLER), encode(QUESTION)
    for trial in range(trials):
        keys = random.Random(f"{seed} {length} {depth} {trial}").sample(range(10000, 100000), OTHERS + 1)
        needle = encode("\n" + NEEDLE.format(key=keys[0]))
        room = length - ANSWER_TOKENS - len(head) - len(needle) - len(question)
        if length > llm.max_model_len or room < len(filler):
            least = length - room + len(filler)
            raise ConfigError(
                f"--context: expected {least} to {llm.max_model_len} (the model's context), got {length}"
            )
        text = (filler * (room // len(filler) + 1))[:room]
        at = round(depth * room)
        prompt = head + text[:at] + needle + text[at:] + question
        yield PasskeyTrial(prompt, [encode(f" {key}") for key in keys], str(keys[0]))


def print_table(model: str, cells: list[dict[str, Any]]) -> None:
    """Print a row per KV format and length, with means over the depths."""
    table = Table(
        title=f"{model}: passkey, means over {len({c['depth'] for c in cells})} depths", title_justify="left"
    )
    for name in ("KV", "context", "retrieved", "chosen of ten", "log p of the key"):
        table.add_column(name, justify="left" if name == "KV" else "right")
    for kv, length in dict.fromkeys((cell["kv"], cell["context_tokens"]) for cell in cells):
        some = [cell for cell in cells if (cell["kv"], cell["context_tokens"]) == (kv, length)]
        means = {
            key: sum(cell[key] for cell in some) / len(some) for key in ("retrieved", "chosen", "logprob")
        }
        shares = (f"{100 * means[key]:.0f} %" for key in ("retrieved", "chosen"))
        table.add_row(kv, f"{length:,}", *shares, f"{means['logprob']:.3f}")
    show(table)
