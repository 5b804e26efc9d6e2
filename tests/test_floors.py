"""A module imports its own floor and lower ones, never higher (docs/architecture.md#floors)."""

import ast
import sys
from collections import Counter
from collections.abc import Mapping
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from distributions import packages_of

ROOT = Path(__file__).parent.parent
FLOORS: dict[str, float] = {  # fractions are the rooms of a floor, lower rooms first
    "qrt.version": 0, "qrt.errors": 0, "qrt.registry": 0, "qrt.config": 0, "qrt.checks": 0, "qrt.gc": 0,
    "qrt.setting": 0, "qrt.request": 0, "qrt.assets": 0, "qrt.cli": 0, "qrt.model_files": 0, "qrt.compat": 0,
    "qrt.quant": 1, "qrt.arch": 1, "qrt.grammar": 1, "qrt.text": 1, "qrt.definitions": 1.1,
    "qrt.kernels": 2,
    "qrt.mem": 3,
    "qrt.layers": 4,
    "qrt.model": 5,
    "qrt.engine.schedule": 6, "qrt.engine.constrain": 6.1, "qrt.engine.step": 6.1, "qrt.engine": 6.2,
    "qrt.engine.ranks": 6.1, "qrt.engine.ranks.process": 6.3, "qrt.answers": 6.4,
    "qrt.offline": 7, "qrt.serve.settings": 7, "qrt.serve.link": 7.1, "qrt.serve.async_llm": 7.2,
    "qrt.serve.http": 7.2, "qrt.serve.routes": 7.3, "qrt.serve.processes": 7.4, "qrt.serve.command": 7.5,
    "qrt.serve": 7.6,
    # the calibrator sees floors 0 and 1, with their fractions
    "qrt_calibrate.recipe": 2.0, "qrt_calibrate.rounding": 2.0, "qrt_calibrate.model": 2.1,
    "qrt_calibrate.tuning": 2.15, "qrt_calibrate.job": 2.2, "qrt_calibrate.text": 2.3,
    "qrt_calibrate.steps": 2.3, "qrt_calibrate.estimate": 2.4, "qrt_calibrate.report": 2.5,
    "qrt_calibrate": 2.6,
    "qrt_eval.inputs": 8.0, "qrt_eval.results": 8.1, "qrt_eval.quality": 8.2, "qrt_eval.speed": 8.2,
    "qrt_eval.reports": 8.3, "qrt_eval.flags": 8.3, "qrt_eval": 8.4,
}  # fmt: skip
TORCH_FREE = (
    "qrt.version", "qrt.errors", "qrt.registry", "qrt.config", "qrt.checks", "qrt.gc", "qrt.cli",
    "qrt.setting", "qrt.request", "qrt.grammar", "qrt.arch", "qrt.mem.slots", "qrt.mem.prefix",
    "qrt.mem.manager", "qrt.model_files", "qrt.compat", "qrt.engine.preflight", "qrt.engine.schedule",
    "qrt.answers.processor", "qrt.answers.output", "qrt.serve",
)  # fmt: skip

EXTRAS = {  # who may import what only an extra brings
    "qrt.serve": "serve", "qrt.serve.ray_serve": "ray", "qrt_eval.quality.lm": "lm",
    "qrt_eval.quality.lm_model": "lm", "qrt_eval.reports.picture": "plot", "qrt_eval.reports.pareto": "plot",
}  # fmt: skip


@cache
def modules() -> dict[str, Path]:
    """Dotted name -> file of every module of the three packages."""
    tops = (ROOT, "qrt"), (ROOT / "calibrate", "qrt_calibrate"), (ROOT / "eval", "qrt_eval")
    return {name: path for base, top in tops for name, path in found_in(base, top).items()}


def found_in(base: Path, top: str) -> dict[str, Path]:
    """Dotted name -> file of every module below a folder of `base`."""
    found = {}
    for path in sorted((base / top).rglob("*.py")):
        parts = path.relative_to(base).with_suffix("").parts
        found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return found


@cache
def imports(path: Path) -> set[str]:
    """Everything a file imports: at the top, inside functions and under TYPE_CHECKING; lazy strings too."""
    names: set[str] = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names |= {f"{node.module}.{alias.name}" for alias in node.names} | {node.module or ""}
    return names


def floor(module: str) -> float | None:
    """The floor of a module, by its longest known prefix; None outside the project and for the root."""
    parts = module.split(".")
    for end in range(len(parts), 0, -1):
        if (name := ".".join(parts[:end])) in FLOORS:
            return FLOORS[name]
    return None


def test_the_root_imports_only_the_version_by_itself():
    """`qrt` names what it offers and imports it on first use, so a floor alone can be imported."""
    tree = ast.parse(modules()["qrt"].read_text())
    direct = [node for node in tree.body if isinstance(node, ast.Import | ast.ImportFrom)]
    assert [ast.unparse(node) for node in direct if "qrt" in ast.dump(node)] == [
        "from qrt.version import __version__"
    ]


def test_no_import_circles():
    """Imports at the top of modules, those under TYPE_CHECKING too, form no circle; the root is in none."""
    found = modules() | found_in(ROOT / "tools", "")
    graph = {module: imported(path, found) for module, path in found.items()}
    try:
        TopologicalSorter(graph).prepare()
    except CycleError as error:
        pytest.fail("import circle: " + " <- ".join(error.args[1]))


def imported(path: Path, found: Mapping[str, Path]) -> set[str]:
    """The modules of the project that a file imports outside functions, or takes names from."""
    names: set[str] = set()
    statements: list[ast.AST] = [ast.parse(path.read_text())]
    while statements:
        node = statements.pop()
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            parts = [f"{node.module}.{alias.name}" for alias in node.names]
            names |= {part if part in found else node.module for part in parts}
        elif not isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda):
            statements += ast.iter_child_nodes(node)
    return names & found.keys()


@pytest.mark.parametrize("module", sorted(modules()))
def test_imports_go_down(module):
    own = floor(module)
    if own is None:
        assert module == "qrt", f"{module} stands on no floor"
        return
    for name in imports(modules()[module]):
        target = floor(name)
        assert target is None or target <= own, f"{module} (floor {own}) imports {name} (floor {target})"


def test_calibrate_sees_only_what_is_below_kernels():
    for module, path in modules().items():
        if module.startswith("qrt_calibrate"):
            above = {n for n in imports(path) if n.startswith("qrt.") and (floor(n) or 0) >= 2}
            assert not above, f"{module} imports {above}"


@pytest.mark.parametrize(
    "one, other",
    [
        ("qrt.quant", "qrt.arch"),
        ("qrt_calibrate.recipe", "qrt_calibrate.rounding"),
        ("qrt_calibrate.text", "qrt_calibrate.steps"),
        ("qrt_eval.quality", "qrt_eval.speed"),
    ],
)
def test_neighbours_do_not_see_each_other(one, other):
    for module, path in modules().items():
        for own, apart in ((one, other), (other, one)):
            if module.startswith(own + "."):
                assert not [name for name in imports(path) if name.startswith(apart)], module


def test_triton_only_in_kernels_their_launchers_and_device_files():
    for module, path in modules().items():
        if any(n.split(".")[0] == "triton" for n in imports(path)):
            launches = module in ("qrt.kernels.launch", "qrt.kernels.descriptor")
            assert launches or module.endswith((".kernel", "_kernel", ".device")), f"{module} imports triton"


@pytest.mark.parametrize("package", ["qrt", "qrt_calibrate", "qrt_eval"])
def test_only_what_an_extra_brings_needs_it(package):
    """Elsewhere every import, inside functions too, is of what `pip install qrt` brings."""
    own = sys.stdlib_module_names | {"qrt", "qrt_calibrate", "qrt_eval"}
    for module, path in modules().items():
        if module.partition(".")[0] == package:
            names = [extra for start, extra in EXTRAS.items() if f"{module}.".startswith(f"{start}.")]
            foreign = {name.partition(".")[0] for name in imports(path)} - own - {""}
            assert not foreign - packages_of(*names), f"{module} ({names or 'no extra'})"


def test_torch_free_floors():
    for module, path in modules().items():
        if module.startswith(TORCH_FREE):
            assert not [n for n in imports(path) if n.split(".")[0] == "torch"], f"{module} imports torch"


def test_no_two_classes_share_a_name():
    """A reader who looks for a class finds one."""
    places: dict[str, list[str]] = {}
    for module, path in modules().items():
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ClassDef):
                places.setdefault(node.name, []).append(module)
    assert not {name: found for name, found in places.items() if len(found) > 1}


def test_rooms_hold_at_most_15_modules():
    """A folder of more is a hall: what belongs together gets a room of its own."""
    folders = Counter(path.parent for path in modules().values() if path.name != "__init__.py")
    halls = {str(folder.relative_to(ROOT)) for folder, count in folders.items() if count > 15}
    assert not halls, f"more than 15 modules in {sorted(halls)}"


def test_files_of_tests_have_names_of_their_own():
    """pytest imports test files by name alone, and refuses two with one name in a run."""
    names = [path.name for path in (ROOT / "tests").rglob("test_*.py")]
    assert not {name for name in names if names.count(name) > 1}
