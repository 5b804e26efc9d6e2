"""The process that compiles a grammar before the engine does: a grammar that ends it harms nothing else.

Its parent is a `check.Checker`: on stdin comes a vocabulary and then a grammar a line, on stdout goes
an answer a line, all JSON. A fork of the process tries the grammars, within limits of the system, and is all
that ends; the next one need not read the vocabulary again. Both end with the parent, whose end closes stdin.
"""

from __future__ import annotations

import json
import os
import resource
import signal
import sys
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import numpy as np

from qrt.errors import ConfigError
from qrt.grammar.compiled import deep_threads
from qrt.grammar.matcher import Root
from qrt.grammar.parser import parser_of, source
from qrt.grammar.spec import Grammar
from qrt.grammar.vocabulary import Vocabulary

CPU_S = 2.0
WALL_S = 30.0  # a busy machine gives a process little of its time
MEMORY = 2**30  # bytes, beside the vocabulary's
STACK = 192 * 2**20  # less than the engine's, so that what fits here fits there
MOST = 200  # grammars that a fork tries
REASONS: dict[int, str] = {
    signal.SIGPROF: "takes over 2 s to compile",
    signal.SIGALRM: "takes over 30 s to compile",
    signal.SIGABRT: "takes over 1 GiB to compile",
    signal.SIGSEGV: "nests too deep to compile",
}


def main() -> None:
    """Answer each grammar: {"text": ...} is what to compile, {"refusal": ...} says why it cannot be."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    given = json.loads(sys.stdin.buffer.readline())
    vocabulary = Vocabulary(given["tokenizer"], given["width"], tuple(given["ends"]))
    vocabulary.library  # noqa: B018 -- made once, before any fork
    fork = Fork(vocabulary)
    for line in sys.stdin.buffer:
        answer = fork.answer(line)
        if not answer and fork.end() == -signal.SIGKILL:  # not the grammar's doing
            fork = Fork(vocabulary)
            answer = fork.answer(line)
        sys.stdout.buffer.write(answer or _refused(json.loads(line), fork.end()))
        sys.stdout.buffer.flush()
        if fork.is_spent:
            fork.end()
            fork = Fork(vocabulary)


class Fork:
    """A fork of this process, which answers until it ends or is ended."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        asked, asking = os.pipe()
        answering, answered = os.pipe()
        self._pid = os.fork()
        if self._pid == 0:
            try:
                os.close(asking)
                os.close(answering)
                _serve(asked, answered, vocabulary)
            finally:
                os._exit(1)
        os.close(asked)
        os.close(answered)
        self._asking, self._answers = asking, open(answering, "rb")
        self._left, self._code = MOST, 0

    @property
    def is_spent(self) -> bool:
        """Whether it has ended, or has tried so many grammars that another shall go on."""
        return self._pid == 0 or self._left == 0

    def answer(self, line: bytes) -> bytes:
        """Return its answer to a grammar, a line; b"" if it has ended."""
        self._left -= 1
        try:
            while line:
                line = line[os.write(self._asking, line) :]
        except BrokenPipeError:
            return b""
        answer = self._answers.readline()
        return answer if answer.endswith(b"\n") else b""

    def end(self) -> int:
        """Ask nothing more and wait until it has ended; return its exit code."""
        if self._pid:
            os.close(self._asking)
            self._answers.close()
            self._code = os.waitstatus_to_exitcode(os.waitpid(self._pid, 0)[1])
            self._pid = 0
        return self._code


def _serve(asked: int, answered: int, vocabulary: Vocabulary) -> None:
    """Answer grammars within limits; the fork's life, which ends with the pipe."""
    _limit_memory()
    with (
        deep_threads(1, "trial", STACK) as thread,
        open(asked, "rb") as lines,
        open(answered, "wb") as answers,
    ):
        for line in lines:
            signal.setitimer(signal.ITIMER_PROF, CPU_S)  # at its end the system ends the fork
            signal.setitimer(signal.ITIMER_REAL, WALL_S)
            answer = json.dumps(_tried(Grammar(**json.loads(line)), vocabulary, thread)).encode()
            signal.setitimer(signal.ITIMER_PROF, 0)
            signal.setitimer(signal.ITIMER_REAL, 0)
            answers.write(answer + b"\n")
            answers.flush()
    os._exit(0)


def _refused(grammar: dict[str, str], code: int) -> bytes:
    """Return the answer to a grammar that has ended a fork."""
    name = signal.Signals(-code).name if code < 0 else f"code {code}"
    reason = REASONS.get(-code, f"ends the compiler ({name})")
    refusal = f"{_wanted(Grammar(**grammar))}, got one that {reason}; simplify it"
    return json.dumps({"refusal": refusal}).encode() + b"\n"


def _tried(grammar: Grammar, vocabulary: Vocabulary, thread: ThreadPoolExecutor) -> dict[str, str]:
    try:
        return {"text": thread.submit(_compiled, grammar, vocabulary).result()}
    except ConfigError as error:
        return {"refusal": str(error)}
    except BaseException as error:  # the library panics, or no memory is left
        return {"refusal": f"{_wanted(grammar)}, got one that fails: {type(error).__name__} {error!s:.200}"}


def _compiled(grammar: Grammar, vocabulary: Vocabulary) -> str:
    """Compile a grammar and look for its first tokens; return its text, EBNF in Lark's notation."""
    if grammar.kind == "lark":
        grammar = replace(grammar, text=source(grammar))
    matcher = Root(parser_of(grammar, vocabulary), vocabulary).matcher()
    matcher.fill(np.empty(vocabulary.words, np.int32))
    if matcher.error is not None:
        raise ConfigError(f"{grammar.field}: expected a grammar of less work, got {matcher.error}")
    return grammar.text


def _wanted(grammar: Grammar) -> str:
    return f"{grammar.field}: expected a grammar of less work"


def _limit_memory() -> None:
    """Limit a fork to `MEMORY` more than it has, if the system says what that is; it leaves no core file."""
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    sizes = Path("/proc/self/statm")
    if sizes.exists():
        most = int(sizes.read_text().split()[0]) * resource.getpagesize() + MEMORY
        resource.setrlimit(resource.RLIMIT_AS, (most, most))


if __name__ == "__main__":
    main()
