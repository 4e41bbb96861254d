"""The house keeps its drawing: who may look at whom, sizes, docstrings, kinds of files.

Reads the source with ast, never imports it, so that a broken package is still reported well.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kvplane"
PACKAGES = ("index", "bootstrap", "router", "events", "transfer", "engine")
GROUND = ("vocabulary", "runtime", "tokens")
MAY_IMPORT = {  # architecture: who may look at whom; the roof looks at everything
    "router": {"index", "bootstrap"},
    "engine": {"events", "transfer", "bootstrap"},
    "events": {"index"},
    "transfer": {"bootstrap"},
    "index": set(),
    "bootstrap": set(),
}
KINDS = ("Pure", "Edge", "Door", "Seam")
SEAMS = {
    "index": ("stores",),
    "events": ("dialects",),
    "transfer": ("backends",),
    "router": ("policies", "handoffs", "discovery"),
}
EDGES = {  # what a pure file never touches
    "asyncio", "socket", "zmq", "aiohttp", "redis", "time", "logging", "threading", "uvicorn",
    "starlette", "fastapi", "subprocess", "selectors", "http", "random", "os",
}  # fmt: skip
MOST_LINES, MOST_FUNCTION_LINES = 300, 40


def files() -> list[Path]:
    roof = sorted(SOURCE.glob("*.py"))
    return roof + [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]


def name_of(path: Path) -> str:
    shown = path.relative_to(SOURCE) if path.is_relative_to(SOURCE) else path.relative_to(ROOT)
    return shown.as_posix()


every_file = pytest.mark.parametrize("path", files(), ids=name_of)


def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


def kind_of(path: Path) -> str | None:
    text = ast.get_docstring(tree_of(path)) or ""
    marks = (".", ":", ",", " (", " of")
    found = [kind for kind in KINDS if any(kind + mark in text for mark in marks)]
    return found[0] if found else None


def imports(path: Path) -> list[tuple[int, str, tuple[str, ...]]]:
    """(level, module, names) of every import in the file, also those inside functions."""
    found: list[tuple[int, str, tuple[str, ...]]] = []
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.Import):
            found += [(0, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            found.append((node.level, node.module or "", names))
    return found


def listed(package: str) -> set[str]:
    """The names a package's __init__ offers."""
    for node in ast.walk(tree_of(ROOT / package / "__init__.py")):
        if isinstance(node, ast.Assign) and getattr(node.targets[0], "id", "") == "__all__":
            return set(ast.literal_eval(node.value))
    return set()


def test_every_folder_of_the_plan_is_there_and_linked_under_one_import_name() -> None:
    for package in PACKAGES:
        assert (SOURCE / package).is_symlink(), package
        assert (SOURCE / package).resolve() == ROOT / package
        assert listed(package), f"{package}/__init__.py lists nothing in __all__"
        for seam in SEAMS.get(package, ()):
            assert (ROOT / package / seam / "base.py").exists(), f"{package}/{seam}"


@every_file
def test_a_file_is_small(path: Path) -> None:
    assert len(path.read_text().splitlines()) <= MOST_LINES


@every_file
def test_a_function_is_small(path: Path) -> None:
    for node in ast.walk(tree_of(path)):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            assert length <= MOST_FUNCTION_LINES, f"{node.name}: {length} lines"


@every_file
def test_a_file_says_what_it_is(path: Path) -> None:
    text = ast.get_docstring(tree_of(path))
    assert text, "no docstring"
    inside = path.parent.name in PACKAGES or path.parent.parent.name in PACKAGES
    if inside and path.name not in ("__init__.py", "settings.py", "errors.py", "metrics.py"):
        assert kind_of(path), f"docstring names none of {KINDS}"


@every_file
def test_everything_public_has_a_docstring(path: Path) -> None:
    for node in tree_of(path).body:
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if named and not node.name.startswith("_"):
            assert ast.get_docstring(node), node.name


@every_file
def test_a_pure_file_touches_nothing_outside(path: Path) -> None:
    if kind_of(path) != "Pure":
        return
    for level, module, _ in imports(path):
        if level == 0:
            assert module.split(".")[0] not in EDGES, module


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_looks_only_where_it_may(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        for level, module, names in imports(path):
            if level or not module.startswith("kvplane"):
                continue
            parts = module.split(".")
            where = f"{name_of(path)} imports {module}"
            if module == "kvplane":
                assert set(names) <= set(GROUND), where
                continue
            if parts[1] in GROUND:
                continue
            assert parts[1] != package, f"{where}: inside a package imports are relative"
            assert parts[1] in MAY_IMPORT[package], where
            assert len(parts) == 2, f"{where}: only what its __init__ lists"
            assert set(names) <= listed(parts[1]), f"{where}: {set(names) - listed(parts[1])}"


@pytest.mark.parametrize("name", GROUND)
def test_the_ground_floor_knows_nobody(name: str) -> None:
    for level, module, _ in imports(SOURCE / f"{name}.py"):
        assert level == 0
        assert not module.startswith("kvplane") or module.split(".")[1:2] in ([g] for g in GROUND)


@every_file
def test_no_file_imports_a_bare_package(path: Path) -> None:
    for level, module, _ in imports(path):
        assert level or module.split(".")[0] not in PACKAGES, module


def test_every_seam_has_a_contract_suite() -> None:
    for package, seams in SEAMS.items():
        for seam in seams:
            assert (ROOT / "tests" / "contracts" / f"test_{seam}.py").exists(), f"{package}/{seam}"
