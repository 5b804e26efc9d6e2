"""docs/security.md names tests, files and commands that are there."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_every_security_claim_names_code_and_test():
    rows = [line for line in (ROOT / "docs/security.md").read_text().splitlines() if line.startswith("| ")]
    promises = [row for row in rows if "**" not in row and "---" not in row][1:]
    assert len(promises) > 25
    for row in promises:
        _, promise, keeps, shows, _ = row.split("|")
        file, named = ROOT / "tests/serve/test_security.py", 0
        for where in re.findall(r"`([^`]+)`", shows):
            name, _, test = where.partition("::")
            if name.startswith("--"):
                continue
            if name:
                file = ROOT / name if "/" in name else next((ROOT / "tests/serve").rglob(name))
            assert file.is_file(), f"{promise}: {where}"
            assert not test or re.search(rf"^def {test}\(", file.read_text(), re.MULTILINE), (
                f"{promise}: {where}"
            )
            named += 1
        assert named or "make audit" in keeps, promise
        for where in re.findall(r"`([^`]+)`", keeps):
            inside = ROOT / "qrt" / where
            assert inside.exists() or (ROOT / where).exists() or where == "make audit", f"{promise}: {where}"
    assert re.search(r"^audit:", (ROOT / "Makefile").read_text(), re.MULTILINE)
