"""The record of `make gpu`: from pytest's report, joined on the same code alone, shown in docs/kernels.md."""

import json

import pytest

import gpu_tests

REPORT = """<testsuites><testsuite><testcase classname="tests.kernels.test_a" name="test_good[1]"/>
<testcase classname="tests.kernels.test_a" name="test_bad"><failure>no</failure></testcase>
<testcase classname="tests.kernels.test_a" name="test_bad"><error>no</error></testcase>
<testcase classname="tests.mem.test_b" name="test_left"><skipped/></testcase></testsuite></testsuites>"""


def part(**other):
    return {"passed": 3, "skipped": 0, "failed": [], "seconds": 9, "finished": True, **other}


def record(**other):
    about = {"device": "NVIDIA H200", "commit": "0123456789", "versions": {"torch": "2.11", "triton": "3.6"}}
    files = gpu_tests.file_hashes()
    return {"date": "2026-11-29T00:00:00", "environment": about, "parts": {}, "files": files, **other}


def test_a_later_report_replaces_an_earlier_one(tmp_path):
    (tmp_path / "0.xml").write_text(REPORT)
    (tmp_path / "1.xml").write_text(
        REPORT.replace("<failure>no</failure>", "").replace("<error>no</error>", "")
    )
    bad, good, left = (
        f"tests/{name}"
        for name in (
            "kernels/test_a.py::test_bad",
            "kernels/test_a.py::test_good[1]",
            "mem/test_b.py::test_left",
        )
    )
    first = gpu_tests.read_reports([tmp_path / "0.xml"])
    assert first == {good: "passed", bad: "failed", left: "skipped"}
    both = gpu_tests.read_reports([tmp_path / "0.xml", tmp_path / "1.xml"])
    assert both == {good: "passed", bad: "passed", left: "skipped"}


SUITE = """
import pytest

def test_good(): pass
def test_left(): pytest.skip()
def test_bad(): assert 0  # mended
"""


def test_the_rest_of_a_part_runs_alone(tmp_path, monkeypatch):
    """What failed is mended; what passed is not run again, though it would fail now."""
    suite = tmp_path / "tests" / "test_some.py"
    suite.parent.mkdir()
    suite.write_text(SUITE)
    (tmp_path / "pytest.ini").write_text("[pytest]\naddopts = -q\n")  # as this project's
    monkeypatch.setattr(gpu_tests, "ROOT", tmp_path)
    monkeypatch.setattr(gpu_tests, "PARTS", {"some": ("tests",)})
    first = gpu_tests.run_part("some", 1, 60, rest=False)
    assert first["failed"] == ["tests/test_some.py::test_bad"] and first["finished"]
    assert (first["passed"], first["skipped"]) == (1, 1)
    suite.write_text(
        SUITE.replace("assert 0  # mended", "pass").replace("test_good(): pass", "test_good(): 1 / 0")
    )
    again = gpu_tests.run_part("some", 1, 60, rest=True)
    assert again["failed"] == [] and again["passed"] == 2 and again["finished"]
    assert gpu_tests.run_part("some", 1, 60, rest=True)["passed"] == 2


def test_parts_on_other_code_are_dropped():
    files = {"qrt/mem/slots.py": "a"}
    old = {"files": files, "parts": {"linear": part(), "models": part()}}
    new = {"models": part(passed=5)}
    assert gpu_tests.merged(old, files, new) == {"linear": part(), "models": part(passed=5)}
    assert gpu_tests.merged(old, {"qrt/mem/slots.py": "b"}, new) == new == gpu_tests.merged(None, files, new)


def test_a_record_says_what_failed_was_cut_off_and_has_changed():
    files = {**gpu_tests.file_hashes(), "qrt/mem/slots.py": "old", "qrt/mem/gone.py": "x"}
    del files["qrt/engine/engine.py"]
    text = gpu_tests.text_of(record(parts={"linear": part(failed=["t.py::x"], finished=False)}, files=files))
    assert "| linear | 3 | 0 | 1, cut off | 9 |" in text and "| models | not run" in text
    assert "Failed: `t.py::x`." in text
    assert "Changed since: `qrt/engine/engine.py`, `qrt/mem/gone.py`, `qrt/mem/slots.py`." in text


def test_many_changed_files_are_counted():
    files = [f"qrt/mem/{i}.py" for i in range(12)]
    assert gpu_tests.listed(files[:2]) == "`qrt/mem/0.py`, `qrt/mem/1.py`"
    assert gpu_tests.listed([*files, "qrt/engine/a/b.py"]) == "13 files (1 in `qrt/engine`, 12 in `qrt/mem`)"


def test_all_tests_of_kernels_are_in_one_part():
    named = [path for paths in gpu_tests.PARTS.values() for path in paths]
    assert len(named) == len(set(named)) and all((gpu_tests.ROOT / path).exists() for path in named)
    assert "tests/kernels" in gpu_tests.PARTS["elementwise"]


@pytest.mark.skipif(not list(gpu_tests.RESULTS.glob("*/tests.json")), reason="make gpu has recorded nothing")
def test_the_page_shows_the_last_record():
    """After a change of these folders: python tools/gpu_tests.py --page."""
    last = gpu_tests.newest_record()
    assert gpu_tests.PAGE.read_text() == gpu_tests.page_with(last)
    assert json.dumps(last) and last["environment"]["cuda"]
