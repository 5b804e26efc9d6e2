"""Run every test that uses a GPU, in parts, and record what passed: `make gpu`.

A test uses a GPU if it is marked `gpu` or asks for the fixture `device`. Each part ends within ten minutes;
`make gpu PART=kernels` runs one alone, and its result joins those of the others on the same code. The record
is eval/results/DEVICE/tests.json, and docs/kernels.md shows it (`--page` writes it there).
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from datetime import UTC, datetime
from pathlib import Path
from typing import Any
from xml.etree import ElementTree
from xml.etree.ElementTree import Element

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "eval" / "results"
PAGE = ROOT / "docs" / "kernels.md"
BEGIN, END = "<!-- what `make gpu` recorded -->\n", "<!-- end of the record -->\n"
CODE = ("definitions", "kernels", "layers", "model", "mem", "quant", "engine")  # a change counts
PART_S = 590
FEW = 12  # files that the page names
ENVIRONMENT = {**os.environ, "QRT_TEST_GPU": "only"}
PARTS = {  # what pytest is given
    "linear": ("tests/kernels/linear", "tests/kernels/experts"),
    "attention": ("tests/kernels/test_decode_attention.py", "tests/kernels/test_append_attention.py"),
    "prefill": (
        "tests/kernels/test_prefill_attention.py", "tests/kernels/test_hopper_prefill.py",
        "tests/kernels/test_kv_write.py", "tests/kernels/test_scores.py",
    ),
    "elementwise": ("tests/kernels",),
    "models": (
        "tests/layers", "tests/mem", "tests/model", "tests/quant", "tests/engine", "tests/calibrate",
        "tests/offline/test_llm_tiny.py",
    ),
}  # fmt: skip


def file_hashes() -> dict[str, str]:
    """Return the hash of each file whose change makes the record old, by its path."""
    paths = sorted(path for name in CODE for path in (ROOT / "qrt" / name).rglob("*.py"))
    return {str(path.relative_to(ROOT)): hashlib.sha256(path.read_bytes()).hexdigest()[:16] for path in paths}


def outcome_of(case: Element) -> str:
    """Return "passed", "skipped" or "failed", which an error is too."""
    if case.find("failure") is not None or case.find("error") is not None:
        return "failed"
    return "passed" if case.find("skipped") is None else "skipped"


def name_of(case: Element) -> str:
    """Return what pytest calls the test, or the file that it could not import."""
    name = f"{case.get('classname', '').replace('.', '/')}.py::{case.get('name')}"
    return name.removeprefix(".py::")


def read_reports(paths: Sequence[Path]) -> dict[str, str]:
    """Return the outcome of each test by its name; a later report replaces what an earlier one says."""
    found: dict[str, str] = {}
    for path in paths:
        own: dict[str, str] = {}
        for case in ElementTree.parse(path).getroot().iter("testcase"):
            if own.get(name_of(case)) != "failed":  # a test may also fail in its end
                own[name_of(case)] = outcome_of(case)
        found |= own
    return found


def pytest_command(name: str, *options: str) -> list[str]:
    """Return the command that runs a part's tests."""
    others = [path for paths in PARTS.values() for path in paths if path.startswith("tests/kernels/")]
    ignored = [f"--ignore={path}" for path in others] if name == "elementwise" else []
    return [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *options, *ignored]


def collected(name: str) -> list[str]:
    """Return the names of a part's tests."""
    command = pytest_command(name, "--collect-only", "-n", "0", *PARTS[name])
    listed = subprocess.run(command, cwd=ROOT, env=ENVIRONMENT, capture_output=True, text=True).stdout
    tests = [line for line in listed.splitlines() if "::" in line]
    if not tests:
        raise SystemExit(f"make gpu: {name}: expected pytest to list tests, got none:\n{listed}")
    return tests


def run_part(name: str, workers: int, most_s: float, rest: bool) -> dict[str, Any]:
    """Run a part for at most so many seconds, or with `rest` what has not passed in the runs before."""
    folder = ROOT / "build" / "gpu" / name
    if not rest:
        shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True, exist_ok=True)
    reports = sorted(folder.glob("*.xml"))
    start, tests = time.monotonic(), list(PARTS[name])
    if rest:
        done = read_reports(reports)
        tests = [test for test in collected(name) if done.get(test) not in ("passed", "skipped")]
    report, ended = folder / f"{len(reports)}.xml", True
    if tests:
        arguments = folder / "tests.txt"  # they may be more than a command line holds
        arguments.write_text("\n".join(tests) + "\n")
        options = "-n", str(workers), "--dist", "worksteal", f"--junitxml={report}", f"@{arguments}"
        process = subprocess.Popen(pytest_command(name, *options), cwd=ROOT, env=ENVIRONMENT)
        try:
            process.wait(most_s)
        except subprocess.TimeoutExpired:
            process.send_signal(signal.SIGINT)  # pytest then writes what it has
            try:
                process.wait(20)
            except subprocess.TimeoutExpired:
                process.kill()
        ended = process.returncode in (0, 1)
    outcomes = read_reports(sorted(folder.glob("*.xml")))
    count = Counter(outcomes.values())
    return {
        "passed": count["passed"],
        "skipped": count["skipped"],
        "failed": sorted(test for test, outcome in outcomes.items() if outcome == "failed"),
        "seconds": round(time.monotonic() - start),
        "finished": ended,
    }


def merged(
    old: Mapping[str, Any] | None, files: Mapping[str, str], parts: Mapping[str, Any]
) -> dict[str, Any]:
    """Return the results of all parts on this code; those of other code are dropped."""
    kept = old["parts"] if old is not None and old["files"] == files else {}
    return {name: {**kept, **parts}[name] for name in PARTS if name in {**kept, **parts}}


def changed_files(record: Mapping[str, Any]) -> list[str]:
    """Return the files that were added, changed or removed since the record."""
    now, then = file_hashes(), record["files"]
    return sorted(path for path in {*now, *then} if now.get(path) != then.get(path))


def listed(files: Sequence[str]) -> str:
    """Return a few files by name, and many by how many of each folder there are."""
    if len(files) <= FEW:
        return ", ".join(f"`{path}`" for path in files) or "nothing"
    count = Counter("/".join(path.split("/")[:2]) for path in files)
    counts = ", ".join(f"{n} in `{folder}`" for folder, n in sorted(count.items()))
    return f"{len(files)} files ({counts})"


def text_of(record: Mapping[str, Any]) -> str:
    """Return the paragraphs that docs/kernels.md shows of a record."""
    about, parts = record["environment"], record["parts"]
    versions = about["versions"]
    failed = [name for part in parts.values() for name in part["failed"]]
    lines = [
        f"On {record['date'][:10]}, one {about['device']}, commit {about['commit'][:8]}, torch "
        f"{versions['torch']}, Triton {versions['triton']}:",
        "",
        "| part | passed | skipped | failed | seconds |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in PARTS:
        part = parts.get(name)
        own = "not run | | | " if part is None else (
            f"{part['passed']:,} | {part['skipped']:,} | {len(part['failed'])}"
            f"{'' if part['finished'] else ', cut off'} | {part['seconds']}"
        )  # fmt: skip
        lines.append(f"| {name} | {own} |")
    lines += ["", "Failed: " + (", ".join(f"`{name}`" for name in failed) or "none") + "."]
    lines += ["", f"Changed since: {listed(changed_files(record))}."]
    return "\n".join(lines) + "\n"


def newest_record() -> dict[str, Any]:
    """Return the last record of all devices."""
    records = [json.loads(path.read_text()) for path in RESULTS.glob("*/tests.json")]
    if not records:
        raise SystemExit(f"{RESULTS}: expected a tests.json, got none; run make gpu on a GPU")
    return max(records, key=lambda record: record["date"])


def page_with(record: Mapping[str, Any]) -> str:
    """Return docs/kernels.md with this record."""
    before, _, rest = PAGE.read_text().partition(BEGIN)
    return before + BEGIN + "\n" + text_of(record) + "\n" + END + rest.partition(END)[2]


def main(arguments: Sequence[str] | None = None) -> int:
    """Run parts and write the record, or show the last one in the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument(
        "--part", choices=PARTS, action="append", help="run this part alone (may be given again)"
    )
    parser.add_argument(
        "--rest", action="store_true", help="run what failed or was not reached, on the code of the record"
    )
    parser.add_argument("--workers", type=int, default=14)
    parser.add_argument("--seconds", type=float, default=PART_S, help="end each part after so many")
    parser.add_argument("--commit", help="the commit that runs, where the folder is no checkout")
    parser.add_argument(
        "--page", action="store_true", help="write the last record into docs/kernels.md and end"
    )
    given = parser.parse_args(arguments)
    if given.page:
        PAGE.write_text(page_with(newest_record()))
        return 0
    from qrt_eval.results.record import environment

    about = environment()
    if about["cuda"] is None:
        raise SystemExit("make gpu: expected a CUDA device, got none; make test runs on a CPU")
    about["commit"] = given.commit or about["commit"]
    device = re.sub(r"\W+", "_", about["device"].removeprefix("NVIDIA ").lower())
    path = RESULTS / device / "tests.json"
    files, good = file_hashes(), True
    for name in given.part or PARTS:
        old = json.loads(path.read_text()) if path.is_file() else None
        before = merged(old, files, {}).get(name)
        if given.rest and before is None:
            raise SystemExit(f"make gpu: {name}: expected a record on this code, got none; run it whole")
        part = run_part(name, given.workers, given.seconds, given.rest)
        if given.rest:
            part["seconds"] += before["seconds"]
        good &= part["finished"] and not part["failed"]
        record = {
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "environment": about,
            "parts": merged(old, files, {name: part}),
            "files": files,
        }
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(record, indent=1) + "\n")
        print(text_of(record))
    return int(not good)


if __name__ == "__main__":
    sys.exit(main())
