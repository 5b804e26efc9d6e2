"""The model of all these tests, and the server of those that want no settings of their own."""

import pytest
from servers import ThreadServer

from tiny_models import shallow


@pytest.fixture(scope="module", autouse=True)
def shallow_tiny(tmp_path_factory):
    """What an engine writes is not the point here; a step of one layer takes a third of the time."""
    with shallow(tmp_path_factory.getbasetemp()):
        yield


@pytest.fixture(scope="module")
def server():
    with ThreadServer(kv="fp16") as running:
        yield running
