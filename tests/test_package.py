"""The package: wheel and sdist hold everything the product needs, as real files."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
NEEDED = (  # one of each kind: code of every package, a script, a tokenizer, the types marker
    "kvplane/__main__.py",
    "kvplane/py.typed",
    "kvplane/index/stores/apply.lua",
    "kvplane/engine/tokenizer/tokenizer.json",
    "kvplane/engine/tokenizer/tokenizer_config.json",
    "kvplane/events/dialects/vllm.py",
    "kvplane/router/policies/prefix.py",
    "kvplane/transfer/backends/tcp.py",
    "kvplane/bootstrap/directory.py",
    *(f"kvplane/router/dashboard/static/{name}" for name in ("page.html", "main.js", "mark.svg")),
    "kvplane/router/dashboard/static/page.css",
)


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the sdist, built from a copy of the tree."""
    copy, out = tmp_path_factory.mktemp("tree") / "kvplane", tmp_path_factory.mktemp("dist")
    leave = shutil.ignore_patterns(".*", "*.egg-info", "build", "dist", "__pycache__")
    shutil.copytree(ROOT, copy, symlinks=True, ignore=leave)
    command = [sys.executable, "-m", "build", "--no-isolation", "--outdir", str(out), str(copy)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=110, check=False)
    assert done.returncode == 0, done.stderr
    return out


def test_the_wheel_holds_code_and_data_under_one_name(built: Path) -> None:
    (wheel,) = built.glob("*.whl")
    names = set(zipfile.ZipFile(wheel).namelist())
    assert set(NEEDED) <= names
    assert all(name.startswith(("kvplane/", "kvplane-")) for name in names)


def test_the_sdist_holds_real_files_not_links(built: Path) -> None:
    (sdist,) = built.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        members = archive.getmembers()
    assert not [member.name for member in members if member.issym() or member.islnk()]
    names = {member.name.split("/", 1)[-1] for member in members}
    assert {f"src/{name}" for name in NEEDED} <= names
