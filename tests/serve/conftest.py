"""The server of tests that want no settings of their own."""

import pytest
from servers import ThreadServer


@pytest.fixture(scope="module")
def server():
    with ThreadServer(kv="fp16") as running:
        yield running
