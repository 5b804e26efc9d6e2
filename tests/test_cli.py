"""Flags that are almost right are named; exit codes are 0, 1, 2 and 130; errors are one line on stderr."""

import argparse
import io

import pytest

from qrt.cli import ArgumentParser, check_output, run_main
from qrt.errors import CheckpointError, ConfigError


def parser() -> ArgumentParser:
    top = ArgumentParser(prog="qrt-x")
    top.add_argument("--n-samples", type=int)
    ppl = top.add_subparsers(dest="command", required=True).add_parser("ppl")
    ppl.add_argument("--baseline", required=True)
    return top


def test_underscores_in_flags_but_not_in_values():
    found = parser().parse_args(["--n_samples", "3", "ppl", "--baseline=a_b"])
    assert (found.n_samples, found.baseline) == (3, "a_b")


@pytest.mark.parametrize(
    "words, message",
    [
        (
            ["--n-sample", "3"],
            "error: unknown flag --n-sample; did you mean '--n-samples'? (see qrt-x --help)",
        ),
        (
            ["ppl", "--base", "x"],
            "error: unknown flag --base; did you mean '--baseline'? (see qrt-x ppl --help)",
        ),
        (["ppl", "--zzz"], "error: unknown flag --zzz (see qrt-x ppl --help)"),
        (["--n-samples", "x"], "error: argument --n-samples: invalid int value: 'x' (see qrt-x --help)"),
        ([], "error: the following arguments are required: command (see qrt-x --help)"),
    ],
)
def test_usage_errors_are_one_line(words, message, capsys):
    with pytest.raises(SystemExit) as stopped:
        parser().parse_args(words)
    assert stopped.value.code == 2
    assert capsys.readouterr().err == message + "\n"


@pytest.mark.parametrize(
    "error, code, line",
    [
        (CheckpointError("x: no such folder"), 1, "error: x: no such folder\n"),
        (CheckpointError("a\n\x1b[31m\x9b0m"), 1, "error: a\\x0a\\x1b[31m\\x9b0m\n"),
        (
            OSError(28, "No space left on device", "out"),
            1,
            "error: [Errno 28] No space left on device: 'out'\n",
        ),
        (KeyboardInterrupt(), 130, "interrupted\n"),
    ],
)
def test_exit_codes(error, code, line, capsys):
    def work():
        raise error

    assert run_main(work) == code
    assert capsys.readouterr().err == line


def test_unencodable_output_is_escaped(monkeypatch):
    """A plus-minus where it is ASCII, a file name that is no text."""
    stdout = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr("sys.stdout", stdout)
    assert run_main(lambda: print("1 \xb1 2 \udcff")) == 0
    stdout.flush()
    assert stdout.buffer.getvalue() == rb"1 \xb1 2 \udcff" + b"\n"


def test_exit_code_of_success_and_traceback_of_a_defect():
    assert run_main(lambda: None) == 0
    assert run_main(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: 1 // 0)


def parsers() -> list[argparse.ArgumentParser]:
    from qrt.serve.command import flags
    from qrt_calibrate import cli as calibrate
    from qrt_eval import cli as evaluate

    commands = [a for a in evaluate.parser()._actions if isinstance(a, argparse._SubParsersAction)]
    return [flags.parser(), calibrate._parser(), *commands[0].choices.values()]


def test_every_flag_has_help_and_a_default():
    for own in parsers():
        formatter = own._get_formatter()
        for action in own._actions:
            place = f"{own.prog} {action.option_strings}"
            text = action.help and formatter._expand_help(action)
            assert text, place
            if action.option_strings and action.nargs != 0 and not action.required and action.dest != "help":
                alternative = action.dest in ("model", "shape") and action.default is None
                assert "default:" in text or alternative, place


def test_shown_default_is_the_real_one(capsys):
    top = ArgumentParser(prog="qrt-x")
    top.add_argument("--sizes", type=float, nargs="+", default=[0.5, 2.0], help="some")
    top.add_argument("--name", help="one (default: the folder's)")
    top.add_argument("--fast", action="store_true", help="at once")
    with pytest.raises(SystemExit):
        top.parse_args(["--help"])
    lines = capsys.readouterr().out.splitlines()
    text = " ".join(lines)
    assert "some (default: 0.5 2)" in text and "one (default: the folder's)" in text
    assert text.count("default:") == 2


def test_an_output_is_tried_before_the_work(tmp_path):
    check_output("--json", tmp_path / "new" / "x.json")
    assert (tmp_path / "new").is_dir() and not list((tmp_path / "new").iterdir())
    (tmp_path / "file").write_text("kept")
    check_output("--json", tmp_path / "file")
    assert (tmp_path / "file").read_text() == "kept"
    for wrong, why in (
        (tmp_path, "expected a file, got a folder"),
        (tmp_path / "file" / "x", "cannot be written"),
    ):
        with pytest.raises(ConfigError, match=f"--json {wrong}: {why}"):
            check_output("--json", wrong)
