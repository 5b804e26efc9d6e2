"""Padded decode steps against the engine without them, on a CPU; recording is tested on a GPU."""

import gc
import weakref
from contextlib import contextmanager
from copy import copy
from importlib import import_module

import numpy as np
import pytest
import torch
from fake_decoder import FakeDecoder

from qrt import EngineConfig, SamplingParams
from qrt.definitions.rope import RopeTables
from qrt.engine.build import _capture_sizes
from qrt.engine.engine import Engine
from qrt.engine.schedule.limits import Limits
from qrt.engine.schedule.plan import Chunk, Decode, Plan, SamplingRules, StepResult
from qrt.engine.schedule.scheduler import Scheduler
from qrt.engine.step import graphs
from qrt.engine.step.graphs import TokenSteps, default_rows, default_tokens
from qrt.engine.step.table import RequestTable
from qrt.errors import ConfigError
from qrt.kernels.prefill_attention.tiles import NONE
from qrt.layers.mlp import XIELUMLP
from qrt.mem.manager import KVManager
from qrt.mem.storage import KVStorage
from qrt.model.decoder import Decoder
from qrt.model.fused import FusedDecoder
from qrt.quant.kv import KV_FORMATS
from tiny_models import random_checkpoint

WAYS = [
    {"temperature": 0}, {"temperature": 0.8}, {"temperature": 1.2, "top_p": 0.9, "top_k": 40},
    {"temperature": 0, "logprobs": 2}, {"temperature": 0, "min_tokens": 9},
]  # fmt: skip


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return random_checkpoint(tmp_path_factory.mktemp("graphs"), "LlamaForCausalLM", vocab_size=512)


def tokens(folder, kv, sizes, prompts=(), attend_cache=False):
    """What 11 requests are answered."""
    config = EngineConfig(
        str(folder), kv=kv, device="cpu", kv_cache_memory_bytes=8 << 20, attend_cache=attend_cache,
        max_num_batched_tokens=50,
    )  # fmt: skip
    engine = Engine(config)
    runner = engine.runner
    if sizes:
        runner.token_steps = TokenSteps(
            runner.model, runner.kv, runner.table, sizes, prompts, attend_cache=attend_cache
        )
    deltas = []
    for i in range(11):
        params = SamplingParams(**WAYS[i % 5], seed=i, max_tokens=4 + 2 * i, ignore_eos=i % 2 == 0)
        engine.add(str(i), [i + 3] * (5 * i + 1), params)
        if i > 6:  # some come while others decode
            deltas += engine.step()
    while engine.has_work:
        deltas += engine.step()
        assert int(runner.table.length[-1]) == 0  # the padding row knows no tokens
    assert not [delta.error for delta in deltas if delta.error]
    return {str(i): [t for d in deltas if d.request_id == str(i) for t in d.token_ids] for i in range(11)}


@pytest.mark.parametrize("kv,attend_cache", [("fp16", False), ("int8", False), ("int8", True)])
def test_padding_changes_no_token(folder, kv, attend_cache):
    """Batches of every size down from 11; those of 9 and more are not padded, then prompts too."""
    plain = tokens(folder, kv, None, (), attend_cache)
    assert tokens(folder, kv, [1, 2, 4, 8], (), attend_cache) == plain
    assert tokens(folder, kv, [16], (), attend_cache) == plain
    assert tokens(folder, kv, [4, 12], [20, 50], attend_cache) == plain


@pytest.mark.parametrize("kv", ["fp16", "int4"])
def test_padded_prompt_steps_give_the_same_tokens(folder, kv, monkeypatch):
    """Chunks whose first tokens are cached, many in a step, alone and beside decodes; too many that are
    cached are not taken."""
    monkeypatch.setattr(graphs, "ALONE", 60)

    def answers(sizes):
        config = EngineConfig(
            str(folder), kv=kv, device="cpu", kv_cache_memory_bytes=8 << 20, max_num_batched_tokens=70
        )
        engine, taken, out = Engine(config), [], {}
        runner = engine.runner
        if sizes:
            steps = TokenSteps(runner.model, runner.kv, runner.table, [1, 2, 8], sizes, num_cached=100)
            runner.token_steps = steps
            for name in ("_mixed", "_prompts"):
                setattr(steps, name, noted(name, getattr(steps, name), taken))
        for some in ((3,), (29, 30), (31, 60, 5, 9, 13), (61,), (250,)):
            for n in some:
                ids = [7 + i * n % 400 for i in range(n)]
                engine.add(str(n), ids, SamplingParams(temperature=0, max_tokens=5))
            while engine.has_work:
                for delta in engine.step():
                    out.setdefault(delta.request_id, []).extend(delta.token_ids)
        return out, taken

    def noted(name, body, taken):
        def run(size):
            taken.append((name, size))
            return body(size)

        run.__name__ = name
        return run

    plain, _ = answers(())
    padded, taken = answers([30, 60, 70])
    assert padded == plain and [len(tokens) for tokens in plain.values()] == [5] * 10
    assert {("_prompts", 30), ("_prompts", 60), ("_mixed", 70), ("_mixed", 60)} <= set(taken)


def plan_of(decodes, *chunks):
    sampling = SamplingRules(0.0, 0, 1.0, 0, None)
    return Plan(
        (),
        (),
        tuple(Decode(str(i), i, sampling) for i in range(decodes)),
        tuple(
            Chunk(f"c{i}", 9, start, np.zeros(count, np.int32), True, sampling)
            for i, (start, count) in enumerate(chunks)
        ),
    )


def test_which_steps_are_padded():
    kv = KVStorage([KV_FORMATS["fp16"]], 64, 1, 16, torch.float32, "cpu")
    table = RequestTable(40, 64, 64, torch.device("cpu"))
    steps = TokenSteps(FakeDecoder(), kv, table, [1, 2, 8], [40, 300], num_cached=100)
    assert steps.handles(plan_of(8)) and not steps.handles(plan_of(9))
    assert steps.handles(plan_of(7, (0, 293))) and not steps.handles(plan_of(7, (0, 294)))
    assert not steps.handles(plan_of(8, (0, 3))), "nine would be drawn"
    assert steps.handles(plan_of(1, (60, 5), (40, 5))) and not steps.handles(plan_of(1, (60, 5), (41, 5)))
    for chunks, size in ((16, 40), (17, 300), (18, 300), (19, None)):
        assert steps._size(plan_of(0, *[(0, 2)] * chunks)) == size, "as many chunks as there is room for"


def test_padding_touches_only_the_pad_slot(folder, monkeypatch):
    """As every size is recorded."""
    engine = Engine(EngineConfig(str(folder), device="cpu", kv_cache_memory_bytes=8 << 20))
    runner, seen = engine.runner, []
    steps = TokenSteps(runner.model, runner.kv, runner.table, [1, 4, 7], [16, 40, 100])

    def hidden(step, kv):
        seen.append(len(step.tokens))
        assert (step.slots == kv.pad_slot).all() and not step.positions.any() and not step.tokens.any()
        if step.prefill is not None:
            assert (step.prefill.tiles == NONE).all() and not step.prefill.query_start.any()
            assert not step.prefill.cached_start.any()
        return torch.zeros(len(step.tokens), runner.model.arch.hidden_size)

    monkeypatch.setattr(runner.model, "hidden", hidden)
    for body, size in steps._steps():
        steps._pad(body, size)
        body(size)
    assert seen == [100, 40, 16, 100, 40, 16, 7, 4, 1, 7, 4, 1]
    assert not runner.table.length.any() and not runner.table.last_token[:-1].any()


def test_real_load_runs_recorded_with_little_padding():
    """1,000 requests with ShareGPT's lengths, 256 at once: a step that is not recorded waits for Python."""
    rows, sizes = default_rows(256), default_tokens(8192)
    kv = KVStorage([KV_FORMATS["fp16"]], 64, 1, 16, torch.float32, "cpu")
    steps = TokenSteps(FakeDecoder(), kv, RequestTable(256, 64, 64, torch.device("cpu")), rows, sizes)
    limits = Limits(2048, 256, 8192, step_sizes=tuple(sizes))
    scheduler = Scheduler(KVManager(1 << 19, prefix_caching=False), limits)
    random = np.random.default_rng(0)
    lengths = np.clip(random.lognormal(4.87, 1.0, (1000, 2)), 8, 1024).astype(int)
    for i, (prompt, output) in enumerate(lengths.tolist()):
        params = SamplingParams(max_tokens=output, ignore_eos=True)
        scheduler.add(str(i), np.zeros(prompt, np.int32), params)
    mixed, padded, outputs = 0, 0, 0
    while plan := scheduler.plan():
        assert steps.handles(plan)
        count = len(plan.decodes) + sum(len(chunk.tokens) for chunk in plan.chunks)
        if plan.chunks and count > 512:
            mixed, padded = mixed + count, padded + steps._size(plan)
        outputs += len(plan.sampled)
        scheduler.commit(plan, StepResult([2] * len(plan.sampled)))
    assert outputs == lengths[:, 1].sum() and mixed > 100_000 and padded < 1.06 * mixed


def test_capture_sizes_apply_to_decodes_only():
    config = EngineConfig("tiny", cudagraph_capture_sizes=(1, 8), max_num_batched_tokens=2048)
    rows, sizes = _capture_sizes(config, Limits(2048, 256, 2048))
    assert list(rows) == [1, 8] and list(sizes) == default_tokens(2048)


def test_default_tokens():
    assert default_tokens(15) == [15] and default_tokens(100) == [16, 32, 64, 100]
    sizes = default_tokens(8192)
    assert sizes == sorted(set(sizes)) and {512, 1024, 2048, 4096, 8192} <= set(sizes)


def test_default_rows():
    assert default_rows(1) == [1] and default_rows(3) == [1, 2, 4] and default_rows(9) == [1, 2, 4, 8, 16]
    assert default_rows(256) == [1, 2, 4, *range(8, 257, 8)] and default_rows(257)[-1] == 288
    assert default_rows(1000)[-2:] == [960, 1024] and default_rows(5000)[-1] == 2048


def test_bad_sizes_are_refused():
    with pytest.raises(ConfigError, match="cudagraph_capture_sizes: expected .*, got 0"):
        EngineConfig("tiny", cudagraph_capture_sizes=(4, 0))


class Recording(list):
    """In place of CUDA's graphs: whether garbage may be collected while one is recorded."""

    def install(self, monkeypatch):
        for name in ("graph_pool_handle", "synchronize", "CUDAGraph", "Stream"):
            monkeypatch.setattr(torch.cuda, name, lambda *args: None)
        monkeypatch.setattr(torch.cuda, "memory_reserved", lambda device: 0)
        monkeypatch.setattr(torch.cuda, "graph", self.graph)

    @contextmanager
    def graph(self, graph, pool, stream, mode):
        self.append(gc.isenabled())
        yield


@pytest.mark.parametrize("enabled", [True, False])
def test_no_garbage_collection_while_recording_a_graph(folder, monkeypatch, enabled):
    """CUDA gives up where a graph of an engine that is gone is destroyed in between."""
    engine = Engine(EngineConfig(str(folder), device="cpu", kv_cache_memory_bytes=8 << 20))
    recording, runner = Recording(), engine.runner
    recording.install(monkeypatch)
    (gc.enable if enabled else gc.disable)()
    try:
        TokenSteps(runner.model, runner.kv, runner.table, [1, 2]).record()
        assert recording == [False] * 8 and gc.isenabled() == enabled
    finally:
        gc.enable()


def test_kernels_of_every_size_compile_before_the_first_graph(folder, monkeypatch):
    recording, sizes, compiled = Recording(), [], []

    @contextmanager
    def compiling():
        yield
        compiled.extend(sizes)
        assert not recording

    recording.install(monkeypatch)
    monkeypatch.setattr("qrt.kernels.launch.compiling", compiling)
    runner = Engine(EngineConfig(str(folder), device="cpu", kv_cache_memory_bytes=8 << 20)).runner
    hidden = FusedDecoder.hidden

    def noted(model, step, kv):
        sizes.append(len(step.tokens))
        return hidden(model, step, kv)

    monkeypatch.setattr(FusedDecoder, "hidden", noted)
    TokenSteps(runner.model, runner.kv, runner.table, [1, 2], [16]).record()
    assert compiled == [16, 16, 2, 1, 2, 1] and len(recording) == 10  # four draw from hidden states


@pytest.mark.parametrize("formats,count", [
    (["int8"] * 6, 2), (["fp16", *["int4"] * 5], 3), ([*["int4"] * 5, "fp16"], 6), (["int4"], 1),
    (["fp16", "int4", "fp16", "int4"], 3), (["fp16", "fp16", "int4", "int4"], 4),
    (["int8", "int8", "still", "int8", "int8"], 4), (["int8", "other mlp", "int8", "int8"], 4),
])  # fmt: skip
def test_distinct_first_layers_compile_all_kernels(folder, formats, count):
    """Those of all kinds, and of all kinds that one follows; one may have no RoPE, one another mlp."""
    runner = Engine(EngineConfig(str(folder), device="cpu", kv_cache_memory_bytes=8 << 20)).runner
    model, config = runner.model, runner.model.arch
    kinds = [KV_FORMATS[name if name in KV_FORMATS else "int8"] for name in formats]
    still = RopeTables(*(table[:1] for table in model.ropes[0]))
    ropes = [still if name == "still" else model.ropes[0] for name in formats]
    other = copy(model.layers[0])
    other.mlp = XIELUMLP(other.mlp.gate_up, other.mlp.down, None, gated=True)
    own = [other if name == "other mlp" else model.layers[0] for name in formats]
    layers = Decoder(config, model.embed, own, model.norm, model.head, ropes)
    kv = KVStorage(kinds, 16, config.num_kv_heads, config.head_dim, torch.float32, "cpu")
    assert TokenSteps(layers, kv, runner.table, [1])._distinct_layers() == count


def test_deleted_engine_leaves_no_garbage(folder, monkeypatch):
    """Its weights and its pool would fill the GPU until garbage is collected, which nobody may do in time."""
    Recording().install(monkeypatch)
    engine = Engine(EngineConfig(str(folder), device="cpu", kv_cache_memory_bytes=8 << 20))
    runner = engine.runner
    runner.token_steps = TokenSteps(runner.model, runner.kv, runner.table, [1, 2])
    runner.token_steps.record()
    left = weakref.ref(runner.model), weakref.ref(runner.kv)
    gc.collect()
    gc.disable()
    try:
        del engine, runner
        assert [one() for one in left] == [None, None]
    finally:
        gc.enable()


LAUNCHERS = (
    "layers.linear.linear", "model.fused.embed_rmsnorm", "kernels.attention.kv_write",
    "engine.step.sampler.sample_logits", "engine.step.graphs.sample_logits",
    "engine.step.padded.token_inputs", "engine.step.table.advance",
)  # fmt: skip


def test_kernels_launch_on_the_models_device(folder, monkeypatch):
    """Which need not be the thread's current one, on which Triton launches."""
    inside, called = [], set()

    @contextmanager
    def device(index):
        inside.append(index)
        yield
        inside.pop()

    def checked(name, launch):
        def call(*args):
            assert inside, name
            called.add(name)
            return launch(*args)

        return call

    monkeypatch.setattr(torch.cuda, "device", device)
    for name in LAUNCHERS:
        module, _, function = f"qrt.{name}".rpartition(".")
        launch = getattr(import_module(module), function)
        monkeypatch.setattr(f"qrt.{name}", checked(name, launch))
    model = Engine(EngineConfig(str(folder), device="cpu", kv="int8", kv_cache_memory_bytes=8 << 20)).model
    assert called == {"layers.linear.linear", "kernels.attention.kv_write"}
    assert tokens(folder, "int8", [1, 2, 4, 8], [40]) and called == set(LAUNCHERS)
    model.logits(torch.zeros(1, model.arch.hidden_size))
    assert not inside
