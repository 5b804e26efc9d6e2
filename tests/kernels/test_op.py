"""`define`: its function launches at once on a GPU, and goes through torch's dispatcher where that counts."""

from collections.abc import Sequence
from importlib import import_module
from inspect import signature
from pathlib import Path

import pytest
import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from qrt import kernels
from qrt.kernels.op import OPERATORS, define

for folder in Path(kernels.__file__).parent.glob("*/ref.py"):
    import_module(f"qrt.kernels.{folder.parent.name}")
ran = []


def launched(x: Tensor, times: int = 1) -> Tensor:
    """Called without the dispatcher, or by it for tensors on a GPU."""
    ran.append("launched")
    return x * times


def launched_list(x: Sequence[Tensor], times: int = 1) -> Tensor:
    return launched(x[0], times)


def probe(x: Tensor, times: int = 1) -> Tensor:
    """Called by the dispatcher for the tensors of these tests, which are on a CPU."""
    ran.append("dispatched")
    return x * times


def probe_list(x: Sequence[Tensor], times: int = 1) -> Tensor:
    ran.append("dispatched")
    return x[0] * times


def probe_into(x: Tensor, out: Sequence[Tensor], scale: float | None = None, name: str = "a") -> None:
    out[0].copy_(x)


def fake(x: Tensor | list[Tensor]) -> Tensor:
    ran.append("fake")
    return torch.empty_like(x[0] if isinstance(x, list) else x)


probe = define(probe, triton="test_op:launched", fake=fake)
probe_list = define(probe_list, triton="test_op:launched_list", fake=fake)
probe_into = define(probe_into, triton="test_op:probe_into", mutates=["out"])
NAMES = [name for name in OPERATORS if not name.startswith("probe")]


@pytest.fixture(autouse=True)
def on_a_gpu(monkeypatch):
    """Tensors say that they are on a GPU."""
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: True), raising=False)
    ran.clear()


@pytest.mark.parametrize("guard", [torch.no_grad, torch.inference_mode])
def test_kernels_are_launched_at_once(guard):
    with guard():
        assert probe(torch.ones(2), 3).tolist() == [3, 3]
        assert probe_list([torch.ones(2)], times=3).tolist() == [3, 3]
    assert ran == ["launched", "launched"]


def test_tensors_that_may_have_gradients_are_dispatched():
    probe(torch.ones(2))
    assert ran == ["dispatched"]


def test_tensors_on_a_cpu_are_dispatched(monkeypatch):
    monkeypatch.setattr(torch.Tensor, "is_cuda", property(lambda x: False))
    with torch.no_grad():
        probe(torch.ones(2))
        probe_list([torch.ones(2)])
    assert ran == ["dispatched", "dispatched"]


@torch.no_grad()
def test_fake_tensors_have_shapes():
    with FakeTensorMode():
        assert probe(torch.empty(5, 2)).shape == (5, 2)
    with FakeTensorMode() as mode:
        x = mode.from_tensor(torch.empty(5, 2))
    assert probe(x).shape == (5, 2)
    assert ran == ["fake", "fake"]


@torch.no_grad()
def test_modes_see_the_operator():
    class Mode(TorchDispatchMode):
        seen = ()

        def __torch_dispatch__(self, function, types, args=(), kwargs=None):
            self.seen = (*self.seen, function)
            return function(*args, **(kwargs or {}))

    with Mode() as mode:
        probe(torch.ones(2))
    assert torch.ops.qrt.probe.default in mode.seen and "launched" not in ran


@torch.no_grad()
@pytest.mark.filterwarnings("ignore:There is a performance drop")
def test_transforms_are_dispatched():
    assert torch.func.vmap(lambda x: probe(x, 2))(torch.ones(2, 3)).tolist() == [[2] * 3] * 2
    assert ran == ["dispatched", "dispatched"]


@torch.no_grad()
def test_compiled_code_has_the_operator():
    graphs = []

    def backend(graph, inputs):
        graphs.append(graph)
        return graph

    compiled = torch.compile(lambda x: probe(x, 2) + 1, backend=backend, fullgraph=True)
    assert compiled(torch.ones(2)).tolist() == [3, 3]
    targets = [node.target for graph in graphs for node in graph.graph.nodes]
    assert torch.ops.qrt.probe.default in targets and "launched" not in ran


def test_the_schema_is_that_of_the_reference():
    def said(name):
        return str(getattr(torch.ops.qrt, name).default._schema)

    assert said("probe_list") == "qrt::probe_list(Tensor[] x, SymInt times=1) -> Tensor"
    into = '(Tensor x, Tensor(a1!)[] out, float? scale=None, str name="a") -> ()'
    assert said("probe_into") == f"qrt::probe_into{into}"


def test_all_operators_are_known():
    assert len(NAMES) == 34 and {"linear", "kv_write", "chain", "token_inputs", "route", "experts"} <= set(
        NAMES
    )


@pytest.mark.parametrize("name", NAMES)
def test_a_launcher_takes_what_its_reference_takes(name):
    """By names and annotations, in order, with the same defaults."""
    ref, launcher = OPERATORS[name]
    assert signature(launcher.function, eval_str=True) == signature(ref, eval_str=True)
