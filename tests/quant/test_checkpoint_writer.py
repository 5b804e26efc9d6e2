"""CheckpointWriter: shards, bytes, what else is in the folder, and nothing half-written."""

import hashlib
import json
import os
import resource
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import transformers
from safetensors.torch import save_file

from qrt.errors import CheckpointError, ConfigError, UnsupportedError
from qrt.quant.affine import choose_qparams, quantize
from qrt.quant.checkpoint import CheckpointWriter, open_checkpoint
from qrt.quant.checkpoint.compressed_tensors import target_of
from qrt.quant.spec import Granularity, QuantSpec
from qrt.quant.weight import WeightData
from tiny_models import quantize_checkpoint, random_checkpoint

W4 = QuantSpec(4, False, Granularity.GROUP, 64)
TOOLS = "additional_chat_templates/tool_use.jinja"


@pytest.fixture(scope="module")
def source(tmp_path_factory):
    folder = tmp_path_factory.mktemp("plain")
    random_checkpoint(folder, "Qwen3ForCausalLM", dtype=torch.bfloat16)
    for name in ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "merges.txt", "vocab.json"):
        (folder / name).write_text(f"the bytes of {name}")
    (folder / "additional_chat_templates").mkdir()  # as transformers 5 saves all but the first
    for name in (
        "chat_template.jinja",
        "README.md",
        "pytorch_model.bin",
        "optimizer.pt",
        TOOLS,
        "tekken.json",
    ):
        (folder / name).write_text(f"the bytes of {name}")
    return folder


def writer(out: Path, source: Path, **options) -> CheckpointWriter:
    options = {"grid": ("w4a16", W4), "ignore": ["lm_head"], "metadata": {}, **options}
    return CheckpointWriter(out, open_checkpoint(source), **options)


def hashes(folder: Path) -> dict[str, str]:
    files = sorted(path for path in folder.rglob("*") if path.is_file())
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in files}


def test_shards_read_back_and_load(source, tmp_path):
    """Small shards: none too large but for one Linear alone, a Linear never split, an index that is right."""
    whole = tmp_path / "whole"
    limit = 40_000
    weights = quantize_checkpoint(source, whole, "w4a16", W4)
    quantize_checkpoint(source, tmp_path / "parts", "w4a16", W4, max_shard_bytes=limit)
    one, many = open_checkpoint(whole), open_checkpoint(tmp_path / "parts")
    files = sorted(path.name for path in (tmp_path / "parts").glob("*.safetensors"))
    assert len(files) > 3
    assert files == [f"model-{i + 1:05d}-of-{len(files):05d}.safetensors" for i in range(len(files))]
    index = json.loads((tmp_path / "parts/model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    assert index["metadata"]["total_size"] == many.num_bytes == one.num_bytes
    assert many.names() == one.names() == sorted(index["weight_map"])
    sizes: dict[str, list[int]] = {}
    for name, file in index["weight_map"].items():
        sizes.setdefault(file, []).append(many.spec(name).num_bytes)
    for file, parts in sizes.items():
        modules = {name.rpartition(".")[0] for name, at in index["weight_map"].items() if at == file}
        assert sum(parts) <= limit or len(modules) == 1, file
    for name in one.names():
        assert torch.equal(one.tensor(name), many.tensor(name)), name
    for module in weights:
        assert len({file for name, file in index["weight_map"].items() if name.startswith(f"{module}.")}) == 1
    ids = torch.arange(12)[None]
    logits = [transformers.AutoModelForCausalLM.from_pretrained(f)(ids).logits for f in (one.path, many.path)]
    assert torch.equal(*logits)


def test_reads_shards_of_transformers(source, tmp_path):
    """save_pretrained's own shards against its single file."""
    parts = random_checkpoint(tmp_path, "Qwen3ForCausalLM", dtype=torch.bfloat16, max_shard_size="150KB")
    one, many = open_checkpoint(source), open_checkpoint(parts)
    assert len(list(parts.glob("*.safetensors"))) > 2 and many.names() == one.names()
    for name in one.names():
        assert torch.equal(one.tensor(name), many.tensor(name)), name


def test_two_processes_write_the_same_bytes(source, tmp_path):
    """One file and many; and the process that wrote them never imported transformers."""
    for limit in (5_000_000_000, 40_000):
        quantize_checkpoint(source, tmp_path / f"here/{limit}", "w4a16", W4, max_shard_bytes=limit)
    code = """if True:
        import sys
        import torch
        from tiny_models import quantize_checkpoint
        from qrt.quant.spec import Granularity, QuantSpec
        torch.set_num_threads(1)
        spec = QuantSpec(4, False, Granularity.GROUP, 64)
        for limit in (5_000_000_000, 40_000):
            quantize_checkpoint(sys.argv[1], f"there/{limit}", "w4a16", spec, max_shard_bytes=limit)
        assert "transformers" not in sys.modules
        """
    environment = {**os.environ, "PYTHONHASHSEED": "7", "PYTHONPATH": os.pathsep.join(sys.path)}
    subprocess.run([sys.executable, "-c", code, source], check=True, cwd=tmp_path, env=environment)
    for limit in (5_000_000_000, 40_000):
        assert hashes(tmp_path / f"here/{limit}") == hashes(tmp_path / f"there/{limit}")


def test_only_what_belongs_there_is_copied(source, tmp_path):
    (source / "tokenizer_of_old").mkdir()  # a folder is no file of the tokenizer
    quantize_checkpoint(source, tmp_path / "out", "w4a16", W4)
    copied = {
        "tokenizer.json", "tokenizer_config.json", "tokenizer.model", "merges.txt", "vocab.json",
        "chat_template.jinja", "generation_config.json", "tekken.json", TOOLS,
    }  # fmt: skip
    files = (path for path in (tmp_path / "out").rglob("*") if path.is_file())
    assert {str(path.relative_to(tmp_path / "out")) for path in files} == copied | {
        "config.json",
        "model.safetensors",
    }
    for name in copied:
        assert (tmp_path / "out" / name).read_bytes() == (source / name).read_bytes()
    assert (tmp_path / "out/config.json").read_text().endswith("}\n")


def test_writes_into_an_empty_folder_and_a_new_parent(source, tmp_path):
    (tmp_path / "empty").mkdir()
    for out in (tmp_path / "empty", tmp_path / "new/deep"):
        quantize_checkpoint(source, out, "w4a16", W4)
        assert open_checkpoint(out).names()
        assert [path for path in out.parent.iterdir() if "partial" in path.name] == []


def test_a_folder_with_files_is_refused_and_untouched(source, tmp_path):
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(ConfigError, match="not an empty folder; remove it or choose another"):
        quantize_checkpoint(source, tmp_path, "w4a16", W4)
    with pytest.raises(ConfigError, match="mine.txt: already there"):
        quantize_checkpoint(source, tmp_path / "mine.txt", "w4a16", W4)
    assert [path.name for path in tmp_path.iterdir()] == ["mine.txt"]


@pytest.mark.parametrize("error", [RuntimeError, KeyboardInterrupt])
def test_an_exception_leaves_nothing(source, tmp_path, error):
    with pytest.raises(error), writer(tmp_path / "out", source, max_shard_bytes=1) as unfinished:
        unfinished.add_tensor("a", torch.zeros(4))
        unfinished.add_tensor("b", torch.zeros(4))
        assert [path.name.split("-")[0] for path in tmp_path.iterdir()] == ["out.partial"]
        raise error
    assert list(tmp_path.iterdir()) == []


def test_disk_error_is_one_line_and_leaves_nothing(source, tmp_path):
    """The system's own error: no file may grow beyond 100 kB."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, hard))
    try:
        with pytest.raises(CheckpointError, match="cannot be written.*File too large"):
            quantize_checkpoint(source, tmp_path / "out", "w4a16", W4)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert list(tmp_path.iterdir()) == []


def test_finished_steps_survive_for_the_same_plan_only(source, tmp_path):
    plain = open_checkpoint(source)
    names = [name for name in plain.names() if not name.rpartition(".")[0].endswith("_proj")]
    linears = quantize_checkpoint(source, tmp_path / "whole", "w4a16", W4)

    def run(plan, fail):
        with writer(tmp_path / "out", source, plan=plan) as unfinished:
            if "linears" not in unfinished.finished:
                for module, weight in linears.items():
                    unfinished.add_linear(module, weight)
                unfinished.finish_step("linears", {"error": 0.1})
            assert unfinished.notes("linears") == {"error": 0.1}
            module, weight = next(iter(linears.items()))
            assert torch.equal(unfinished.read_linear("linears", module).values, weight.values)
            for name in names:
                unfinished.add_tensor(name, plain.tensor(name))
                if fail:
                    raise RuntimeError
            unfinished.finish_step("rest", {})

    with pytest.raises(RuntimeError):
        run({"seed": 0}, fail=True)
    assert [path.name for path in tmp_path.iterdir() if "out" in path.name] == ["out.partial"]
    with pytest.raises(ConfigError, match=r"out\.partial: parts of another run \(seed differs\); remove"):
        run({"seed": 1}, fail=False)
    run({"seed": 0}, fail=False)
    assert hashes(tmp_path / "out") == hashes(tmp_path / "whole")
    assert not (tmp_path / "out.partial").exists()


def test_two_runs_do_not_write_the_same_parts(source, tmp_path):
    with pytest.raises(RuntimeError), writer(tmp_path / "out", source, plan={}):
        with pytest.raises(ConfigError, match="another run is writing there"):
            writer(tmp_path / "out", source, plan={}).__enter__()
        raise RuntimeError


def test_mixed_grids_are_named_below_the_class(source, tmp_path):
    """No group targets the class, to which vLLM would give every fused Linear."""
    other = ("w8a16", QuantSpec(8, True, Granularity.GROUP, 128))
    plain = open_checkpoint(source)
    modules = sorted({n.rpartition(".")[0] for n in plain.names() if "_proj" in n})
    eights = {module: other for module in modules if "mlp" in module}
    with writer(tmp_path / "out", source, overrides=eights) as mixed:
        for name in plain.names():
            module = name.rpartition(".")[0]
            if module not in modules:
                mixed.add_tensor(name, plain.tensor(name))
            else:
                _, spec = eights.get(module, ("w4a16", W4))
                scale, zero = choose_qparams(plain.tensor(name), spec, torch.bfloat16)
                codes = quantize(plain.tensor(name), scale, zero, spec)
                mixed.add_linear(module, WeightData(codes, scale, zero, bits=spec.bits))
    read = open_checkpoint(tmp_path / "out")
    groups = read.config["quantization_config"]["config_groups"]
    for group, inside in (("group_0", "self_attn"), ("group_1", "mlp")):
        own = [module for module in modules if inside in module]
        targets = groups[group]["targets"]
        assert [m for m in modules if target_of(m, targets)] == own and "Linear" not in targets
    for module in modules:
        assert read.linear(module)[0] == eights.get(module, ("w4a16",))[0]
    ids = torch.arange(12)[None]
    model = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert model(ids).logits.isfinite().all()
    for module in modules:
        wanted = read.linear(module)[1].dequantize().bfloat16()
        assert torch.equal(model.get_submodule(module).weight, wanted), module


def test_a_forgotten_tensor_is_noticed(source, tmp_path):
    with pytest.raises(AssertionError, match="never added.*lm_head.weight"), writer(tmp_path / "out", source):
        pass
    assert list(tmp_path.iterdir()) == []


def linear(**change) -> WeightData:
    data = {"values": torch.zeros(8, 128, dtype=torch.uint8), "bits": 4, **change}
    data.setdefault("scale", torch.ones(8, 2, dtype=torch.bfloat16))
    return WeightData(zero=torch.zeros(8, 2, dtype=torch.uint8), **data)


@pytest.mark.parametrize(
    "module, weight, message",
    [
        ("a", linear(bits=8), r"expected .* \(4, .*, got \(8,"),
        ("a", linear(scale=torch.ones(8, 1, dtype=torch.bfloat16)), r"expected .*, 2\), got .*, 1\)"),
        ("a", linear(scale=torch.ones(8, 2)), "model torch.bfloat16"),
        ("a", linear(perm=torch.arange(128)), "permuted"),
        ("lm_head", linear(), "ignore"),
    ],
)
def test_a_linear_that_the_config_would_misdescribe(source, tmp_path, module, weight, message):
    with pytest.raises(AssertionError, match=message), writer(tmp_path / "out", source) as unfinished:
        unfinished.add_linear(module, weight)


def test_schemes_and_sources_without_a_layout(source, tmp_path):
    with pytest.raises(UnsupportedError, match="w4a16.*got 'fp16'"):
        writer(tmp_path / "out", source, grid=("fp16", W4))
    with pytest.raises(UnsupportedError, match="'w8a8' does not store"):
        writer(tmp_path / "out", source, grid=("w8a8", QuantSpec(8, False, Granularity.CHANNEL)))
    quantize_checkpoint(source, tmp_path / "done", "w4a16", W4)
    with pytest.raises(UnsupportedError, match="already quantized"):
        writer(tmp_path / "out", tmp_path / "done")


@pytest.mark.parametrize("same", [True, False])
def test_a_stored_tied_head(tmp_path, same):
    """A copy of the embedding is left out; a head of its own stays, and config.json says that it is one: vLLM
    does not read the head of a model that is said to be tied."""
    plain = random_checkpoint(tmp_path / "plain", "LlamaForCausalLM", tie_word_embeddings=True)
    checkpoint = open_checkpoint(plain)
    tensors = {name: checkpoint.tensor(name).clone() for name in checkpoint.names()}
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"] + (0 if same else 1)
    save_file(tensors, plain / "model.safetensors", metadata={"format": "pt"})
    quantize_checkpoint(plain, tmp_path / "out", "w4a16", W4)
    written = open_checkpoint(tmp_path / "out")
    assert written.has("lm_head.weight") is not same and written.config["tie_word_embeddings"] is same
