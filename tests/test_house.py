"""The house keeps its drawing: who may look at whom, sizes, docstrings, kinds of files.

Reads the source with ast, never imports it, so that a broken package is still reported well.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "kvplane"
PACKAGES = ("index", "bootstrap", "router", "events", "transfer", "engine")
GROUND = ("vocabulary", "runtime", "tokens", "seams", "recall", "dice", "tallies")
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
PAGES = {"router": ("dashboard",)}  # a door with files of its own; not a seam either
FORMS = {"transfer": ("sglang",)}  # one foreign wire form in several pure files; not a seam
EDGES = {  # what a pure file never touches
    "asyncio", "socket", "zmq", "aiohttp", "redis", "time", "logging", "threading", "uvicorn",
    "starlette", "fastapi", "subprocess", "selectors", "http", "random", "os", "select", "signal",
    "ssl", "secrets", "uuid", "urllib.request", "multiprocessing", "concurrent", "tempfile",
    "shutil", "importlib", "httptools", "uvloop", "sqlite3", "requests",
}  # fmt: skip
CALLS = {"open", "print", "input", "breakpoint", "exec", "eval", "__import__"}  # nor calls
READS = {"read_text", "read_bytes", "write_text", "write_bytes"}  # of a Path
MOST_LINES, MOST_FUNCTION_LINES = 300, 40


def files() -> list[Path]:
    roof = sorted(SOURCE.glob("*.py"))
    return roof + [path for name in PACKAGES for path in sorted((ROOT / name).rglob("*.py"))]


def name_of(path: Path) -> str:
    shown = path.relative_to(SOURCE) if path.is_relative_to(SOURCE) else path.relative_to(ROOT)
    return shown.as_posix()


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(), str(path))


@cache
def nodes(path: Path) -> list[ast.AST]:
    return list(ast.walk(tree_of(path)))


@cache
def kind_of(path: Path) -> str | None:
    text = ast.get_docstring(tree_of(path)) or ""
    marks = (".", ":", ",", " (", " of")
    found = [kind for kind in KINDS if any(kind + mark in text for mark in marks)]
    return found[0] if found else None


@cache
def imports(path: Path) -> list[tuple[int, str, tuple[str, ...]]]:
    """(level, module, names) of every import in the file, also those inside functions."""
    found: list[tuple[int, str, tuple[str, ...]]] = []
    for node in nodes(path):
        if isinstance(node, ast.Import):
            found += [(0, alias.name, ()) for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names = tuple(alias.name for alias in node.names)
            found.append((node.level, node.module or "", names))
    return found


def package_of(path: Path) -> tuple[str, ...]:
    """The package a file belongs to: () for the roof, (index, stores) for a member of a seam."""
    return () if path.is_relative_to(SOURCE) else path.parent.relative_to(ROOT).parts


def inside(path: Path, level: int, module: str, names: tuple[str, ...]) -> list[Path] | None:
    """The files that a relative import reads; None where it climbs out of its package."""
    home = package_of(path)
    climbed = level - 1
    if level == 0 or climbed >= len(home):
        return None
    base = ROOT.joinpath(*home[: len(home) - climbed], *(module.split(".") if module else ()))
    if base.with_suffix(".py").exists():
        return [base.with_suffix(".py")]
    each = [base / f"{name}.py" for name in names]
    return [file if file.exists() else base / "__init__.py" for file in each]


@cache
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


def a_file_is_small(path: Path) -> Iterator[str]:
    lines = len(path.read_text().splitlines())
    if lines > MOST_LINES:
        yield f"{lines} lines"


def a_function_is_small(path: Path) -> Iterator[str]:
    for node in nodes(path):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            length = (node.end_lineno or node.lineno) - node.lineno + 1
            if length > MOST_FUNCTION_LINES:
                yield f"{node.name}: {length} lines"


def a_file_says_what_it_is(path: Path) -> Iterator[str]:
    if not ast.get_docstring(tree_of(path)):
        yield "no docstring"
    inside = path.parent.name in PACKAGES or path.parent.parent.name in PACKAGES
    free = path.name in ("__init__.py", "settings.py", "errors.py", "metrics.py")
    if inside and not free and not kind_of(path):
        yield f"docstring names none of {KINDS}"


@cache
def known() -> set[str]:
    return {file.name for file in (*files(), *Path(__file__).parent.rglob("*.py"))}


def files_that_a_docstring_names_exist(path: Path) -> Iterator[str]:
    """A reader follows them; a file that was renamed leaves none behind."""
    kinds = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
    for node in nodes(path):
        text = (ast.get_docstring(node) or "") if isinstance(node, kinds) else ""
        for name in re.findall(r"\b[a-z_]+\.py\b", text):
            if name not in known():
                yield f"names {name}, which is nowhere"


def everything_public_has_a_docstring(path: Path) -> Iterator[str]:
    for node in tree_of(path).body:
        named = isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.ClassDef)
        if named and not node.name.startswith("_") and not ast.get_docstring(node):
            yield f"{node.name} has none"


def a_pure_file_touches_nothing_outside(path: Path) -> Iterator[str]:
    if kind_of(path) != "Pure":
        return
    for level, module, _ in imports(path):
        if level == 0 and {module, module.split(".")[0]} & EDGES:
            yield f"imports {module}"
    for node in nodes(path):
        if isinstance(node, ast.Call):
            called, member = getattr(node.func, "id", ""), getattr(node.func, "attr", "")
            if called in CALLS or member in READS:
                yield f"calls {called}{member} in line {node.lineno}"


def no_file_imports_a_bare_package(path: Path) -> Iterator[str]:
    for level, module, _ in imports(path):
        if not level and module.split(".")[0] in PACKAGES:
            yield f"imports {module}"


RULES = (
    a_file_is_small,
    a_function_is_small,
    a_file_says_what_it_is,
    files_that_a_docstring_names_exist,
    everything_public_has_a_docstring,
    a_pure_file_touches_nothing_outside,
    no_file_imports_a_bare_package,
)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: rule.__name__)
def test_in_every_file(rule: Callable[[Path], Iterator[str]]) -> None:
    said = {name_of(path): list(rule(path)) for path in files()}
    assert len(said) > 300
    assert {name: faults for name, faults in said.items() if faults} == {}


BAD = '''"""Bad. Pure. See nowhere_at_all.py."""
import index
import socket


def open_it():
    return open("x")


def long():
    """Long."""
''' + "    pass\n" * MOST_LINES  # fmt: skip
FAULTS = (
    ["311 lines"],
    ["long: 302 lines"],
    [],
    ["names nowhere_at_all.py, which is nowhere"],
    ["open_it has none"],
    ["imports socket", "calls open in line 7"],
    ["imports index"],
)


@pytest.mark.parametrize(("rule", "faults"), list(zip(RULES, FAULTS, strict=True)))
def test_a_file_that_breaks_it_is_named(
    rule: Callable[[Path], Iterator[str]], faults: list[str], tmp_path: Path
) -> None:
    bad = tmp_path / "bad.py"
    bad.write_text(BAD)
    assert list(rule(bad)) == faults


def pure_to_edge() -> set[tuple[str, str]]:
    """(pure file, edge or door of its own package it imports)."""
    found = set()
    for path in files():
        for asked in imports(path) if kind_of(path) == "Pure" else ():
            for file in inside(path, *asked) or ():
                if file.name != "__init__.py" and kind_of(file) in ("Edge", "Door"):
                    found.add((name_of(path), name_of(file)))
    return found


def test_a_pure_file_imports_no_edge_of_its_package() -> None:
    assert pure_to_edge() == set()


@pytest.mark.parametrize("package", PACKAGES)
def test_a_package_looks_only_where_it_may(package: str) -> None:
    for path in sorted((ROOT / package).rglob("*.py")):
        for level, module, names in imports(path):
            where = f"{name_of(path)} imports {'.' * level}{module}"
            if level:
                assert inside(path, level, module, names) is not None, f"{where}: climbs out"
            if level or module.split(".")[0] != "kvplane":
                continue
            parts = module.split(".")
            if module == "kvplane":
                assert set(names) <= set(GROUND), where
                continue
            if parts[1] in GROUND:
                continue
            assert parts[1] != package, f"{where}: inside a package imports are relative"
            assert parts[1] in MAY_IMPORT[package], where
            assert len(parts) == 2 and names, f"{where}: by name, and only what its __init__ lists"
            assert set(names) <= listed(parts[1]), f"{where}: {set(names) - listed(parts[1])}"


def test_the_roof_takes_only_what_packages_list() -> None:
    for path in sorted(SOURCE.glob("*.py")):
        for level, module, names in imports(path):
            parts = module.split(".")
            assert level == 0, f"{name_of(path)}: the roof's imports are absolute"
            if parts[0] == "kvplane" and parts[1:2] and parts[1] in PACKAGES:
                where = f"{name_of(path)} imports {module}"
                assert len(parts) == 2 and set(names) <= listed(parts[1]), where


def test_every_plural_folder_is_a_seam_with_a_suite() -> None:
    for package in PACKAGES:
        folders = {path.parent.name for path in (ROOT / package).glob("*/*.py")}
        others = set(FORMS.get(package, ())) | set(PAGES.get(package, ()))
        assert folders <= set(SEAMS.get(package, ())) | others, package
        assert folders >= set(SEAMS.get(package, ())), package


def test_every_package_has_its_settings_metrics_and_errors() -> None:
    for package in PACKAGES:
        for name in ("settings.py", "metrics.py", "errors.py"):
            assert (ROOT / package / name).exists(), f"{package}/{name}"


@pytest.mark.parametrize("name", GROUND)
def test_the_ground_floor_knows_nobody(name: str) -> None:
    for level, module, _ in imports(SOURCE / f"{name}.py"):
        assert level == 0
        assert not module.startswith("kvplane") or module.split(".")[1:2] in ([g] for g in GROUND)


def test_every_seam_has_a_contract_suite() -> None:
    for package, seams in SEAMS.items():
        for seam in seams:
            assert (ROOT / "tests" / "contracts" / f"test_{seam}.py").exists(), f"{package}/{seam}"
