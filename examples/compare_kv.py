"""Show what each KV format costs: memory, likelihood of a text, and where an answer changes.

    python examples/compare_kv.py
    python examples/compare_kv.py --model Qwen/Qwen3-8B --text README.md

On a CPU a model that is not quantized runs in fp32, and so fp16 keeps K and V in 4 bytes there. qrt-eval kld
and qrt-eval answers measure the same on more text.
"""

import argparse
from pathlib import Path

from qrt import LLM, SamplingParams

FORMATS = ("fp16", "int8", "k8v4", "int4")
TEXT = Path(__file__).parents[1] / "docs" / "kv-cache.md"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="a folder, ORG/NAME of the Hub, or tiny")
    parser.add_argument("--text", type=Path, default=TEXT, help="its first tokens are scored")
    parser.add_argument("--tokens", type=int, default=512, help="of the text")
    parser.add_argument("--prompt", default="The government said that")
    parser.add_argument("--max-tokens", type=int, default=48)
    arguments = parser.parse_args()

    params = SamplingParams(temperature=0, max_tokens=arguments.max_tokens)
    baseline = None
    print(f"{'KV':6} {'bytes/token':>12} {'nats/token':>11} {'answer as in fp16':>18}")
    for kv in FORMATS:
        # attend_cache: every K and V is read back from the cache, so that the whole loss is seen
        llm = LLM(arguments.model, kv=kv, attend_cache=True, enable_prefix_caching=False)
        ids = llm.get_tokenizer()(arguments.text.read_text(encoding="utf-8")).input_ids[: arguments.tokens]
        nats = -llm.score([ids])[0].mean().item()
        answer = llm.generate(arguments.prompt, params, use_tqdm=False)[0].outputs[0].token_ids
        baseline = baseline or answer
        pairs = enumerate(zip(answer, baseline, strict=False))
        same = next((at for at, (own, theirs) in pairs if own != theirs), len(answer))
        agrees = f"first {same} of {len(answer)}"
        print(f"{kv:6} {llm.kv_bytes_per_token:12,} {nats:11.4f} {agrees:>18}")


if __name__ == "__main__":
    main()
