"""Compare answers to chats at temperature 0 with a baseline's, per model and KV format: `qrt-eval answers`.

A divergence says how far distributions move. This says how many answers a user would see change, and where.
The baseline answers every conversation, rendered by the chat template; then each model answers in each KV
format. Only the first token that differs counts, because what follows continues another text. A difference is
a near tie if the baseline's two likeliest tokens are less than --near-tie apart there: any rounding decides
between such tokens. Near ties and changed answers are counted separately.

On a GPU, products of other batch sizes sum in another order. To see how many answers that alone changes, put
the baseline's own format into --kv too.
"""

from __future__ import annotations

import statistics
import time
from argparse import Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from rich.table import Table

from qrt.answers.output import CompletionOutput
from qrt.errors import ConfigError
from qrt.offline.llm import LLM
from qrt.request.sampling import SamplingParams
from qrt.text.tokenizer import Tokenizer
from qrt_eval.inputs.preflight import shared_context
from qrt_eval.inputs.prompts import CONVERSATIONS, Conversation, read_conversations
from qrt_eval.quality.kld import release
from qrt_eval.quality.ppl import check_finite, same_tokenizer
from qrt_eval.results.console import show
from qrt_eval.results.record import model_facts, save, sha256_of

SHOWN_TOKENS = 16  # printed of each answer before and after the first difference


@dataclass(frozen=True)
class Difference:
    """Hold where an answer leaves the baseline's.

    conversation   index in the file
    question       the user's last message
    token          index of the first token that differs
    gap            how much likelier the baseline's first choice is there than its second, in nats
    near_tie       whether the gap is smaller than --near-tie
    context        the end of what both have written before
    base, other    how each continues
    """

    conversation: int
    question: str
    token: int
    gap: float
    near_tie: bool
    context: str
    base: str
    other: str


def run(arguments: Namespace) -> None:
    """Run `qrt-eval answers`: the baseline's answers, then those of each model in each KV format."""
    path = arguments.prompts or str(CONVERSATIONS)
    conversations = read_conversations("--prompts", path)[: arguments.limit]
    name = arguments.baseline or arguments.model[0]
    prompts = written(name, conversations, arguments.max_tokens, shared_context(arguments))
    longest = max(map(len, prompts)) + arguments.max_tokens
    llm = answerer(name, arguments.baseline_kv, arguments.dtype, longest)
    base_facts, base = model_facts(llm), answer(llm, prompts, arguments.max_tokens)
    del llm
    release()
    runs = []
    for model in arguments.model:
        for kv in arguments.kv:
            llm = answerer(model, kv, arguments.dtype, longest)
            facts = model_facts(llm)
            if not same_tokenizer(facts, base_facts):
                raise ConfigError(
                    f"{facts['model']}: expected the tokenizer of {base_facts['model']}, got another; give "
                    "models made from the same one"
                )
            started = time.perf_counter()
            other = answer(llm, prompts, arguments.max_tokens)
            seconds = round(time.perf_counter() - started, 3)
            found = differences(llm.tokenizer, conversations, base, other, arguments.near_tie)
            runs.append(
                {**facts, **figures(base, found), "seconds": seconds, "differences": list(map(asdict, found))}
            )
            del llm
            release()
    about = {
        "prompts": Path(path).name,
        "prompts_sha256": sha256_of(path),
        "max_tokens": arguments.max_tokens,
    }
    save(arguments, {**about, "near_tie": arguments.near_tie, "baseline": base_facts, "runs": runs})
    print_tables(base_facts, arguments.near_tie, runs)


def written(
    model: str, conversations: Sequence[Conversation], max_tokens: int, context: int
) -> list[list[int]]:
    """Return the token ids of every conversation, ready to be answered; ConfigError if one does not fit."""
    tokenizer = Tokenizer(model)
    prompts = [tokenizer.encode_chat(messages, add_generation_prompt=True) for messages in conversations]
    most = context - max_tokens
    for index, prompt in enumerate(prompts):
        if len(prompt) > most:
            raise ConfigError(
                f"--prompts: conversation {index + 1}: expected at most {most} tokens, the context without "
                f"--max-tokens {max_tokens}, got {len(prompt)}; leave it out or lower --max-tokens"
            )
    return prompts


def answerer(model: str, kv: str, dtype: str, longest: int) -> LLM:
    """Load a model for requests of up to `longest` tokens; on a CPU in float32 unless asked otherwise."""
    if dtype == "auto" and not torch.cuda.is_available():
        dtype = "float32"
    return LLM(model, kv=kv, dtype=dtype, max_model_len=longest, enable_prefix_caching=False)


def answer(llm: LLM, prompts: Sequence[list[int]], max_tokens: int) -> list[CompletionOutput]:
    """Answer every prompt greedily, with the two likeliest tokens at each place."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens, logprobs=2)
    outputs = [output.outputs[0] for output in llm.generate(list(prompts), params)]
    check_finite(llm, torch.tensor([output.cumulative_logprob for output in outputs]))
    return outputs


def differences(
    tokenizer: Tokenizer,
    conversations: Sequence[Conversation],
    base: Sequence[CompletionOutput],
    other: Sequence[CompletionOutput],
    near_tie: float,
) -> list[Difference]:
    """Return where answers differ, in the order of the conversations; equal ones are left out."""
    found = []
    for index, (messages, one, two) in enumerate(zip(conversations, base, other, strict=True)):
        token = first_difference(one.token_ids, two.token_ids)
        if token is None:
            continue
        assert one.logprobs is not None
        first, second = sorted((entry.logprob for entry in one.logprobs[token].values()), reverse=True)[:2]
        places = slice(max(0, token - SHOWN_TOKENS), token), slice(token, token + SHOWN_TOKENS)
        parts = (one.token_ids[places[0]], one.token_ids[places[1]], two.token_ids[places[1]])
        texts = [tokenizer.decode(part, skip_special_tokens=False) for part in parts]
        question, gap = str(messages[-1]["content"]), first - second
        found.append(Difference(index, question, token, gap, gap < near_tie, *texts))
    return found


def first_difference(one: Sequence[int], other: Sequence[int]) -> int | None:
    """Return the index of the first token in which two answers differ; None if they are equal.

    Answers end with end-of-text or at the same length limit, so neither can be the beginning of the other.
    """
    return next((i for i, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), None)


def figures(base: Sequence[CompletionOutput], found: Sequence[Difference]) -> dict[str, Any]:
    """Return the counts of one model.

    answers, tokens   how many the baseline has
    same, near_ties, changed   answers of each kind; together they are all answers
    same_tokens       share of the baseline's tokens that come before the first difference in their answer
    first, median     index of the first token that differs: the smallest and the median of changed answers
    """
    changed = [difference.token for difference in found if not difference.near_tie]
    lengths = [len(output.token_ids) for output in base]
    lost = sum(lengths[difference.conversation] - difference.token for difference in found)
    return {
        "answers": len(base),
        "tokens": sum(lengths),
        "same": len(base) - len(found),
        "near_ties": len(found) - len(changed),
        "changed": len(changed),
        "same_tokens": 1 - lost / sum(lengths),
        "first": min(changed, default=None),
        "median": statistics.median(changed) if changed else None,
    }


def print_tables(base: dict[str, Any], near_tie: float, runs: Sequence[dict[str, Any]]) -> None:
    """Print a row per model and KV format, then each one's differences."""
    title = (
        f"{runs[0]['answers']} answers of {runs[0]['tokens']:,} tokens at temperature 0, against "
        f"{base['model']} (KV {base['kv']}); near ties: its two likeliest tokens within {near_tie:g} nats"
    )
    table = Table(title=title, title_justify="left")
    for name in ("model", "weights", "KV"):
        table.add_column(name)
    for name in ("same", "near ties", "changed", "changed at token", "tokens before"):
        table.add_column(name, justify="right")
    for result in runs:
        names = [str(result[name]) for name in ("model", "weights", "kv")]
        counts = [str(result[name]) for name in ("same", "near_ties", "changed")]
        table.add_row(*names, *counts, place(result), f"{100 * result['same_tokens']:.0f} %")
    show(table)
    for result in runs:
        if result["differences"]:
            print_differences(result)


def place(result: dict[str, Any]) -> str:
    """Return the median token at which changed answers differ first, and the smallest; "" if none changed."""
    return f"{result['median']:g} (from {result['first']})" if result["changed"] else ""


def print_differences(result: dict[str, Any]) -> None:
    """Print where the answers of one model leave the baseline's."""
    table = Table(title=f"answers that differ: {result['model']}, KV {result['kv']}", title_justify="left")
    for name, justify in (("question", "left"), ("token", "right"), ("gap", "right")):
        table.add_column(name, justify=justify)  # type: ignore[arg-type]
    for name in ("after", "baseline", "answer"):
        table.add_column(name)
    for row in result["differences"]:
        gap = f"{row['gap']:.3f}" + (" (near tie)" if row["near_tie"] else "")
        texts = [repr(row[name]) for name in ("context", "base", "other")]
        table.add_row(row["question"][:40], str(row["token"]), gap, *texts)
    show(table)
