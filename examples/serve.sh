#!/usr/bin/env bash
# Serve a model over an OpenAI-compatible API, then ask it with examples/client.py from another terminal.
#   examples/serve.sh
#   MODEL=Qwen3-8B-w4 KV=int4 PORT=8000 examples/serve.sh
set -euo pipefail
exec qrt-serve --model "${MODEL:-tiny}" --kv "${KV:-int8}" --port "${PORT:-8000}" "$@"
