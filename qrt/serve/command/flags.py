"""The command line of `qrt-serve`, parsed: flags, a YAML file of them, help by group."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import yaml

from qrt.cli import ArgumentParser
from qrt.errors import ConfigError
from qrt.location import EXPECTED
from qrt.peers import SWITCHES, is_so_anyway, setting
from qrt.registry import nearest
from qrt.serve.command.flag_groups import GROUPS
from qrt.serve.command.flags_file import file_words


def parser() -> ArgumentParser:
    """All flags, in groups."""
    top = ArgumentParser(
        prog="qrt-serve",
        description="Serve a model over an OpenAI-compatible API. GET /health and /readiness answer 503 "
        "until the model is loaded; /liveness answers 200 at once.",
        add_help=False,
    )
    top.add_argument("model_path", nargs="?", metavar="MODEL", help=EXPECTED)
    top.add_argument(
        "--help", "-h", nargs="?", const="", metavar="GROUP", help="this text, or one group of it"
    )
    top.add_argument(
        "--config", metavar="FILE.yaml", help="flags by name; those given here win (default: none)"
    )
    for title, add in GROUPS.items():
        add(top.add_argument_group(title))
    return top


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """The flags of `argv` and of the file it names; exits as argparse does."""
    top = parser()
    argv = _without_peers(top, argv)
    arguments = top.parse_args(argv)
    if arguments.help is not None:
        _print_help(top, arguments.help)
    if arguments.config:
        try:
            words = file_words(top, Path(arguments.config))
        except (ConfigError, OSError, yaml.YAMLError) as error:
            top.error(f"--config: {' '.join(str(error).split())}")
        of_file = top.parse_args(words)
        if arguments.model_path is not None:
            of_file.model = None  # by its other name
        arguments = top.parse_args(argv, of_file)
    return arguments


def _without_peers(top: ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Remove flags of other engines that ask for nothing; their other flags are errors."""
    left, words = [], iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        if flag in SWITCHES:
            continue
        entry = setting(flag) if flag.startswith("-") and flag not in top._option_string_actions else None
        if entry is None:
            left.append(word)
        elif not is_so_anyway(flag, value if equals else next(words, word)):
            top.error(f"{flag}: {entry.remedy}")
    return left


def _print_help(top: ArgumentParser, group: str) -> None:
    """All, or one group; exits."""
    groups = {g.title: g for g in top._action_groups if g.title and g._group_actions}
    if not group:
        top.print_help()
        print(f"\nOne group alone: --help GROUP, of {', '.join(groups)}")
        top.exit()
    if group not in groups:
        top.error(f"--help: no group {group!r}{nearest(group, list(groups))}; there are {', '.join(groups)}")
    formatter = top._get_formatter()
    formatter.start_section(group)
    formatter.add_arguments(groups[group]._group_actions)
    formatter.end_section()
    print(formatter.format_help(), end="")
    top.exit()
