"""The sampler against its definition: exact masks, distributions by chi-square, noise bit for bit."""

import numpy as np
import pytest
import torch

from qrt.engine.schedule.plan import ANY, Admission, SamplingRules
from qrt.engine.step.adjustments import Adjustments
from qrt.engine.step.sampler import SampleMeta, least_kept
from qrt.engine.step.sampler import sample as sample_step
from qrt.engine.step.table import RequestTable
from qrt.kernels.sample.ref import gumbel, uniform

CPU = torch.device("cpu")


def mix32(x: int) -> int:
    x = (x ^ (x >> 16)) * 0x7FEB352D & 0xFFFFFFFF
    x = (x ^ (x >> 15)) * 0x846CA68B & 0xFFFFFFFF
    return x ^ (x >> 16)


def mix64(x: int) -> int:
    mask = 2**64 - 1
    x = (x + 0x9E3779B97F4A7C15) & mask
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9 & mask
    x = (x ^ (x >> 27)) * 0x94D049BB133111EB & mask
    return x ^ (x >> 31)


def uniform_truth(seed: int, position: int, index: int) -> float:
    """The definition, in Python's unbounded integers."""
    key = mix64(mix64(seed % 2**64) ^ position)
    bits = mix32(mix32(index ^ (key & 0xFFFFFFFF)) ^ (key >> 32)) & 0x7FFFFFFF
    return min(float((np.float32(bits) + np.float32(0.5)) * np.float32(2.0**-31)), 1 - 2.0**-24)


@pytest.mark.parametrize("seed", [0, 1, -1, 2**63 - 1, -(2**63), 123456789])
def test_noise_is_the_definition_bit_for_bit(seed, device):
    positions = [0, 1, 77, 131071]
    index = torch.arange(-100, 200, dtype=torch.int32, device=device)
    got = uniform(
        torch.tensor([seed] * 4, device=device), torch.tensor(positions, device=device), index
    ).cpu()
    truth = [[uniform_truth(seed, p, i % 2**32) for i in range(-100, 200)] for p in positions]
    assert got.tolist() == truth


def test_noise_is_uniform_and_independent():
    rows, index = 200, torch.arange(5000, dtype=torch.int32)
    u = uniform(torch.arange(rows) % 4, torch.arange(rows) // 4, index).double()
    assert 0 < u.min() and u.max() < 1
    n = u.numel()
    counts = torch.histc(u, 100, 0, 1)
    assert ((counts - n / 100) ** 2 / (n / 100)).sum() < 160  # chi-square, 99 degrees: p < 1e-4
    centred = u - 0.5
    for other in (centred.roll(1, 0), centred.roll(1, 1), centred.roll(4, 0), centred.roll(7, 1)):
        assert abs(float((centred * other).mean()) * 12) < 5 / n**0.5
    # the fine steps near 0 are there: the smallest of n values is about 1/n
    assert u.min() < 20 / n
    within = uniform(torch.arange(rows) % 4, torch.arange(rows) // 4, ~index).double()
    assert abs(float((centred * (within - 0.5)).mean()) * 12) < 5 / n**0.5  # of a group: race and draw
    noise = gumbel(torch.arange(rows), torch.arange(rows), index).double()
    assert abs(float(noise.mean()) - 0.57722) < 5e-3 and abs(float(noise.var()) - np.pi**2 / 6) < 1e-2


def sample(logits, table, meta):
    """Without adjustments."""
    return sample_step(logits, table, Adjustments(logits.shape[1], (), logits.device), meta)


def admit(table, samplings):
    table.admit([Admission(row, sampling, np.zeros(1, np.int32)) for row, sampling in enumerate(samplings)])


def table_of(samplings, positions=None) -> RequestTable:
    table = RequestTable(len(samplings), 64, 0, CPU)
    admit(table, samplings)
    if positions is not None:
        table.length[: len(samplings)] = torch.tensor(positions, dtype=torch.int32)
    return table


def meta_of(samplings, rows=None) -> SampleMeta:
    rows = list(range(len(samplings))) if rows is None else rows
    custom_rows = [i for i, row in enumerate(rows) if samplings[row].filtered]
    ks = [samplings[rows[i]].top_k for i in custom_rows]
    return SampleMeta(
        torch.tensor(rows),
        torch.tensor(custom_rows) if custom_rows else None,
        filtered=torch.arange(len(custom_rows)) if custom_rows else None,
        max_top_k=max(ks) if ks and min(ks) > 0 else 0,
    )


def distribution(logits, temperature, top_k, top_p, min_p=0.0):
    """The definition in float64: kept tokens by share of the likeliest, by rank, then by cumulative
    probability, renormalised."""
    p = np.exp((logits - logits.max()) / temperature)
    p[p < min_p] = 0
    order = np.argsort(-p, kind="stable")
    kept = order[: top_k or None]
    inside = p[kept] / p[kept].sum()
    reach = np.cumsum(inside) - inside < top_p
    kept = kept[reach]
    out = np.zeros_like(p)
    out[kept] = p[kept] / p[kept].sum()
    return out


@pytest.mark.parametrize(
    ("temperature", "top_k", "top_p", "min_p"),
    [
        (1.0, 0, 1.0, 0.0),
        (0.6, 0, 1.0, 0.0),
        (1.7, 0, 1.0, 0.0),
        (1.0, 5, 1.0, 0.0),
        (1.0, 0, 0.7, 0.0),
        (0.8, 12, 0.8, 0.0),
        (1.0, 1, 1.0, 0.0),
        (1.0, 0, 1.0, 0.1),
        (1.3, 20, 0.9, 0.05),
    ],
)
def test_drawn_tokens_follow_the_distribution(temperature, top_k, top_p, min_p):
    """Chi-square over 60,000 draws, a position each, ten seeds; a token of probability 0 is never drawn."""
    logits = np.random.default_rng(3).normal(0, 1.5, 40)
    draws = 60_000
    truth = distribution(logits, temperature, top_k, top_p, min_p)
    table = table_of([SamplingRules(temperature, top_k, top_p, 99, None, min_p)])
    counts = np.zeros(40)
    for start in range(0, draws, 6000):
        table.length = torch.arange(start, start + 6000, dtype=torch.int32)
        for name in ("temperature", "top_k", "top_p", "min_p", "seed"):
            setattr(table, name, getattr(table, name)[:1].expand(6000))
        table.seed = table.seed + start
        rows = torch.arange(6000)
        some = rows if top_k or top_p < 1 or min_p else None
        meta = SampleMeta(rows, some, filtered=some, max_top_k=top_k)
        tokens = sample(torch.tensor(logits, dtype=torch.float32).expand(6000, 40), table, meta)
        counts += np.bincount(tokens.numpy(), minlength=40)
    assert counts[truth == 0].sum() == 0
    expected = truth[truth > 0] * draws
    chi2 = ((counts[truth > 0] - expected) ** 2 / expected).sum()
    degrees = len(expected) - 1
    assert chi2 < degrees + 5 * (2 * degrees) ** 0.5 + 5


@pytest.mark.parametrize("vocab", [1, 7, 50, 1000])
def test_kept_tokens_are_exact(vocab):
    """`least_kept` against the definition; ties with the last kept token are kept, in any order."""
    rng = np.random.default_rng(vocab)
    for _ in range(30):
        logits = np.round(rng.normal(0, 2, (4, vocab)) * rng.choice([2, 1000])) / 1000  # some with many ties
        top_k = rng.integers(0, vocab + 3, 4)
        top_p = rng.choice([0.01, 0.3, 0.9, 0.999, 1.0], 4)
        given = torch.tensor(logits, dtype=torch.float32)
        ks, ps = torch.tensor(top_k), torch.tensor(top_p, dtype=torch.float32)
        least = least_kept(given, ks, ps)
        if top_k.min() > 0:
            assert torch.equal(least, least_kept(given, ks, ps, int(top_k.max())))
        for row in range(4):
            p = distribution(given[row].double().numpy(), 1.0, int(top_k[row]), float(ps[row]))
            smallest = logits[row][p > 0].min()
            assert np.isclose(float(least[row]), smallest, atol=1e-6)


def test_top_p_one_cuts_nothing_despite_rounding():
    logits = torch.zeros(2, 100_000)
    least = least_kept(logits - torch.arange(100_000) * 1e-5, torch.tensor([0, 3]), torch.tensor([1.0, 1.0]))
    assert float(least[0]) == pytest.approx(-0.99999) and float(least[1]) == pytest.approx(-2e-5)


def test_top_p_too_small_for_fp32_keeps_the_likeliest():
    logits = torch.tensor([[0.0, 3.0, 1.0]])
    assert least_kept(logits, torch.tensor([0]), torch.tensor([1e-48])).item() == 3.0


def test_seeded_tokens_do_not_depend_on_the_batch():
    rng = np.random.default_rng(0)
    samplings = [
        SamplingRules(t, k, p, s, None)
        for t, k, p, s in [
            (1.0, 0, 1.0, 5), (0.0, 0, 1.0, 0), (0.7, 8, 1.0, 6), (1.3, 0, 0.9, 7), (0.9, 3, 0.5, 8),
        ]
    ]  # fmt: skip
    logits = torch.tensor(rng.normal(0, 2, (5, 500)), dtype=torch.float32)
    table = table_of(samplings, [3, 9, 3, 40, 7])
    together = sample(logits, table, meta_of(samplings))
    for rows in ([0], [2], [3], [4, 1], [4, 3, 2, 1, 0], [2, 4]):
        assert sample(logits[rows], table, meta_of(samplings, rows)).tolist() == together[rows].tolist()
    assert together[1] == logits[1].argmax()
    moved = table_of(samplings, [4, 9, 4, 41, 8])
    different = [sample(logits, t, meta_of(samplings)).tolist() for t in (table, moved)]
    assert different[0] != different[1], "the position must change the noise"


def test_banned_tokens_are_not_drawn_and_logits_stay():
    logits = torch.zeros(2, 4)
    logits[:, 2] = 50
    before = logits.clone()
    samplings = [SamplingRules(0.0, 0, 1.0, 0, None), SamplingRules(1.0, 0, 1.0, 0, None)]
    banned = torch.tensor([[0, 1, 1, 1], [2, 2, 0, 2], [ANY, ANY, ANY, ANY]])
    meta = SampleMeta(torch.arange(2), torch.arange(2), banned=banned)
    tokens = sample(logits, table_of(samplings), meta)
    assert tokens[0] == 0 and tokens[1] in (1, 3)
    assert torch.equal(logits, before)


def test_conditional_ban_needs_its_token_before():
    logits = torch.zeros(3, 4)
    logits[:, 2] = 50
    samplings = [SamplingRules(0.0, 0, 1.0, 0, None)] * 3
    table = table_of(samplings)
    table.last_token[:3] = torch.tensor([1, 3, 1])
    banned = torch.tensor([[0, 1], [2, 2], [1, 1]])
    meta = SampleMeta(torch.tensor([0, 2, 1]), torch.tensor([1, 2]), banned=banned)
    assert sample(logits, table, meta).tolist() == [2, 0, 2], "rows 2 and 1 ask; only 1 came after token 1"


def test_extreme_logits_give_a_token():
    samplings = [
        SamplingRules(1e-5, 0, 1.0, 0, None),
        SamplingRules(1.0, 1, 0.01, 0, None),
        SamplingRules(1e4, 0, 1.0, 0, None),
    ]
    logits = torch.full((3, 10), -torch.inf)
    logits[:, 6] = 30.0
    logits[0, 7] = 29.99
    assert sample(logits, table_of(samplings), meta_of(samplings)).tolist() == [6, 6, 6]


@pytest.mark.gpu
def test_gpu_draws_as_the_cpu_does():
    """Same bits, so the same tokens, save where two candidates are equal to the last bit of a logarithm."""
    torch.manual_seed(0)
    samplings = [
        SamplingRules(0.8, k, p, s, None) for s, (k, p) in enumerate([(0, 1.0), (50, 1.0), (0, 0.9)] * 20)
    ]
    logits = torch.randn(60, 128_256) * 3
    here = sample(logits, table_of(samplings, range(60)), meta_of(samplings))
    cuda = torch.device("cuda")
    table = RequestTable(60, 64, 0, cuda)
    admit(table, samplings)
    table.length[:60] = torch.arange(60, dtype=torch.int32, device=cuda)
    meta = meta_of(samplings)
    meta = SampleMeta(
        meta.rows.to(cuda),
        meta.custom_rows.to(cuda),
        filtered=meta.filtered.to(cuda),
        max_top_k=meta.max_top_k,
    )
    assert sample(logits.to(cuda), table, meta).cpu().tolist() == here.tolist()
