"""The lock that lets tests take turns on a GPU, tested with processes on a CPU."""

import fcntl
import multiprocessing
import os
import signal
from contextlib import contextmanager

import pytest

from gpu_turns import turn

LONG = 60  # seconds, after which a deadlock is a failure
SPAWN = multiprocessing.get_context("spawn")  # pytest's workers have threads


def write(folder, word):
    """Append one line to the log; concurrent lines do not mix."""
    log = os.open(folder / "log", os.O_WRONLY | os.O_APPEND | os.O_CREAT)
    os.write(log, f"{word}\n".encode())
    os.close(log)


def visit(folder, name, alone, rounds=1, inside=None, leave=None):
    """Take a turn; events, if given, tell that it has begun and when to end it."""
    for _ in range(rounds):
        with turn(alone, folder):
            write(folder, f"+{name}")
            if inside is not None:
                inside.set()
            if leave is not None:
                assert leave.wait(LONG)
            write(folder, f"-{name}")


@contextmanager
def visitors(folder, *arguments):
    """Run processes of `visit`; all must succeed."""
    processes = [SPAWN.Process(target=visit, args=(folder, *each)) for each in arguments]
    for process in processes:
        process.start()
    try:
        yield processes
        for process in processes:
            process.join(LONG)
        assert [process.exitcode for process in processes] == [0] * len(processes)
    finally:
        for process in processes:
            process.kill()


def lines(folder):
    return (folder / "log").read_text().split()


def wait_for_somebody_in_the_queue(folder):
    """Wait until a process holds the queue's lock, as it does only while it waits for the room."""
    with open(folder / "queue", "w") as queue:
        while True:
            try:
                fcntl.flock(queue, fcntl.LOCK_EX | fcntl.LOCK_NB)
                fcntl.flock(queue, fcntl.LOCK_UN)
            except BlockingIOError:
                return


def test_alone_excludes_all_others(tmp_path):
    with visitors(tmp_path, *[(f"{name}", name in "ab", 100) for name in "abcd"]):
        pass
    inside = set()
    for line in lines(tmp_path):
        (inside.add if line[0] == "+" else inside.remove)(line[1:])
        assert len(inside) == 1 or not inside & set("ab")
    assert len(lines(tmp_path)) == 800


def test_shared_turns_run_side_by_side(tmp_path):
    """Both turns begin before either ends."""
    leave, ins = SPAWN.Event(), [SPAWN.Event() for _ in range(2)]
    with visitors(tmp_path, ("a", False, 1, ins[0], leave), ("b", False, 1, ins[1], leave)):
        assert all(inside.wait(LONG) for inside in ins)
        leave.set()


def test_waiting_to_be_alone_is_not_overtaken(tmp_path):
    inside, leave = SPAWN.Event(), SPAWN.Event()
    with visitors(tmp_path, ("first", False, 1, inside, leave)):
        assert inside.wait(LONG)
        with visitors(tmp_path, ("alone", True)):
            wait_for_somebody_in_the_queue(tmp_path)
            with visitors(tmp_path, ("later", False)):
                leave.set()
    assert lines(tmp_path) == ["+first", "-first", "+alone", "-alone", "+later", "-later"]


@pytest.mark.parametrize("alone", [False, True])
def test_killed_process_gives_up_its_turn(tmp_path, alone):
    inside, never = SPAWN.Event(), SPAWN.Event()
    process = SPAWN.Process(target=visit, args=(tmp_path, "killed", alone, 1, inside, never))
    process.start()
    assert inside.wait(LONG)
    os.kill(process.pid, signal.SIGKILL)
    process.join(LONG)
    with visitors(tmp_path, ("next", True)):
        pass
    assert lines(tmp_path) == ["+killed", "+next", "-next"]
