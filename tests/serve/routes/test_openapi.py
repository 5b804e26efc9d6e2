"""The document at /openapi.json against the server, by schemathesis: no failure of the
server, whatever it forbids is refused, and every reply has the shape it says."""

import pytest
import schemathesis
from hypothesis import HealthCheck, given, settings
from schemathesis import GenerationMode
from schemathesis.config import SchemathesisConfig
from schemathesis.specs.openapi.checks import positive_data_acceptance
from servers import ThreadServer, bearer

# 413 is of bodies beyond the limit, which are refused unread; schemathesis does not expect it
REFUSALS = ["400", "401", "404", "405", "413", "415", "422", "501"]
CONFIG = {
    "checks": {
        "negative_data_rejection": {"expected-statuses": REFUSALS},
        # 501 refuses what the document allows and this server cannot do yet, such as a forced call of a tool
        "not_a_server_error": {"expected-statuses": ["2xx", "3xx", "4xx", "501"]},
    }
}

pytestmark = [pytest.mark.model, pytest.mark.slow]


@pytest.fixture(scope="module")
def operations():
    with ThreadServer(kv="fp16", engine={"max_model_len": 256}) as server:
        config = SchemathesisConfig.from_dict(CONFIG)
        document = schemathesis.openapi.from_url(
            f"{server.url}/openapi.json", config=config, headers=bearer()
        )
        yield {found.ok().label: found.ok() for found in document.get_all_operations()}


@pytest.mark.parametrize("examples", [3, pytest.param(30, marks=pytest.mark.exhaustive)])
@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=lambda m: m.value)
def test_contents_of_the_openapi_document(operations, mode, examples):
    """Other examples each time."""
    assert len(operations) > 12
    for operation in operations.values():
        if mode is GenerationMode.NEGATIVE and operation.method == "get":
            continue  # nothing in them can be wrong

        @settings(
            max_examples=examples, deadline=None, suppress_health_check=list(HealthCheck), database=None
        )
        @given(case=operation.as_strategy(generation_mode=mode))
        def check(case):
            # what the document allows may still be wrong for this model: too long, outside its vocabulary
            case.call_and_validate(headers=bearer(), timeout=60, excluded_checks=[positive_data_acceptance])

        check()
