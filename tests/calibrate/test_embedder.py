"""An embedder is calibrated as any model; its files of sentence-transformers go along."""

import json

import torch

import qrt
from small_tokenizers import byte_level, save
from tiny_models import random_checkpoint


def test_vectors_of_a_calibrated_embedder(calib, tmp_path):
    body = save(byte_level(), random_checkpoint(tmp_path / "body", "Qwen3Model", dtype=torch.bfloat16))
    kinds = {"": "models.Transformer", "1_Pooling": "models.Pooling"}
    (body / "modules.json").write_text(json.dumps([{"path": at, "type": kind} for at, kind in kinds.items()]))
    (body / "1_Pooling").mkdir()
    (body / "1_Pooling/config.json").write_text(json.dumps({"pooling_mode_mean_tokens": True}))
    qrt.calibrate(
        body, tmp_path / "w8", bits=8, calib=str(calib), n_samples=4, seqlen=64, eval_samples=0, device="cpu"
    )
    assert json.loads((tmp_path / "w8/1_Pooling/config.json").read_text())["pooling_mode_mean_tokens"]
    settings = {"kv_cache_memory_bytes": 1 << 22, "dtype": "float32"}
    texts, vectors = ["The quick brown fox", "jumps over the lazy dog"], []
    for folder in (body, tmp_path / "w8"):
        llm = qrt.LLM(str(folder), **settings)
        assert llm.engine.pooling.kind == "mean"
        vectors.append(torch.tensor([one.outputs.embedding for one in llm.embed(texts, use_tqdm=False)]))
    assert torch.cosine_similarity(*vectors).min() >= 0.999
