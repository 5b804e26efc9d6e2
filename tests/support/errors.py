"""Check what an error names, whatever its wording is."""


def assert_names(text: str, *words: str) -> None:
    """Fail unless `text` holds every word: the flag or file, what came, what was expected, the remedy."""
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in {text!r}"


def assert_error(stderr: str, *words: str) -> None:
    """Fail unless a command ended with one line of error that holds every word, without a traceback."""
    assert "Traceback" not in stderr, stderr
    last = stderr.rstrip("\n").split("\n")[-1]
    assert stderr.count("error: ") == 1, stderr
    assert_names(last, "error: ", *words)
