"""Share settings and fixtures between all tests.

Without a GPU, `gpu` tests skip and Triton runs in its interpreter. QRT_TEST_PTX executes what Triton compiles
instead (tools/ptx): `some` runs the tests marked `ptx`, exhaustive ones too, `all` runs all. With
QRT_TEST_GPU=only the tests that use no GPU are left out (tools/gpu_tests.py). Tests of the `real` model skip
until it is made, and `exhaustive` ones unless QRT_TEST_EXHAUSTIVE is set.
"""

import gc
import logging
import os
import sys
from collections import defaultdict
from contextlib import ExitStack

os.environ["HF_HUB_OFFLINE"] = "1"  # before any import reads it; tests have their own Hub (hub_server.py)

import hypothesis
import pytest
import torch

import gpu_turns
import interpreter
import parsing
import real_model
from backends import GPU, PTX, PTX_SEED, PTX_SM, PTX_TESTS
from pairs import covering, numbered
from ptx import launch
from qrt.gc import short_collections

GPU_ONLY = os.environ.get("QRT_TEST_GPU") == "only"
EXHAUSTIVE = os.environ.get("QRT_TEST_EXHAUSTIVE") == "1"
kept_short = ExitStack()  # that keeps garbage collections short while it is open

parsing.take_turns()
if PTX:
    launch.install(PTX_SM)
    launch.settings.update({"seed": int(PTX_SEED)} if PTX_SEED else {})
elif not GPU:
    os.environ.setdefault("TRITON_INTERPRET", "1")  # before any kernel module is imported
    interpreter.hasten()
# no test fails because the machine is busy
PATIENT = {"deadline": None, "suppress_health_check": [hypothesis.HealthCheck.too_slow]}
hypothesis.settings.register_profile("patient", **PATIENT)
hypothesis.settings.register_profile("thorough", max_examples=10_000, **PATIENT)
hypothesis.settings.load_profile("patient")
torch.set_num_threads(1)  # two pytest workers share two cores


def pytest_collection_modifyitems(config, items):
    if PTX_TESTS == "some":
        small = [item for item in items if _is_small(item)]
        small = small if EXHAUSTIVE else _in_turn(small)
        config.hook.pytest_deselected(items=[item for item in items if item not in small])
        items[:] = small
    if GPU_ONLY:
        using = [item for item in items if _uses_gpu(item)]
        config.hook.pytest_deselected(items=[item for item in items if not _uses_gpu(item)])
        items[:] = using
    for item in items:
        executed = PTX and PTX_SM == 90 and _is_small(item)
        if item.get_closest_marker("gpu") and not GPU and not executed:
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
        if item.get_closest_marker("real") and not real_model.is_there():
            item.add_marker(pytest.mark.skip(reason=real_model.MISSING))
    if not (EXHAUSTIVE or PTX):
        _mark_all_but_pairs(items)
    for item in items:
        if item.get_closest_marker("exhaustive") and not (EXHAUSTIVE or PTX_TESTS == "some"):
            item.add_marker(pytest.mark.skip(reason="one of many alike; `make exhaustive` runs all"))


def pytest_collection_finish():
    """Freeze what exists before the first test, so garbage collection does not search it each time."""
    kept_short.enter_context(short_collections())


@pytest.fixture
def unfrozen():
    """Let garbage collections search everything, as in a user's process."""
    kept_short.close()
    gc.unfreeze()
    yield
    gc.unfreeze()
    kept_short.enter_context(short_collections())


@pytest.hookimpl(wrapper=True)
def pytest_runtest_protocol(item):
    """Let tests that use the GPU take turns, with their fixtures; see gpu_turns."""
    if not (GPU and _uses_gpu(item)):
        return (yield)
    with gpu_turns.turn(item.get_closest_marker("alone") is not None):
        try:
            return (yield)
        finally:
            gpu_turns.give_back()


def _uses_gpu(item):
    return item.get_closest_marker("gpu") is not None or "device" in item.fixturenames


@pytest.fixture(autouse=True)
def room_on_the_gpu(request):
    """Fail a test that takes so much GPU memory that others beside it may run out."""
    shared = GPU and _uses_gpu(request.node) and request.node.get_closest_marker("alone") is None
    if shared and torch.cuda.is_initialized():
        torch.cuda.reset_peak_memory_stats()
    yield
    if shared and (wrong := gpu_turns.is_too_large()):
        pytest.fail(wrong)


def _mark_all_but_pairs(items):
    """Mark runs of tests marked `pairs` exhaustive, but for some in which each two values come together."""
    tests = defaultdict(list)
    for item in items:
        left_out = item.get_closest_marker("exhaustive") or item.get_closest_marker("skip")
        if item.get_closest_marker("pairs") and not left_out:
            tests[item.nodeid.partition("[")[0]].append(item)
    for runs in tests.values():
        taken = covering(numbered([item.callspec.params for item in runs]))
        for number, item in enumerate(runs):
            if number not in taken:
                item.add_marker(pytest.mark.exhaustive)


def _in_turn(items):
    """Keep one of two tests that differ in when copies arrive: late and early in turn."""
    turns, kept = {}, []
    for item in items:
        copies = _parameters(item).get("copies")
        turn = turns.setdefault(item.nodeid.replace(str(copies), ""), len(turns))
        if copies in (None, ("late", "early")[turn % 2]):
            kept.append(item)
    return kept


def _parameters(item):
    return item.callspec.params if hasattr(item, "callspec") else {}


def _is_small(item):
    """Return whether a `ptx` mark of the test names these parameters, name=[values], or none at all."""
    parameters = _parameters(item)
    return any(
        all(parameters[name] in values for name, values in mark.kwargs.items())
        for mark in item.iter_markers("ptx")
    )


@pytest.fixture(autouse=True)
def root_logger():
    """Restore the root logger. A command's logging handler writes to this test's stderr, which closes."""
    root = logging.getLogger()
    handlers, level = list(root.handlers), root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)


@pytest.fixture(autouse=True)
def seeded():
    """Give every test the same random numbers, and only its own kernel launches."""
    torch.manual_seed(0)
    launch.written.clear()
    launch.reached.clear()


@pytest.fixture
def device() -> torch.device:
    """Return where kernel tests put their tensors: the GPU, or the CPU with Triton's interpreter."""
    return torch.device("cuda" if GPU else "cpu")


@pytest.fixture
def count_lines():
    """Return `count(f, *args)` -> (lines of Python run inside f, its result): counted, not timed."""

    def count(function, *args, **kwargs):
        lines = 0

        def trace(frame, event, arg):
            nonlocal lines
            lines += event == "line"
            return trace

        before = sys.gettrace()
        sys.settrace(trace)
        try:
            result = function(*args, **kwargs)
        finally:
            sys.settrace(before)
        return lines, result

    return count
