"""The structure of the package: imports go one way."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

PACKAGE = Path(__file__).parent.parent / "trt_eagle3"
FUNCTIONS = (ast.FunctionDef, ast.AsyncFunctionDef)

# From the ground up: a package or module imports what stands in its own row or in one above it.
LAYERS: tuple[tuple[str, ...], ...] = (
    ("errors", "dtype", "host_copy"),
    ("config_section",),
    ("tensorrt_config", "backend_support"),
    ("io", "atomic_io"),
    ("rope_spec",),
    ("spec",),
    ("sharding",),
    ("checkpoint",),
    ("multimodal",),
    ("config",),
    ("families", "graph", "drafts"),
    ("engine",),
    ("prompts",),
    ("decode",),
    ("calibration",),
    ("pipeline",),
    ("bundle_cache",),
    ("parity", "probe", "serving"),
    ("triton", "runtimes"),
    ("bench",),
    ("commands",),
    ("cli",),
    ("program",),
    ("__main__",),
)
# The rooms of a package, from the ground up. Its other modules stand above them.
ROOMS_OF = {
    "decode": (
        "sampling",
        "request",
        "memory",
        "parallel",
        "forward",
        "speculation",
        "step",
        "policy",
        "schedule",
    ),
    "engine": (
        "kernels",
        "capi",
        "runtime",
        "bundle",
        "builder",
        "onnxruntime",
        "torch",
        "trt",
    ),
}
# An LLM of a checkpoint builds it first.
EXCEPTIONS = ["decode.llm imports bundle_cache"]
# What a family or a kind of drafts is made of serves other levels, and is imported when it is asked
# for.
PARTS = {
    "vision_graph": "graph",
    "reference": "parity",
    "processor_reference": "parity",
    "factors": "probe",
}
ROOMS = ("families", "drafts")
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def modules() -> dict[str, Path]:
    """Dotted name below the package -> file."""
    return {
        ".".join(path.relative_to(PACKAGE).with_suffix("").parts).removesuffix(".__init__"): path
        for path in PACKAGE.rglob("*.py")
    }


@cache
def parsed(path: Path) -> ast.Module:
    return ast.parse(path.read_text())


def imports(path: Path, known: dict[str, Path], *, lazy: bool) -> Iterator[str]:
    """Modules of the package that ``path`` imports when it runs.

    ``lazy``: those inside functions too.
    """
    for node in _running(parsed(path), lazy=lazy):
        if isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module, *(f"{node.module}.{alias.name}" for alias in node.names)]
        else:
            continue
        for name in names:
            inside = name.removeprefix("trt_eagle3.")
            if inside != name and inside in known:
                yield inside


def _running(tree: ast.Module, *, lazy: bool) -> Iterator[ast.AST]:
    """Nodes but those for type checkers; with ``lazy`` those of functions too."""
    todo: list[ast.AST] = list(tree.body)
    while todo:
        node = todo.pop()
        if _for_types(node) or (isinstance(node, FUNCTIONS) and not lazy):
            continue
        yield node
        todo += ast.iter_child_nodes(node)


def _for_types(node: ast.AST) -> bool:
    return (
        isinstance(node, ast.If)
        and isinstance(node.test, ast.Name)
        and node.test.id == "TYPE_CHECKING"
    )


def level(name: str) -> int:
    """Of a module, by its dotted name below the package."""
    first, *rest = name.split(".")
    part = PARTS.get(rest[-1]) if first in ROOMS and len(rest) == 2 else None
    return LEVEL[part or first]


def upward(known: dict[str, Path]) -> list[str]:
    """Imports, lazy ones too, of what stands below their own layer."""
    found = []
    for name, path in known.items():
        if name in {"", "__init__"}:  # the front door opens every room
            continue
        for other in imports(path, known, lazy=True):
            if other in {"", "__init__"}:
                continue
            # its own, or of the family that it is built on
            own = name.partition(".")[0]
            in_room = own in ROOMS and other.startswith(f"{own}.")
            if level(other) > level(name) and not in_room:
                found.append(f"{name} imports {other}")
    return found


def cycle(edges: dict[str, set[str]]) -> list[str]:
    """Modules that import each other in a circle; empty if none do."""
    done: set[str] = set()
    for start in edges:
        trail: list[str] = []
        todo = [(start, False)]
        while todo:
            name, leaving = todo.pop()
            if leaving:
                done.add(trail.pop())
            elif name in trail:
                return [*trail[trail.index(name) :], name]
            elif name not in done:
                trail.append(name)
                todo += [(name, True), *((other, False) for other in edges[name])]
    return []


def test_every_module_has_a_layer() -> None:
    assert {name.partition(".")[0] for name in modules()} - {"", "__init__"} <= LEVEL.keys()


def test_imports_never_go_up() -> None:
    assert upward(modules()) == EXCEPTIONS


def room_level(name: str) -> int:
    """Of a module in a package with rooms, by its dotted name below ``trt_eagle3``."""
    package, _, inside = name.partition(".")
    rooms, room = ROOMS_OF[package], inside.partition(".")[0]
    return rooms.index(room) if room in rooms else len(rooms)


def upward_in(package: str, known: dict[str, Path]) -> list[str]:
    """Imports, lazy ones too, of a higher room of ``package``."""
    return [
        f"{name} imports {other}"
        for name, path in known.items()
        if name.startswith(f"{package}.")
        for other in imports(path, known, lazy=True)
        if other.startswith(f"{package}.") and room_level(other) > room_level(name)
    ]


@pytest.mark.parametrize("package", list(ROOMS_OF))
def test_rooms_import_in_one_direction(package: str) -> None:
    assert upward_in(package, modules()) == []


@pytest.mark.parametrize("package", list(ROOMS_OF))
def test_every_room_is_a_folder(package: str) -> None:
    assert set(ROOMS_OF[package]) <= {path.name for path in (PACKAGE / package).iterdir()}


def test_engine_has_no_module_outside_its_rooms() -> None:
    inside = {name.split(".")[1] for name in modules() if name.startswith("engine.")}
    assert inside == set(ROOMS_OF["engine"])


@pytest.mark.parametrize(
    ("package", "lower", "upper"),
    [
        ("decode", "decode.memory.lower", "decode.step.upper"),
        ("engine", "engine.runtime.lower", "engine.bundle.upper"),
        ("engine", "engine.bundle.lower", "engine.torch"),
    ],
)
def test_planted_import_of_a_higher_room_is_found(
    tmp_path: Path, package: str, lower: str, upper: str
) -> None:
    (tmp_path / "lower.py").write_text(f"def late():\n    from trt_eagle3.{upper} import x\n")
    (tmp_path / "upper.py").write_text("")
    known = {lower: tmp_path / "lower.py", upper: tmp_path / "upper.py"}
    assert upward_in(package, known) == [f"{lower} imports {upper}"]


def outside(path: Path) -> set[str]:
    """What stands beside the package, and so is not in its wheel, that ``path`` imports."""
    found = set()
    for node in ast.walk(parsed(path)):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module.partition(".")[0])
    return found & {"benchmarks", "plugins", "tests", "tools"}


BACKENDS = ("engine.onnxruntime", "engine.torch", "engine.trt")


def backend_imports(known: dict[str, Path]) -> list[str]:
    """Imports, lazy ones too, of a backend's modules by decoding, which knows sessions alone."""
    return [
        f"{name} imports {other}"
        for name, path in known.items()
        if name.split(".")[0] == "decode"
        for other in imports(path, known, lazy=True)
        if other.startswith(BACKENDS)
    ]


def test_decoding_imports_no_backend() -> None:
    known = modules()
    assert all(backend in known for backend in BACKENDS)
    assert backend_imports(known) == []


def test_package_imports_nothing_that_is_not_in_its_wheel() -> None:
    assert {name: outside(path) for name, path in modules().items() if outside(path)} == {}


def test_no_modules_import_each_other() -> None:
    known = modules()
    edges = {name: set(imports(path, known, lazy=False)) - {name} for name, path in known.items()}
    packages = {name for name, path in known.items() if path.name == "__init__.py"}
    # a package that re-exports its modules is imported along with each of them
    edges = {name: {o for o in others if o not in packages} for name, others in edges.items()}
    assert cycle(edges) == []


def test_no_package_hides_a_module() -> None:
    hidden = [path for path in PACKAGE.rglob("*.py") if path.with_suffix("").is_dir()]
    assert not hidden, "Python imports the folder of that name instead"


def test_planted_upward_import_is_found(tmp_path: Path) -> None:
    lower, upper = tmp_path / "lower.py", tmp_path / "upper.py"
    lower.write_text("def late():\n    from trt_eagle3.cli import main\n")
    upper.write_text("")
    known = {"graph.lower": lower, "cli": upper}
    assert upward(known) == ["graph.lower imports cli"]


def test_planted_import_of_a_backend_is_found(tmp_path: Path) -> None:
    lazy = "def late():\n    from trt_eagle3.engine.torch.session import TorchSession\n"
    (tmp_path / "runner.py").write_text(lazy)
    (tmp_path / "session.py").write_text("")
    known = {"engine.torch.session": tmp_path / "session.py"}
    known |= dict.fromkeys(("decode.forward.runner", "parity.runner"), tmp_path / "runner.py")
    assert backend_imports(known) == ["decode.forward.runner imports engine.torch.session"]


def test_planted_import_of_a_benchmark_is_found(tmp_path: Path) -> None:
    (tmp_path / "x.py").write_text("def late():\n    from benchmarks.timing import median_ms\n")
    assert outside(tmp_path / "x.py") == {"benchmarks"}


def test_planted_cycle_is_found() -> None:
    assert cycle({"a": {"b"}, "b": {"c"}, "c": {"a"}}) in (["a", "b", "c", "a"],)
    assert cycle({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == []
