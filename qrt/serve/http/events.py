"""Write JSON bodies and server-sent events as bytes."""

from __future__ import annotations

from typing import Any

import msgspec

# Unicode's line ends. JSON does not escape them, and some clients split events there.
LINE_ENDS = {character.encode(): b"\\u%04x" % ord(character) for character in "\u0085\u2028\u2029"}

encode = msgspec.json.Encoder().encode


def event(data: Any) -> bytes:
    """Write one server-sent event in one line, also for clients that split at Unicode's line ends."""
    line = encode(data)
    for end, escaped in LINE_ENDS.items():
        line = line.replace(end, escaped)
    return b"data: %b\n\n" % line
