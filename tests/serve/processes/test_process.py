"""What a child process of the server sets up for itself."""

import resource

import pytest

from qrt.serve.processes.process import MOST_OPEN_FILES, allow_open_files


@pytest.fixture
def limits():
    """(soft, hard) of open files; as they were afterwards."""
    before = resource.getrlimit(resource.RLIMIT_NOFILE)
    yield before
    resource.setrlimit(resource.RLIMIT_NOFILE, before)


def test_open_file_limit_is_raised(limits):
    _, hard = limits
    resource.setrlimit(resource.RLIMIT_NOFILE, (256, hard))
    allow_open_files()
    soft, kept = resource.getrlimit(resource.RLIMIT_NOFILE)
    assert kept == hard
    assert soft == (MOST_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MOST_OPEN_FILES))
    allow_open_files()
    assert resource.getrlimit(resource.RLIMIT_NOFILE) == (soft, hard)


@pytest.mark.parametrize("soft, hard, wanted", [
    (1024, resource.RLIM_INFINITY, MOST_OPEN_FILES), (1024, 4096, 4096), (1 << 20, 1 << 20, None),
    (resource.RLIM_INFINITY, resource.RLIM_INFINITY, None),
])  # fmt: skip
def test_a_limit_is_raised_and_never_lowered(monkeypatch, soft, hard, wanted):
    asked = []
    monkeypatch.setattr(resource, "getrlimit", lambda kind: (soft, hard))
    monkeypatch.setattr(resource, "setrlimit", lambda kind, limits: asked.append(limits))
    allow_open_files()
    assert asked == ([] if wanted is None else [(wanted, hard)])
