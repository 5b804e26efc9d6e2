"""Parse the command line of `qrt-serve`: flags, a YAML file of flags, help by group."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

import yaml

from qrt.cli import ArgumentParser
from qrt.compat.settings import SWITCHES, has_no_effect, setting
from qrt.errors import ConfigError
from qrt.model_files.location import EXPECTED
from qrt.registry import nearest
from qrt.serve.command.flag_groups import GROUPS
from qrt.serve.command.flags_file import file_words


def parser() -> ArgumentParser:
    """Return the parser of all flags, in groups."""
    top = ArgumentParser(
        prog="qrt-serve",
        description="Serve a model over an OpenAI-compatible API. GET /health and /readiness answer 503 "
        "until the model is loaded; /liveness answers 200 at once. Integers may end in k, m or g (powers of "
        "1000), or in K, M or G (of 1024), such as 32K.",
        add_help=False,
    )
    top.add_argument("model_path", nargs="?", metavar="MODEL", help=EXPECTED)
    top.add_argument(
        "--help", "-h", nargs="?", const="", metavar="GROUP", help="show this text, or one group of it"
    )
    top.add_argument(
        "--config", metavar="FILE.yaml", help="file of flags; those given here win (default: none)"
    )
    for title, add in GROUPS.items():
        add(top.add_argument_group(title))
    return top


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the flags of `argv` and of the file it names; exit as argparse does."""
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
            of_file.model = None  # the positional argument wins over the file's --model
        arguments = top.parse_args(argv, of_file)
    return arguments


def _without_peers(top: ArgumentParser, argv: Sequence[str]) -> list[str]:
    """Remove flags of other engines that change nothing here; report their other flags as errors."""
    left, words = [], iter(argv)
    for word in words:
        name, equals, value = word.partition("=")
        flag = name.replace("_", "-")
        if flag in SWITCHES:
            continue
        entry = setting(flag) if flag.startswith("-") and flag not in top._option_string_actions else None
        if entry is None:
            left.append(word)
        elif not has_no_effect(flag, value if equals else next(words, word)):
            top.error(f"{flag}: {entry.remedy}")
    return left


def _print_help(top: ArgumentParser, group: str) -> None:
    """Print the help of all groups or of one, and exit."""
    groups = {g.title: g for g in top._action_groups if g.title and g._group_actions}
    if not group:
        top.print_help()
        print(f"\nHelp of one group: --help GROUP, one of {', '.join(groups)}")
        top.exit()
    if group not in groups:
        top.error(f"--help: no group {group!r}{nearest(group, list(groups))}; there are {', '.join(groups)}")
    formatter = top._get_formatter()
    formatter.start_section(group)
    formatter.add_arguments(groups[group]._group_actions)
    formatter.end_section()
    print(formatter.format_help(), end="")
    top.exit()
