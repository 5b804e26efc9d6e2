"""Ask a running server (examples/serve.sh) with OpenAI's client, streaming.

pip install openai
python examples/client.py "Tell me about trees."
"""

import argparse

from openai import OpenAI


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("question", nargs="?", default="Tell me about trees.")
    parser.add_argument("--base-url", default="http://127.0.0.1:8000/v1")
    parser.add_argument("--api-key", default="none", help="needed where the server has keys")
    parser.add_argument("--max-tokens", type=int, default=64)
    arguments = parser.parse_args()

    client = OpenAI(base_url=arguments.base_url, api_key=arguments.api_key)
    stream = client.chat.completions.create(
        model=client.models.list().data[0].id,
        messages=[{"role": "user", "content": arguments.question}],
        max_tokens=arguments.max_tokens,
        temperature=0,
        stream=True,
    )
    for chunk in stream:
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
    print()


if __name__ == "__main__":
    main()
