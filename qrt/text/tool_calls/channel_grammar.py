"""Write the grammar of an answer in channels (gpt-oss) whose calls fit the schemas of strict tools.

`ChannelStream` reads back all calls that such a grammar allows, and no others.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from qrt.errors import UnsupportedError
from qrt.grammar.marks import quoted
from qrt.text.tool_calls.grammar import Calls, RuleMarks, answer_rules, arguments, plain_name

MARKS = ("<|start|>", "<|channel|>", "<|message|>", "<|end|>")
ENDS = ("<|call|>", "<|return|>")  # end the whole answer


def channel_grammar(calls: Calls, special: Mapping[str, int]) -> str:
    """Return the rules of an answer: messages, of which the last one is a call or the final one.

    special    the id of each special token of the tokenizer

    The answer begins with a header, or behind a message of thinking. ConfigError for a function whose name no
    header holds, UnsupportedError for a tokenizer to which the marks are plain text.
    """
    marks = RuleMarks(special)
    if missing := [mark for mark in MARKS if mark not in marks]:
        raise UnsupportedError(
            f"tools: expected none with strict: true, as {missing[0]} is no token of this model; leave it out"
        )
    channel, message, next_one = marks("<|channel|>"), marks("<|message|>"), marks("<|start|>assistant")
    rules = [
        "%llguidance {}",
        f"start: ({next_one})? (other {marks('<|end|>')} {next_one})* (called | final)",
        f'other: {channel} ("analysis" | "commentary") {message} TEXT',
        f'final: {channel} "final" {message} ' + ("TEXT" if calls.answer is None else "answer"),
        *(answer_rules(calls.answer) if calls.answer else ()),
        f'kind: (" "? {marks("<|constrain|>")} "json" | " json")?',
        "called: " + " | ".join(f"function_{number}" for number in range(len(calls.functions))),
        # Text that spells a mark with ordinary tokens would be read as one.
        rf"TEXT: /(?s:.*)/ & ~/(?s:.*)({'|'.join(map(re.escape, (*MARKS, *ENDS)))})(?s:.*)/",
    ]
    for number, function in enumerate(calls.functions):
        to = quoted(f" to=functions.{plain_name(function)}")
        headers = f'({channel} "commentary" {to} | {to} {channel} "commentary")'
        rules.append(f"function_{number}: {headers} kind {message} {arguments(function)}")
    return "\n".join(rules) + "\n"
