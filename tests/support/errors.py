"""What an error must name, however its sentence is put."""


def assert_names(text: str, *words: str) -> None:
    """Fail unless `text` holds every word: the flag or file, what came, what was expected, the remedy."""
    missing = [word for word in words if word not in text]
    assert not missing, f"{missing} not in {text!r}"


def assert_one_line(text: str, *words: str) -> None:
    """Fail unless `text` is a single line that holds every word, and no traceback."""
    assert text.count("\n") == 1 and "Traceback" not in text, text
    assert_names(text, *words)
