"""Streams that are left at any moment, many at once: everything comes back, nothing waits for ever."""

import asyncio
import os

import pytest
from servers import ThreadServer, wait_idle
from storm import idle_load, storm


@pytest.mark.model
@pytest.mark.slow
def test_a_short_storm():
    with ThreadServer(kv="int8", api_keys=(), engine={"kv_cache_memory_bytes": 2**24}) as server:
        files = len(os.listdir("/proc/self/fd"))
        outcomes = asyncio.run(storm(server.url, seconds=6, streams=100))
        load = idle_load(server.url)
        wait_idle(server)
        assert set(outcomes) <= {"answered", "left", "429"}, outcomes
        assert outcomes["answered"] > 10 and outcomes["left"] > 10
        assert load["kv_used_tokens"] == 0 and not server.service.client._streams
        assert len(os.listdir("/proc/self/fd")) <= files + 8, "connections stay open"
        server.engine.reset_prefix_cache()
        assert server.engine.scheduler.kv.stats.free_slots == server.engine.pool.num_slots
