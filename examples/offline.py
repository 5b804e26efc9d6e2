"""Complete some prompts in one call.

python examples/offline.py
python examples/offline.py --model Qwen/Qwen3-8B --kv int8
"""

import argparse

from qrt import LLM, SamplingParams

PROMPTS = ["The government said that", "In this chapter we will", "When the function is called,"]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="a folder, ORG/NAME of the Hub, or tiny")
    parser.add_argument("--kv", default="int8", help="KV format: auto, int8, int4 or k8v4")
    parser.add_argument("--max-tokens", type=int, default=32)
    arguments = parser.parse_args()

    llm = LLM(arguments.model, kv=arguments.kv)
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=7, max_tokens=arguments.max_tokens)
    for output in llm.generate(PROMPTS, params):
        print(f"{output.prompt}{output.outputs[0].text}\n")


if __name__ == "__main__":
    main()
