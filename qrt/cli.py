"""Shared parts of qrt's command lines: a parser that suggests the flag you meant, and exit codes.

    def main(argv: list[str] | None = None) -> int:
        arguments = parser().parse_args(argv)
        return run_main(lambda: work(arguments))

Results go to stdout; errors, logs and progress to stderr.
Exit codes: 0 done, 1 failed, 2 wrong usage, 130 interrupted.
"""

from __future__ import annotations

import argparse
import io
import json
import logging
import sys
import tempfile
from collections.abc import Callable, Sequence
from copy import copy
from dataclasses import MISSING, fields
from itertools import takewhile
from pathlib import Path
from typing import Any, NoReturn

from qrt.errors import ConfigError, QrtError
from qrt.registry import nearest

# Escapes for control characters, so that text from a checkpoint or a client cannot control the terminal.
CONTROL_CHARACTERS = {code: f"\\x{code:02x}" for code in (*range(32), *range(127, 160))}
SUFFIXES = {"k": 10**3, "K": 2**10, "m": 10**6, "M": 2**20, "g": 10**9, "G": 2**30}


class HelpFormatter(argparse.HelpFormatter):
    """Adds its default to each flag's help, unless the text names it; lists as they are typed."""

    def _get_help_string(self, action: argparse.Action) -> str:
        text, value = action.help or "", action.default
        if "default:" in text or value is None or value is False or value in ([], (), "", argparse.SUPPRESS):
            return text
        return f"{text} (default: %(default)s)"

    def _expand_help(self, action: argparse.Action) -> str:
        shown = copy(action)
        if isinstance(shown.default, list | tuple):
            shown.default = " ".join(
                f"{value:g}" if isinstance(value, float) else str(value) for value in shown.default
            )
        return super()._expand_help(shown)


class ArgumentParser(argparse.ArgumentParser):
    """argparse with one-line errors; flags are never abbreviated, and `--a_b` means `--a-b`."""

    def __init__(self, *args: Any, **options: Any) -> None:
        options.setdefault("allow_abbrev", False)
        options.setdefault("formatter_class", HelpFormatter)
        super().__init__(*args, **options)

    def parse_known_args(self, args: Sequence[str] | None = None, namespace: Any = None) -> Any:  # type: ignore[override]
        """Parse as argparse does, but report an unknown flag as an error before anything else."""
        words = [_dashed(word) for word in (sys.argv[1:] if args is None else args)]
        known = self._option_string_actions
        for word in takewhile(lambda word: word not in self._ends(), words):  # a subcommand checks its own
            flag = word.partition("=")[0]
            if flag.startswith("--") and flag not in known:
                self.error(f"unknown flag {flag}{nearest(flag, list(known))}")
        return super().parse_known_args(words, namespace)

    def _ends(self) -> set[str]:
        """Return the words after which flags belong to another parser."""
        subcommands = [a.choices or () for a in self._actions if isinstance(a, argparse._SubParsersAction)]
        return {"--"}.union(*subcommands)

    def error(self, message: str) -> NoReturn:
        """Print one line on stderr and exit 2."""
        self.exit(2, f"error: {message} (see {self.prog} --help)\n")


def _dashed(word: str) -> str:
    flag, equals, value = word.partition("=")
    return flag.replace("_", "-") + equals + value if flag.startswith("--") else word


def add_flags(group: argparse._ActionsContainer, config: type, names: str, **changes: Any) -> None:
    """Add the flags of some fields of a config class; `changes` replaces what each of them says."""
    known = {own.name: own for own in fields(config)}
    for own in (known[name] for name in names.split()):
        default = None if own.default is MISSING else own.default
        usual = {"dest": own.name, "default": default, **_kind(str(own.type), default)}
        how = {**usual, **own.metadata, **changes}
        flag, aliases = how.pop("flag") or f"--{own.name.replace('_', '-')}", how.pop("aliases")
        group.add_argument(flag, *aliases, **{key: value for key, value in how.items() if value is not None})


def _kind(annotation: str, default: Any) -> dict[str, Any]:
    """Return how the flag of a field with this type and default takes its value."""
    kind = annotation.removesuffix(" | None")
    if kind == "bool":
        return {"action": "store_true" if default is False else argparse.BooleanOptionalAction}
    kinds: dict[str, Callable[[str], Any]] = {"int": integer, "float": float, "dict[str, Any]": json_object}
    item = kind.removeprefix("tuple[").removesuffix(", ...]")
    return {"type": kinds.get(item, str), **({} if item == kind else {"nargs": "+"})}


def integer(text: str) -> int:
    """Parse an integer with an optional suffix: k, m, g (powers of 1000) or K, M, G (powers of 1024)."""
    factor = SUFFIXES.get(text[-1:], 1)
    try:
        return int(float(text[:-1]) * factor) if factor > 1 else int(text)
    except (ValueError, OverflowError):
        raise argparse.ArgumentTypeError(
            f"expected a number such as 4096, 32k or 32K, got {text!r}"
        ) from None


def json_object(text: str) -> dict[str, Any]:
    """Parse a JSON object."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        value = None
    if not isinstance(value, dict):
        raise argparse.ArgumentTypeError(f"expected a JSON object, got {text!r:.80}")
    return value


def check_output(flag: str, path: Path) -> None:
    """Raise ConfigError if no file `path` can be written, before the work for it is done.

    Makes its folders if needed.
    """
    if path.is_dir():
        raise ConfigError(f"{flag} {path}: expected a file, got a folder")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryFile(dir=path.parent):
            pass
    except OSError as error:
        raise ConfigError(f"{flag} {path}: cannot be written ({error.strerror})") from None


def run_main(work: Callable[[], int | None]) -> int:
    """Run a command's work and return its exit code; print QrtError and OSError in one line on stderr."""
    if isinstance(sys.stdout, io.TextIOWrapper):  # escape what it cannot encode, as on stderr
        sys.stdout.reconfigure(errors="backslashreplace")
    try:
        return work() or 0
    except (QrtError, OSError) as error:
        print(f"error: {error}".translate(CONTROL_CHARACTERS), file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 130


class LineFormatter(logging.Formatter):
    """Writes each record in one line: control characters that a client sent make no new lines."""

    def formatMessage(self, record: logging.LogRecord) -> str:
        """Escape the message; a traceback stays as it is."""
        record.message = record.message.translate(CONTROL_CHARACTERS)
        return super().formatMessage(record)


def set_up_logging(level: str | int, tag: str) -> None:
    """Log to stderr: level, time, process and module."""
    handler = logging.StreamHandler()
    line = f"%(levelname)s %(asctime)s ({tag}) [%(name)s] %(message)s"
    handler.setFormatter(LineFormatter(line, "%m-%d %H:%M:%S"))
    logging.basicConfig(
        level=level.upper() if isinstance(level, str) else level, handlers=[handler], force=True
    )
    for noisy in ("httpx", "asyncio"):
        logging.getLogger(noisy).setLevel(logging.WARNING)
