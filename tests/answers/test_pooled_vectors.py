"""What callers get of the engine's vectors, against torch."""

import numpy as np
import pytest
import torch

from qrt.answers.pooling.pairs import Pairs
from qrt.answers.pooling.processor import PoolingProcessor
from qrt.answers.pooling.task import finish
from qrt.arch.pooling import Pooling
from qrt.engine.schedule.output import StepDelta
from qrt.engine.schedule.request import FinishReason
from qrt.request.pooling import PoolingParams
from qrt.text.tokenizer import Tokenizer

VECTORS = torch.cat([torch.randn(5, 7, generator=torch.Generator().manual_seed(0)) * 40, torch.zeros(1, 7)])
LABELS = tuple("abcdefg")


@pytest.mark.parametrize(
    "activation, wanted",
    [("softmax", VECTORS.softmax(-1)), ("sigmoid", VECTORS.sigmoid()), ("none", VECTORS)],
)
def test_numbers_of_labels(activation, wanted):
    pooling = Pooling("classify", "last", labels=LABELS, activation=activation)
    got = torch.from_numpy(finish(VECTORS.numpy(), pooling, PoolingParams()))
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-30)
    plain = finish(VECTORS.numpy(), pooling, PoolingParams(use_activation=False))
    assert np.array_equal(plain, VECTORS)


@pytest.mark.parametrize("dimensions", [None, 3])
def test_embeddings_are_cut_then_normalized(dimensions):
    pooling = Pooling("embed", "last", normalize=True, dimensions=(3,))
    got = torch.from_numpy(finish(VECTORS.numpy(), pooling, PoolingParams(dimensions=dimensions)))
    torch.testing.assert_close(got, torch.nn.functional.normalize(VECTORS[:, :dimensions], dim=-1))


def test_results_are_tensors_as_in_vllm():
    for kind, wanted in (("last", VECTORS[0]), ("all", VECTORS)):
        pooling = Pooling("embed", kind, normalize=False)
        task = "token_embed" if kind == "all" else "embed"
        collector = PoolingProcessor("r", [1], pooling, PoolingParams(task=task))
        collector.process(StepDelta("r", finish_reason=FinishReason.LENGTH, pooled=VECTORS.numpy()))
        assert torch.equal(collector.output().outputs.data, wanted)


def test_pairs_are_scored_by_their_cosine():
    pooling, params = Pooling("embed", "last", normalize=False), PoolingParams(task="embed")
    texts = [("one", "two"), ("one", "three"), ("four", "five"), ("one", "four")]
    pairs = Pairs(Tokenizer("tiny"), pooling, texts, params, max_model_len=99)
    vectors = [row.numpy() for row in VECTORS[: len(pairs.prompts)]]
    wanted = [torch.cosine_similarity(*VECTORS[list(places)], dim=0).item() for places in pairs.of_pair]
    assert pairs.scores(vectors) == pytest.approx(wanted, rel=1e-5)
