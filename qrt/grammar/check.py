"""Checker: tries a grammar in a process of its own, before the engine sees it."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import OrderedDict
from contextlib import suppress
from dataclasses import asdict, replace
from threading import Lock

from qrt.errors import ConfigError
from qrt.grammar.spec import Grammar, check_bounds
from qrt.grammar.vocabulary import Vocabulary
from qrt.request.structured_outputs import StructuredOutputsParams

KEPT = 256


class Checker:
    """Refuses grammars that the engine could not take. Many threads may use it; one checks at a time.

    Its process (`trial`) starts with the first check, or with `start`, and again if something ends it.
    """

    def __init__(self, vocabulary: Vocabulary) -> None:
        self._vocabulary = vocabulary
        self._process: subprocess.Popen[bytes] | None = None
        self._turn = Lock()  # for the process
        self._lock = Lock()  # for the verdicts
        self._verdicts: OrderedDict[Grammar, Grammar | str] = OrderedDict()

    def check(self, grammar: Grammar) -> Grammar:
        """Return the grammar for the engine: the same, but EBNF in Lark's notation.

        ConfigError where it is out of bounds, holds what is not supported, or takes over 2 s of CPU time or
        1 GiB to compile.
        """
        verdict = self._known(grammar)
        if verdict is None:
            check_bounds(grammar)
            with self._turn:
                verdict = self._known(grammar) or self._tried(grammar)
        if isinstance(verdict, str):
            raise ConfigError(verdict)
        return verdict

    def checked(self, shape: StructuredOutputsParams, place: str = "") -> StructuredOutputsParams:
        """Return a shape for the engine, as `check` does; `place` is the request's field that asks for it."""
        grammar = Grammar.of(shape)
        try:
            found = self.check(grammar)
        except ConfigError as error:
            raise ConfigError(str(error).replace(grammar.field, place or grammar.field)) from error
        return shape if found == grammar else replace(shape, grammar=found.text)

    def start(self) -> None:
        """Start the process if it does not run; it is ready 2 s later for 150,000 tokens."""
        with self._turn:
            self._running()

    def close(self) -> None:
        """End the process; a later check starts another."""
        with self._turn:
            self._end()

    def _known(self, grammar: Grammar) -> Grammar | str | None:
        with self._lock:
            if grammar in self._verdicts:
                self._verdicts.move_to_end(grammar)
            return self._verdicts.get(grammar)

    def _tried(self, grammar: Grammar) -> Grammar | str:
        line = json.dumps(asdict(grammar)).encode()
        found = json.loads(self._answer(line) or self._answer(line) or b"null")
        if found is None:
            raise RuntimeError("the process that checks grammars ends before it answers")
        verdict: Grammar | str = found.get("refusal") or replace(grammar, text=found["text"])
        with self._lock:
            self._verdicts[grammar] = verdict
            if len(self._verdicts) > KEPT:
                self._verdicts.popitem(last=False)
        return verdict

    def _answer(self, line: bytes) -> bytes:
        """Return the process's answer; b"" if something ended it, after which it is tried again."""
        try:
            process = self._running()
            _send(process, line)
            assert process.stdout
            answer = process.stdout.readline()
        except BrokenPipeError:
            answer = b""
        if not answer.endswith(b"\n"):
            self._end()
            return b""
        return answer

    def _running(self) -> subprocess.Popen[bytes]:
        if self._process is None or self._process.poll() is not None:
            self._end()
            self._process = subprocess.Popen(
                [sys.executable, "-m", "qrt.grammar.trial"],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                stderr=subprocess.DEVNULL,
                env=os.environ | {"OPENBLAS_NUM_THREADS": "1"},  # a fork keeps one thread alone
            )
            _send(self._process, json.dumps(asdict(self._vocabulary)).encode())
        return self._process

    def _end(self) -> None:
        process, self._process = self._process, None
        if process is not None:
            process.kill()
            with suppress(BrokenPipeError), process:  # waits for it, and closes the pipes
                pass


def _send(process: subprocess.Popen[bytes], line: bytes) -> None:
    assert process.stdin
    process.stdin.write(line + b"\n")
    process.stdin.flush()
