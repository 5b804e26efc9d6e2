"""Write JSON bodies and server-sent events as bytes."""

from __future__ import annotations

from typing import Any

import msgspec

# Unicode's line ends. JSON does not escape them, and some clients split events there.
LINE_ENDS = {character.encode(): b"\\u%04x" % ord(character) for character in "\u0085\u2028\u2029"}

encode = msgspec.json.Encoder(enc_hook=float).encode  # of the request's numbers that are a WrittenFloat


def event(data: Any, name: str | None = None) -> bytes:
    """Write one server-sent event; its data is one line, also where clients split at Unicode's line ends."""
    line = encode(data)
    for end, escaped in LINE_ENDS.items():
        line = line.replace(end, escaped)
    head = b"" if name is None else b"event: %b\n" % name.encode()
    return b"%bdata: %b\n\n" % (head, line)
