"""Flags that are almost right are named; exit codes are 0, 1, 2 and 130; errors are one line on stderr."""

import pytest

from qrt.cli import ArgumentParser, run_main
from qrt.errors import CheckpointError


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


def test_success_is_zero_and_defects_keep_their_traceback():
    assert run_main(lambda: None) == 0
    assert run_main(lambda: 3) == 3
    with pytest.raises(ZeroDivisionError):
        run_main(lambda: 1 // 0)
