"""Where a checkpoint is made and put: killed at any step, in volumes, and beside folders of others."""

import errno
import hashlib
import os
import shutil
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file

from qrt.errors import CheckpointError, ConfigError
from qrt.model_files.folder import SINGLE
from qrt.quant.checkpoint import open_checkpoint
from qrt.quant.checkpoint.folder import TensorFolder
from qrt.quant.checkpoint.making import place
from qrt.quant.checkpoint.making.output import OutputFolder

CHANGES = {"os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.move", "shutil.copyfile"}
PLANS = {"resumed": {"seed": 0}, "begun anew": None}
STEPS = "first", "second"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    (folder / "config.json").write_text('{"dtype": "float32"}')
    save_file({name: torch.full((64,), float(i)) for i, name in enumerate("abcd")}, folder / SINGLE)
    (folder / "1_Pooling").mkdir()
    (folder / "1_Pooling/config.json").write_text("{}")
    return open_checkpoint(folder)


def run(source, out, plan):
    """Write the tensors of `source` in two steps, into two shards; return which steps were not there."""
    folder = OutputFolder(out, source, plan, max_shard_bytes=600)
    folder.begin()
    names, made = source.names(), []
    try:
        for step, own in zip(STEPS, (names[::2], names[1::2]), strict=True):
            if step not in folder.parts.labels:
                folder.add({name: source.tensor(name) for name in own})
                folder.finish_step(step, {})
                made.append(step)
    except BaseException:
        folder.abandon()
        raise
    folder.publish({}, set())
    return made


def content(folder):
    files = (path for path in sorted(folder.rglob("*")) if path.is_file())
    return {str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def killed(work, count):
    """Run `work` in a process that ends at its change number `count` to files; return whether it did.

    Changes count from the first one to the finished checkpoint.
    """
    if not (child := os.fork()):
        left = None

        def end(event, arguments):
            nonlocal left
            if event == "os.mkdir" and str(arguments[0]).endswith("/result"):
                left = count
            writes = event == "open" and isinstance(arguments[2], int) and arguments[2] & os.O_CREAT
            if left is not None and (event in CHANGES or writes):
                left -= 1
                if left < 0:
                    os._exit(9)

        sys.addaudithook(end)
        work()
        os._exit(0)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 9


def busy(monkeypatch, out):
    """Let no folder be moved to `out`, as where a volume is mounted."""
    rename = Path.rename

    def refused(path, target):
        if Path(target) == out:
            raise OSError(errno.EBUSY, "Device or resource busy")
        return rename(path, target)

    monkeypatch.setattr(Path, "rename", refused)


def volume(monkeypatch, out):
    monkeypatch.setattr(os.path, "ismount", lambda path: Path(path) == out)


KINDS = {"new": None, "empty": None, "busy": busy, "volume": volume}


@pytest.mark.parametrize(
    "kind, plan", [*((kind, "resumed") for kind in KINDS), ("new", "begun anew"), ("busy", "begun anew")]
)
def test_killed_at_every_step(kind, plan, source, tmp_path, monkeypatch):
    """The next run gives the same files, or finds them there; nothing else is left."""
    run(source, tmp_path / "whole", None)
    wanted, at, count, ends = content(tmp_path / "whole"), tmp_path / "at", 0, set()
    out = at / "out"
    monkeypatch.setattr(os, "fsync", lambda file: None)  # which takes most of the time
    if (prepare := KINDS[kind]) is not None:
        prepare(monkeypatch, out)
    while True:
        (at if kind == "new" else out).mkdir(parents=True)
        if not killed(lambda: run(source, out, PLANS[plan]), count):
            break
        try:
            ends.add(tuple(run(source, out, PLANS[plan])))
        except ConfigError as error:
            assert "already there" in str(error)
            ends.add("whole")
        assert content(out) == wanted, count
        assert [path.name for path in at.iterdir()] == ["out"], count
        shutil.rmtree(at)
        count += 1
    assert content(out) == wanted and [path.name for path in at.iterdir()] == ["out"]
    assert count > 15 and ends == {() if plan == "resumed" else STEPS, "whole"}


def test_a_volume_may_hold_what_its_system_made(source, tmp_path, monkeypatch):
    out = tmp_path / "out"
    (out / "lost+found").mkdir(parents=True)
    volume(monkeypatch, out)
    run(source, out, None)
    assert TensorFolder(out).names() == source.names()
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert sorted(path.name for path in out.iterdir() if path.is_dir()) == ["1_Pooling", "lost+found"]


FOREIGN = {
    "notes.txt": "mine",
    "plan.json": '{"plan": {}, "budget": 7}',  # somebody's own plan
    "00000.part": "of a film",
    "config.json": "{}",
    "result/figures.csv": "1,2",
    "lock": "of another program",
    ".hidden": "",
}


@pytest.mark.parametrize("name", FOREIGN)
@pytest.mark.parametrize("plan", PLANS)
def test_folders_of_others_are_left_alone(plan, name, source, tmp_path):
    own = tmp_path / "out.partial" / name
    own.parent.mkdir(parents=True)
    own.write_text(FOREIGN[name])
    with pytest.raises(ConfigError, match=r"out\.partial: .* which no run wrote; move it away, or choose"):
        run(source, tmp_path / "out", PLANS[plan])
    assert own.read_text() == FOREIGN[name] and not (tmp_path / "out").exists()


def test_a_file_put_among_the_parts_of_a_run(source, tmp_path):
    """It is refused before the run goes on, and it stays if it comes while the run goes on."""
    folder = OutputFolder(tmp_path / "out", source, {}, 10**9)
    folder.begin()
    folder.finish_step("first", {})
    folder.abandon()
    own = tmp_path / "out.partial" / "model.gguf"
    own.write_text("mine")
    with pytest.raises(ConfigError, match=r"got model\.gguf, which no run wrote"):
        OutputFolder(tmp_path / "out", source, {}, 10**9)
    own.unlink()
    folder = OutputFolder(tmp_path / "out", source, {}, 10**9)
    folder.begin()
    own.write_text("mine")
    folder.add({name: source.tensor(name) for name in source.names()})
    folder.publish({}, set())
    assert TensorFolder(tmp_path / "out").names() == source.names()
    assert content(tmp_path / "out.partial").keys() == {"model.gguf"}


@pytest.mark.parametrize("is_busy", [False, True])
def test_a_folder_filled_meanwhile_is_left_alone(is_busy, source, tmp_path, monkeypatch):
    """Somebody else's checkpoint comes to OUT after the run has begun."""
    out = tmp_path / "out"
    if is_busy:
        busy(monkeypatch, out)
    folder = OutputFolder(out, source, {}, 10**9)
    folder.begin()
    folder.add({name: source.tensor(name) for name in source.names()})
    folder.finish_step("all", {})
    out.mkdir()
    (out / "config.json").write_text("theirs")
    with pytest.raises((ConfigError, CheckpointError), match="out: "):
        folder.publish({}, set())
    assert (out / "config.json").read_text() == "theirs"
    assert (tmp_path / "out.partial/all.json").exists() and not (tmp_path / "out.partial/result").exists()


def test_a_folder_without_a_writable_parent(source, tmp_path, monkeypatch):
    (tmp_path / "out").mkdir()
    monkeypatch.setattr(os, "access", lambda path, mode: Path(path) != tmp_path)
    assert place.working_folder(tmp_path / "out") == tmp_path / "out/.partial"
    run(source, tmp_path / "out", {})
    assert [path.name for path in tmp_path.iterdir()] == ["out"]
    assert TensorFolder(tmp_path / "out").names() == source.names()
