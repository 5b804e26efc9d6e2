"""Chat in the terminal; an empty line or Ctrl-D ends it.

    python examples/chat.py
    python examples/chat.py --model Qwen/Qwen3-8B --kv int8

The whole conversation is sent each time. What was said before comes from the prefix cache.
"""

import argparse
import asyncio

from qrt import AsyncLLM, SamplingParams


async def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="tiny", help="a folder, ORG/NAME of the Hub, or tiny")
    parser.add_argument("--kv", default="int8", help="KV format: auto, int8, int4 or k8v4")
    parser.add_argument("--max-tokens", type=int, default=128)
    arguments = parser.parse_args()

    llm = AsyncLLM(arguments.model, kv=arguments.kv)
    params = SamplingParams(temperature=0.7, top_p=0.9, seed=7, max_tokens=arguments.max_tokens)
    messages = []
    while question := await asyncio.to_thread(read, "you: "):
        messages.append({"role": "user", "content": question})
        prompt = llm.get_tokenizer().apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
        print("model: ", end="")
        answer = ""
        async for output in llm.generate({"prompt": prompt}, params):
            print(output.outputs[0].text[len(answer) :], end="", flush=True)
            answer = output.outputs[0].text
        print()
        messages.append({"role": "assistant", "content": answer})
    await llm.shutdown()


def read(prompt: str) -> str:
    """Return a line of input, empty at its end."""
    try:
        return input(prompt).strip()
    except EOFError:
        return ""


if __name__ == "__main__":
    asyncio.run(main())
