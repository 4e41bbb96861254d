"""No loader in the product can be made to run what it reads (FR-EV-20).

Reads the source with ast, as test_house.py does.
"""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
PACKAGES = ("src/kvplane", "index", "bootstrap", "router", "events", "transfer", "engine")
MODULES = {  # object deserialisers, and what uses one beneath
    "pickle", "_pickle", "cPickle", "cloudpickle", "dill", "marshal", "shelve", "joblib",
    "jsonpickle", "pickletools", "copyreg", "yaml", "multiprocessing", "xmlrpc", "torch",
}  # fmt: skip
CALLS = {"eval", "exec", "compile", "__import__"}
MEMBERS = {  # of whatever object
    "recv_pyobj", "send_pyobj", "recv_serialized", "loads_pickle", "unsafe_load", "full_load",
    "UnpicklerBase", "Unpickler", "fromfile", "import_string",
}  # fmt: skip
GUARDED = {"load": "allow_pickle"}  # numpy's, where somebody turns its guard off


def files() -> list[Path]:
    return sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))


def loaders(text: str) -> list[str]:
    """What a source has of the kind, with the line."""
    found = []
    for node in ast.walk(ast.parse(text)):
        names: list[str] = []
        if isinstance(node, ast.Import):
            names = [alias.name.split(".")[0] for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            names = [(node.module or "").split(".")[0]]
        found += [f"{name}: {node.lineno}" for name in names if name in MODULES]  # type: ignore[attr-defined]
        if not isinstance(node, ast.Call):
            continue
        name = getattr(node.func, "id", None) or getattr(node.func, "attr", "")
        plain = isinstance(node.func, ast.Name)
        unguarded = any(word.arg == GUARDED.get(name) for word in node.keywords if word.arg)
        if (plain and name in CALLS) or name in MEMBERS or unguarded:
            found.append(f"{name}(): {node.lineno}")
    return found


def test_the_whole_product_is_looked_at() -> None:
    assert len(files()) > 200


@pytest.mark.parametrize("path", files(), ids=lambda path: path.relative_to(ROOT).as_posix())
def test_no_file_can_load_an_object(path: Path) -> None:
    assert loaders(path.read_text()) == []


@pytest.mark.parametrize(
    "source",
    [
        "import pickle", "from pickle import loads as read", "def f():\n    import dill",
        "import torch.serialization", "socket.recv_pyobj()", "eval(text)", "exec(code)",
        "__import__(name)", "np.load(path, allow_pickle=True)", "import yaml", "import shelve",
    ],
)  # fmt: skip
def test_the_scan_finds_what_it_looks_for(source: str) -> None:
    assert loaders(source)


@pytest.mark.parametrize("source", ["re.compile('x')", "json.loads(x)", "from .pickle import x"])
def test_the_scan_lets_pass_what_only_looks_like_it(source: str) -> None:
    assert not loaders(source)
