"""Models by their names on the Hub: the files that are downloaded, the requests, and the errors."""

import errno
import json
import logging
import os
import shutil
import subprocess
import sys

import httpx
import huggingface_hub
import pytest

from hub_server import TOKEN, Repo, asks, hub, repo_of
from qrt.assets import model_path
from qrt.config import EngineConfig
from qrt.engine.preflight import preflight
from qrt.errors import CheckpointError, ConfigError, UnsupportedError
from qrt.model_files import hub as hub_module
from qrt.model_files.location import (
    api_name,
    model_commit,
    model_folder,
    model_name,
    pinned_name,
    tokenizer_folder,
)

TINY = model_path("tiny")
CONFIG = (TINY / "config.json").read_bytes()
NEEDED = {path.name for path in TINY.iterdir()} - {"README.md"}
BESIDE = {
    "pytorch_model.bin": b"pickle",
    "model-Q4_K_M.gguf": b"GGUF",
    "consolidated.safetensors": b"again",
    "model.fp16.safetensors": b"again",
    "original/consolidated.00.pth": b"again",
    "original/tokenizer.model": b"again",
    "onnx/model.onnx": b"again",
    "tokenizer/model.safetensors": b"another part of a pipeline",
}


@pytest.fixture
def asking(monkeypatch, tmp_path):
    """Let the client ask a Hub of this test's repositories; a folder of its own is the cache."""
    with hub({}) as server:
        monkeypatch.chdir(tmp_path)
        server.change = asks(server, monkeypatch, tmp_path / "cache")
        yield server


def refusal(name, **options):
    """Return the error for a model, which must be one line."""
    with pytest.raises((CheckpointError, ConfigError)) as caught:
        model_folder(name, **options)
    assert "\n" not in str(caught.value) and TOKEN not in str(caught.value)
    return str(caught.value)


def weights_asked(server):
    return [path for _, path in server.requests if path.endswith((".safetensors", ".bin", ".gguf", ".pth"))]


# -- what comes ------------------------------------------------------------------------------------------


def test_only_needed_files_are_downloaded(asking):
    repo = asking.repos["org/tiny"] = repo_of(TINY)
    repo.files |= BESIDE
    folder = model_folder("org/tiny")
    assert {str(path.relative_to(folder)) for path in folder.rglob("*")} == NEEDED
    for name in NEEDED:
        assert (folder / name).read_bytes() == repo.files[name], name
    asked = {path.partition(f"{repo.commit}/")[2] for method, path in asking.requests if method == "GET"}
    assert asked - {""} == NEEDED


def test_side_files_of_other_engines_come_too(asking):
    more = {
        "quantize_config.json": b"{}",
        "chat_template.jinja": b"x",
        "additional_chat_templates/rag.jinja": b"y",
        "vocab.json": b"{}",
        "merges.txt": b"",
        "tokenizer.model": b"m",
        "README.md": b"",
        "recipe.yaml": b"",
    }
    asking.repos["org/more"] = Repo({"config.json": CONFIG, "model.safetensors": b"", **more})
    folder = model_folder("org/more")
    found = {str(path.relative_to(folder)) for path in folder.rglob("*") if path.is_file()}
    assert found == {"config.json", "model.safetensors", *more} - {"README.md", "recipe.yaml"}


def test_only_shards_of_the_index_are_downloaded(asking):
    index = {"weight_map": {"a": "model-1-of-2.safetensors", "b": "model-2-of-2.safetensors"}}
    files = {f"model-{i}-of-2.safetensors": b"x" for i in (1, 2)}
    files |= {"model.safetensors.index.json": json.dumps(index).encode(), "other.safetensors": b"y"}
    repo = asking.repos["org/two"] = Repo({"config.json": CONFIG, **files})
    folder = model_folder("org/two")
    assert {path.name for path in folder.iterdir()} == {"config.json", *files} - {"other.safetensors"}
    del repo.files["model-2-of-2.safetensors"]
    asking.requests.clear()
    wanted = "model.safetensors.index.json names 'model-2-of-2.safetensors', which is not beside it"
    assert wanted in refusal("org/two")
    assert not any(path.endswith("-of-2.safetensors") for _, path in asking.requests)


def test_a_tokenizer_and_random_weights_need_no_weights(asking):
    asking.repos["org/tiny"] = repo_of(TINY)
    folder = tokenizer_folder("org/tiny")
    assert {path.name for path in folder.iterdir()} == NEEDED - {
        "model.safetensors",
        "generation_config.json",
    }
    config, *_ = preflight(EngineConfig("org/tiny", load_format="dummy"))
    assert config.model == str(folder) and not weights_asked(asking)


def test_interrupted_download_resumes(asking):
    repo = asking.repos["org/tiny"] = repo_of(
        TINY, cut_off=(10_600_000, 1)
    )  # the client reads 10 MiB at once
    assert (model_folder("org/tiny") / "model.safetensors").read_bytes() == repo.files["model.safetensors"]
    assert asking.ranges == [10 * 2**20]


def test_two_processes_download_once(asking, tmp_path):
    asking.repos["org/tiny"] = repo_of(TINY, seconds=0.3)
    given = {"HF_ENDPOINT": asking.url, "HF_HOME": str(tmp_path / "home"), "HF_HUB_OFFLINE": "0"}
    code = "from qrt.model_files.location import model_folder; print(model_folder('org/tiny'))"
    command = [sys.executable, "-c", code]
    both = [
        subprocess.Popen(command, env={**os.environ, **given}, stdout=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    places = {process.communicate()[0] for process in both}
    assert len(places) == 1 and places.pop().startswith(str(tmp_path / "home" / "hub"))
    assert asking.asked("GET", "cdn/org/tiny/" + asking.repos["org/tiny"].commit + "/model.safetensors") == 1


# -- names and revisions ---------------------------------------------------------------------------------


def test_an_existing_folder_wins(asking, tmp_path):
    shutil.copytree(TINY, tmp_path / "org/tiny")
    assert str(model_folder("org/tiny")) == "org/tiny" and not asking.requests
    wanted = "revision: expected none for the folder org/tiny, got 'v1'; leave it out"
    assert refusal("org/tiny", revision="v1") == wanted


@pytest.mark.parametrize(
    "name", ["./org/tiny", "/org/tiny", "~/tiny", "org/tiny/deep", "tinny", "org/", "../tiny", "a b/c"]
)
def test_names_that_look_like_paths_are_not_requested(name, asking):
    assert "no such folder; give a checkpoint folder, ORG/NAME[@REVISION]" in refusal(name)
    assert not asking.requests


def test_revisions(asking):
    repo = asking.repos["org/tiny"] = Repo({"config.json": CONFIG, "model.safetensors": b"x"})
    repo.tags["v1"] = repo.commit
    folder = model_folder("org/tiny@v1")
    assert folder == model_folder("org/tiny", revision="v1") == model_folder(f"org/tiny@{repo.commit}")
    assert (model_name(folder), model_commit(folder)) == ("org/tiny", repo.commit)
    assert pinned_name(folder) == f"org/tiny@{repo.commit}"
    assert api_name("org/tiny@v1") == api_name(folder) == "org/tiny"
    assert "no revision 'v2'; give a branch, a tag or a commit of" in refusal("org/tiny@v2")
    assert (
        refusal("org/tiny@v1", revision="v2")
        == "revision: expected one, got 'v2' and org/tiny@v1; name one of the two"
    )


def test_a_folder_of_the_cache_is_known_again(asking, monkeypatch):
    asking.repos["org/tiny"] = Repo({"config.json": CONFIG, "model.safetensors": b"x"})
    folder = model_folder("org/tiny")
    monkeypatch.chdir(folder)
    asking.requests.clear()
    assert model_name(".") == model_name(model_folder(str(folder))) == "org/tiny" and not asking.requests
    assert (model_name("tiny"), model_commit("tiny"), api_name("tiny")) == ("tiny", None, "tiny")


def test_download_dir(asking, tmp_path):
    asking.repos["org/tiny"] = repo_of(TINY)
    config, sizes, _ = preflight(
        EngineConfig("org/tiny", revision="main", download_dir=str(tmp_path / "mine"))
    )
    assert (
        config.model.startswith(f"{tmp_path / 'mine'}/models--org--tiny/snapshots/") and sizes.num_layers == 6
    )
    assert (config.revision, config.download_dir) == (None, None) and preflight(config)[0] == config


def test_the_tokenizers_revision(asking):
    repo = asking.repos["org/tiny"] = repo_of(TINY)
    repo.tags["old"] = repo.commit
    config, *_ = preflight(EngineConfig("org/tiny", tokenizer_revision="old"))
    assert config.tokenizer == config.model
    with pytest.raises(CheckpointError, match="no revision 'new'"):
        preflight(EngineConfig("tiny", tokenizer="org/tiny", tokenizer_revision="new"))


# -- what is refused before weights come -----------------------------------------------------------------


@pytest.mark.parametrize(
    "files, error, message",
    [
        ({"config.json": b'{"architectures": ["BertModel"]}'}, UnsupportedError, "unknown architecture"),
        ({"adapter_config.json": b"{}"}, CheckpointError, "org/x: no config.json; an adapter"),
        ({"x-Q4_0.gguf": b"GGUF"}, CheckpointError, "org/x: no config.json; x-Q4_0.gguf is GGUF"),
        ({"config.json": CONFIG, "pytorch_model.bin": b"x"}, CheckpointError, "org/x: expected safetensors"),
        ({"config.json": CONFIG, "x.gguf": b"x"}, CheckpointError, "org/x: x.gguf is GGUF"),
        ({"config.json": CONFIG}, CheckpointError, "org/x: no weights"),
        ({"config.json": CONFIG, "consolidated.safetensors": b"x"}, CheckpointError, "got consolidated"),
        ({"config.json": CONFIG, "adapter_model.safetensors": b"x"}, CheckpointError, "got adapter_model"),
    ],
)  # fmt: skip
def test_unsupported_model_is_refused_before_its_weights(files, error, message, asking):
    weights = {"model.safetensors": b"x"} if error is UnsupportedError else {}
    asking.repos["org/x"] = Repo({**files, **weights})
    with pytest.raises(error, match=message):
        preflight(EngineConfig("org/x"))
    assert not weights_asked(asking)


def test_full_disk_is_reported_before_the_download(asking, monkeypatch):
    asking.repos["org/tiny"] = repo_of(TINY)
    usage = shutil.disk_usage("/")
    monkeypatch.setattr(hub_module.shutil, "disk_usage", lambda path: usage._replace(free=70_000_000))
    assert "0.01 GB are left to download, and " in (said := refusal("org/tiny"))
    assert "has 0.07 GB free; free some, or keep models elsewhere with --download-dir" in said
    assert not weights_asked(asking)


def test_disk_full_during_download(asking, monkeypatch):
    asking.repos["org/tiny"] = repo_of(TINY)

    def full(*words, **options):
        raise OSError(errno.ENOSPC, "No space left on device")

    monkeypatch.setattr(huggingface_hub, "snapshot_download", full)
    assert "org/tiny: no space left in" in (said := refusal("org/tiny")) and "free some" in said


def test_a_cache_that_cannot_be_written(asking, tmp_path):
    asking.repos["org/tiny"] = repo_of(TINY)
    (tmp_path / "file").write_text("")
    said = refusal("org/tiny", download_dir=str(tmp_path / "file"))
    assert "cannot be used (Not a directory); name another --download-dir" in said


# -- who may have it, and who answers --------------------------------------------------------------------


def test_models_that_are_hidden_or_gated(asking):
    asking.repos |= {"org/private": repo_of(TINY, private=True), "org/gated": repo_of(TINY, gated=True)}
    login = "run `hf auth login` or set HF_TOKEN"
    for name in ("org/nothing", "org/private"):
        assert refusal(name) == (
            f"{name}: no such folder here, and {asking.url} shows no such model; check the name, and for a "
            f"private one {login}"
        )
    gated = f"org/gated: its owners grant access; ask for it at {asking.url}/org/gated, then {login}"
    assert refusal("org/gated") == gated
    asking.change(hub_token="hf_wrong")
    assert refusal("org/private") == (
        f"org/private: {asking.url} does not accept the token; {login}, or unset HF_TOKEN"
    )
    asking.change(hub_token=TOKEN)
    for name in ("org/private", "org/gated"):
        assert {path.name for path in model_folder(name).iterdir()} == NEEDED
    assert "shows no such model" in refusal("org/nothing")
    assert asking.leaks == [], "the token went to another host than the Hub's"


def test_a_token_without_access(asking):
    asking.repos["org/gated"] = repo_of(TINY, gated=True, closed=True)
    asking.change(hub_token=TOKEN)
    assert "its owners grant access" in refusal("org/gated")


def test_offline_uses_the_cache_and_makes_no_request(asking):
    asking.repos["org/tiny"] = repo_of(TINY)
    folder = model_folder("org/tiny")
    asking.change(hub_offline=True)
    asking.requests.clear()
    assert model_folder("org/tiny") == folder == tokenizer_folder("org/tiny")
    assert f"org/other: no such folder here, and not in {hub_module.ENV.hub_cache}; " in (
        said := refusal("org/other")
    )
    assert "unset HF_HUB_OFFLINE, or bring the files from another machine (hf download org/other" in said
    (folder / "model.safetensors").unlink()
    assert "a weight file is not in the cache" in refusal("org/tiny")
    assert tokenizer_folder("org/tiny") == folder
    (folder / "tokenizer.json").unlink()
    assert f"only a part of it is in the cache, {folder}" in refusal("org/tiny")
    assert not asking.requests


def test_without_a_network_the_cache_has_to_do(asking, caplog):
    asking.repos["org/tiny"] = repo_of(TINY)
    folder = model_folder("org/tiny")
    asking.change(hub_endpoint="http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING, "qrt"):
        assert model_folder("org/tiny") == folder
    (line,) = [record.getMessage() for record in caplog.records if record.name == "qrt.model_files.hub"]
    assert line.startswith("org/tiny: the Hub could not be asked (") and folder.name in line
    said = refusal("org/other")
    wanted = (
        "http://127.0.0.1:9 does not send it (ConnectError: [Errno 111] Connection refused); check the net"
    )
    assert wanted in said
    asking.change(hub_endpoint="mirror.example")
    assert refusal("org/other") == "HF_ENDPOINT: expected a URL such as https://HOST, got 'mirror.example'"


@pytest.mark.parametrize(
    "how, reason",
    [({"status": 500}, "Server error '500 "), ({"headers": False}, "FileMetadataError: Response from ")],
)
def test_wrong_answer_of_the_hub(how, reason, asking):
    asking.repos["org/tiny"] = repo_of(TINY, **how)
    assert f"{asking.url} does not send it (" in (said := refusal("org/tiny"))
    assert reason in said and "check the network, HF_ENDPOINT and the proxy, and run it again" in said


def test_silent_hub_is_reported(asking, monkeypatch):
    def silent(*words, **options):
        raise httpx.ReadTimeout("The read operation timed out")

    monkeypatch.setattr(huggingface_hub.HfApi, "model_info", silent)
    assert f"{asking.url} does not send it (ReadTimeout: The read operation timed out)" in refusal("org/tiny")


def test_cached_dataset_loads_without_a_network(asking, caplog):
    import datasets
    from huggingface_hub import constants

    asking.repos["datasets/org/rows"] = Repo({"rows.jsonl": b'{"text": "a"}'})
    with hub_module.dataset("org/rows"):
        assert not constants.HF_HUB_OFFLINE and not datasets.config.HF_HUB_OFFLINE
    said = "org/none: no such folder here, and .* shows no such dataset; check the name"
    with pytest.raises(CheckpointError, match=said), hub_module.dataset("org/none"):
        pass
    asking.repos["datasets/org/gated"] = Repo({"rows.jsonl": b'{"text": "a"}'}, gated=True)
    granted = "org/gated: its owners grant access; ask for it at .*/datasets/org/gated"
    with pytest.raises(CheckpointError, match=granted), hub_module.dataset("org/gated"):
        # as `datasets` does, whose own endpoint is that of the environment
        raise datasets.exceptions.DatasetNotFoundError("Dataset 'org/gated' is a gated dataset on the Hub.")
    with (
        pytest.raises(CheckpointError, match="org/rows: no revision 'v9'"),
        hub_module.dataset("org/rows", "v9"),
    ):
        pass
    asking.change(hub_endpoint="http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING, "qrt"), hub_module.dataset("org/rows"):
        assert constants.HF_HUB_OFFLINE and datasets.config.HF_HUB_OFFLINE
    assert not constants.HF_HUB_OFFLINE
    assert "org/rows: the Hub could not be asked ([Errno 111] Connection refused)" in caplog.text
    asking.change(hub_endpoint="mirror.example")
    with pytest.raises(ConfigError, match="^HF_ENDPOINT: expected a URL"), hub_module.dataset("org/rows"):
        pass
