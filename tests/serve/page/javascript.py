"""The page's scripts without a browser, in V8: `Scripts("markdown.js").call("parseMarkdown", text)`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from py_mini_racer import MiniRacer

PAGE = Path(__file__).parents[3] / "qrt/serve/page"
SECONDS = 20.0  # time limit of a call


class Scripts:
    """Files of the page, loaded in this order into their own context; `more` is the test's JavaScript."""

    def __init__(self, *files: str, more: str = "") -> None:
        self._context = MiniRacer()
        for text in (*[(PAGE / file).read_text() for file in files], more):
            self._context.eval(text)

    def call(self, function: str, *arguments: Any) -> Any:
        """Call a function and return its result through JSON; an async function is awaited."""
        text = self._context.eval(
            f"(async () => JSON.stringify((await {function}(...{json.dumps(arguments)})) ?? null))()",
            timeout_sec=SECONDS,
        ).get(timeout=SECONDS)
        return json.loads(text)
