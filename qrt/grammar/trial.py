"""The process that compiles a grammar before the engine does: a grammar that ends it harms nothing else.

Its parent is a `check.Checker`: on stdin comes a vocabulary and then a grammar a line, on stdout goes
an answer a line, all JSON. Each grammar is tried in a fork, which the system limits, and which is all that
ends. The process itself ends with its parent, whose end closes stdin.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from dataclasses import replace
from pathlib import Path

import numpy as np

from qrt.errors import ConfigError
from qrt.grammar.compiled import deep_threads
from qrt.grammar.matcher import Root
from qrt.grammar.parser import lark, parser_of
from qrt.grammar.spec import Grammar
from qrt.grammar.vocabulary import Vocabulary

CPU_S = 2
WALL_S = 30  # a busy machine gives a process little of its time
MEMORY = 2**30  # bytes, beside the vocabulary's
STACK = 192 * 2**20  # less than the engine's, so that what fits here fits there
REASONS = {
    signal.SIGXCPU: f"takes over {CPU_S} s to compile",
    signal.SIGALRM: f"takes over {WALL_S} s to compile",
    signal.SIGABRT: "takes over 1 GiB to compile",
    signal.SIGSEGV: "nests too deep to compile",
}


def main() -> None:
    """Answer each grammar: {"text": ...} is what to compile, {"refusal": ...} says why it cannot be."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    given = json.loads(sys.stdin.buffer.readline())
    vocabulary = Vocabulary(given["tokenizer"], given["width"], tuple(given["ends"]))
    vocabulary.library  # noqa: B018 -- made once, before any fork
    for line in sys.stdin.buffer:
        grammar = Grammar(**json.loads(line))
        sys.stdout.buffer.write(_forked(grammar, vocabulary) + b"\n")
        sys.stdout.buffer.flush()


def _forked(grammar: Grammar, vocabulary: Vocabulary) -> bytes:
    """Try a grammar in a fork of this process; return its answer, or what ended it."""
    reading, writing = os.pipe()
    fork = os.fork()
    if fork == 0:
        _limit()
        with open(writing, "wb") as out:
            out.write(json.dumps(_tried(grammar, vocabulary)).encode())
        os._exit(0)
    os.close(writing)
    with open(reading, "rb") as pipe:
        answer = pipe.read()
    code = os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1])
    if code == 0:
        return answer
    reason = REASONS.get(signal.Signals(-code), f"ends the compiler ({signal.Signals(-code).name})")
    return json.dumps({"refusal": f"{_wanted(grammar)}, got one that {reason}; simplify it"}).encode()


def _tried(grammar: Grammar, vocabulary: Vocabulary) -> dict[str, str]:
    try:
        return {"text": deep_threads(1, "trial", STACK).submit(_compiled, grammar, vocabulary).result()}
    except ConfigError as error:
        return {"refusal": str(error)}
    except BaseException as error:  # the library panics, or no memory is left
        return {"refusal": f"{_wanted(grammar)}, got one that fails: {type(error).__name__} {error!s:.200}"}


def _compiled(grammar: Grammar, vocabulary: Vocabulary) -> str:
    """Compile a grammar and look for its first tokens; return its text, EBNF in Lark's notation."""
    if grammar.kind == "lark":
        grammar = replace(grammar, text=lark(grammar.text))
    matcher = Root(parser_of(grammar, vocabulary), vocabulary).matcher()
    matcher.fill(np.empty(vocabulary.words, np.int32))
    if matcher.error is not None:
        raise ConfigError(f"{grammar.field}: expected a grammar of less work, got {matcher.error}")
    return grammar.text


def _wanted(grammar: Grammar) -> str:
    return f"{grammar.field}: expected a grammar of less work"


def _limit() -> None:
    """Limit a fork's time, and its memory where the system says what it has; it leaves no core file."""
    signal.alarm(WALL_S)
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    resource.setrlimit(resource.RLIMIT_CPU, (CPU_S, CPU_S + 1))
    sizes = Path("/proc/self/statm")
    if sizes.exists():
        most = int(sizes.read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
