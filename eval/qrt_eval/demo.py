"""Show the main job on the bundled model, on any machine, in a few minutes: `make demo`.

It calibrates `tiny` to int4, compares bytes, perplexity and speed of bf16, int4, int4 + int8 KV and int4 +
int4 KV, and lets the quantized model write some text.
"""

from __future__ import annotations

import logging
import shutil
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from rich.table import Table

from qrt.cli import run_main
from qrt.offline.llm import LLM
from qrt.request.sampling import SamplingParams
from qrt_eval.inputs.text import load_text
from qrt_eval.quality.ppl import quick_perplexity, scorer
from qrt_eval.results.console import show

OUT = Path("demo-out")
VARIANTS = (
    ("bf16", "tiny", "fp16"),
    ("int4", str(OUT / "tiny-w4"), "fp16"),
    ("int4 + int8 KV", str(OUT / "tiny-w4"), "int8"),
    ("int4 + int4 KV", str(OUT / "tiny-w4"), "int4"),
)
SEQLEN, WINDOWS = 2048, 24  # 49,128 tokens: enough to rank the variants, a minute each on two cores
PROMPTS = ["The government said that", "In this chapter we will", "When the function is called,"] * 8
SAMPLE = SamplingParams(temperature=0.7, top_p=0.9, max_tokens=60, seed=7)


@dataclass(frozen=True)
class DemoRow:
    """Hold one variant's figures. Bytes are those of the running model; KV bytes are per token."""

    name: str
    weight_bytes: int
    kv_bytes_per_token: int
    ppl: float
    tokens_per_s: float


def main() -> int:
    """Run the demonstration; return the exit code."""
    logging.basicConfig(level=logging.WARNING)
    return run_main(demonstrate)


def demonstrate() -> None:
    """Calibrate, measure and print."""
    from qrt_calibrate.cli import main as calibrate

    if OUT.exists():
        shutil.rmtree(OUT)
    if calibrate(["--model", "tiny", "--bits", "4", "--out", VARIANTS[1][1]]):
        sys.exit(1)
    rows = [measure(*variant) for variant in VARIANTS]
    print_table(rows)
    write_sample()
    print(f"\nServe the int4 checkpoint with: qrt-serve --model {VARIANTS[1][1]} --kv int8")


def measure(name: str, model: str, kv: str) -> DemoRow:
    """Measure perplexity on pydoc with K/V read back from the cache, and the speed of generating in bf16."""
    ppl = quick_perplexity(scorer(model, kv), load_text("pydoc"), SEQLEN, WINDOWS).ppl
    llm = LLM(model, kv=kv, dtype="bfloat16")
    params = SamplingParams(temperature=0, max_tokens=64, ignore_eos=True)
    llm.generate(PROMPTS[:1], params, use_tqdm=False)  # the first call imports modules
    started = time.perf_counter()
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
    return DemoRow(
        name, llm.weight_bytes, llm.kv_bytes_per_token, ppl, tokens / (time.perf_counter() - started)
    )


def print_table(rows: list[DemoRow]) -> None:
    """Print all variants, with differences from the first."""
    table = Table(
        title="tiny: what quantization costs and saves (perplexity on the start of pydoc, protocol gptq)"
    )
    for column in ("", "weights MB", "KV bytes/token", "perplexity", "change", "tokens/s"):
        table.add_column(column, justify="right" if column else "left")
    for row in rows:
        change = "" if row is rows[0] else f"{100 * (row.ppl / rows[0].ppl - 1):+.2f} %"
        table.add_row(
            row.name,
            f"{row.weight_bytes / 1e6:.2f}",
            f"{row.kv_bytes_per_token:,}",
            f"{row.ppl:.3f}",
            change,
            f"{row.tokens_per_s:,.0f}",
        )
    show(table)


def write_sample() -> None:
    """Print a few sentences of the quantized model with quantized KV."""
    llm = LLM(VARIANTS[2][1], kv=VARIANTS[2][2])
    prompt = "The government said that"
    output = llm.generate([prompt], SAMPLE, use_tqdm=False)[0]
    print(f"\nint4 weights, int8 KV, temperature 0.7:\n  {prompt}{output.outputs[0].text}")


if __name__ == "__main__":
    sys.exit(main())
