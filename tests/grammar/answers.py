"""Answers of `tiny` in real schemas: `python answers.py FOLDER COUNT TEMPERATURE SEED [SEED ...]`.

FOLDER has the files of MaskBench, as `qrt-eval grammar` reads them. Each seed picks COUNT schemas among those
with instances and is the seed of their answers. Prints what became of them as JSON: an answer that stops is
valid or not, as `jsonschema` says, formats included; the others are cut by their length.
"""

from __future__ import annotations

import json
import sys
import time
from collections import Counter
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np

from qrt import LLM, SamplingParams
from qrt.answers.output import CompletionOutput
from qrt.errors import QrtError

PROMPT = "JSON: "
MOST_TOKENS = 1024  # of an answer: what goes on for longer rarely ends


def main(folder: str, count: str, temperature: str, *seeds: str) -> None:
    """Print one JSON object, with a line for each seed."""
    files = [json.loads(file.read_text()) for file in sorted(Path(folder).glob("*.json"))]
    schemas = [file["schema"] for file in files if file.get("tests")]
    llm = LLM("tiny", dtype="float32", max_num_seqs=64)
    for seed in map(int, seeds):
        picked = np.random.default_rng(seed).choice(len(schemas), int(count), replace=False)
        facts = {"temperature": float(temperature), "seed": seed, "schemas": int(count)}
        print(
            json.dumps(facts | answers(llm, [schemas[i] for i in picked], float(temperature), seed)),
            flush=True,
        )


def answers(llm: LLM, schemas: list[Any], temperature: float, seed: int) -> dict[str, Any]:
    """Return how many schemas are refused, and what became of the answers to the others."""
    start, found = time.monotonic(), Counter[str]()
    taken = []
    for schema in schemas:
        shape = {"json": json.dumps(schema, ensure_ascii=False)}
        try:
            llm.generate(PROMPT, SamplingParams(max_tokens=1, structured_outputs=shape), use_tqdm=False)
        except QrtError:
            found["refused"] += 1
            continue
        params = SamplingParams(
            max_tokens=MOST_TOKENS, temperature=temperature, seed=seed, structured_outputs=shape
        )
        taken.append((schema, params))
    completions = completed(llm, [params for _, params in taken])
    for (schema, _), completion in zip(taken, completions, strict=True):
        what = "failed" if completion is None else completion.finish_reason
        if completion is not None and what == "stop":
            wrong = fault(schema, completion.text)
            what = "invalid" if wrong else "valid"
            if wrong:
                print(f"{wrong}\n{json.dumps(schema)}\n{completion.text}\n", file=sys.stderr, flush=True)
        found[what] += 1
    tokens = sum(len(each.token_ids) for each in completions if each is not None)
    return dict(found) | {"tokens": tokens, "seconds": round(time.monotonic() - start)}


def completed(llm: LLM, params: list[SamplingParams]) -> list[CompletionOutput | None]:
    """Return an answer for each; None where the engine ends the request with an error."""
    try:
        return [each.outputs[0] for each in llm.generate([PROMPT] * len(params), params, use_tqdm=False)]
    except QrtError as error:
        if len(params) == 1:
            print(f"failed: {error}", file=sys.stderr, flush=True)
            return [None]
        half = len(params) // 2
        return completed(llm, params[:half]) + completed(llm, params[half:])


def fault(schema: Any, text: str) -> str | None:
    """Return what `jsonschema` says against an answer; None: it is valid."""
    kind = jsonschema.validators.validator_for(schema, jsonschema.Draft202012Validator)
    try:
        kind(schema, format_checker=kind.FORMAT_CHECKER).validate(json.loads(text))
    except (jsonschema.ValidationError, ValueError) as error:
        return f"{type(error).__name__}: {error}"[:500]
    return None


if __name__ == "__main__":
    main(*sys.argv[1:])
