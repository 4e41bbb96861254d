"""All tests of the backends that need a package, each backend in a process of its own.

`make test-transfer` runs it. NIXL crashes an interpreter that exits, so those processes end with
os._exit; their exit code is that of pytest. A backend that cannot run here is skipped, with why.
"""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from kvplane.transfer import BACKENDS, NotAvailable, TransferMetrics, TransferSettings
from kvplane.transfer.backends import Missing
from kvplane.transfer.backends.mooncake import load as load_mooncake
from kvplane.transfer.backends.nixl import load as load_nixl

TESTS = Path(__file__).parents[1]
WHERE = ("contracts/test_backends.py", "transfer_extra", "engine")
LOAD = {"mooncake": load_mooncake, "nixl": load_nixl}


def why_not(name: str) -> str | None:
    """Why this backend cannot run here; None = it can."""
    make = BACKENDS[name]
    if isinstance(make, Missing):
        return make.reason
    assert make(TransferSettings(), TransferMetrics()).name == name
    try:
        LOAD[name]()
    except NotAvailable as error:
        return error.reason
    return None


def child(name: str, words: list[str]) -> int:
    """The exit code of its pytest; 0 where it is skipped."""
    reason = why_not(name)
    if reason is not None:
        print(f"\n{name}: SKIPPED, {reason}", flush=True)
        return 0
    print(f"\n{name}:", flush=True)
    command = [sys.executable, __file__, "--child", "-q", "-k", name, *words]
    return subprocess.run(command, check=False).returncode


def main(words: list[str]) -> int:
    """Worst exit code of all."""
    return max(abs(child(name, words)) for name in LOAD)


if __name__ == "__main__":
    if sys.argv[1:2] == ["--child"]:
        os.environ["KVPLANE_TEST_EXITS_HARD"] = "1"
        where = [str(TESTS / each) for each in WHERE]
        code = int(pytest.main([*sys.argv[2:], "-p", "no:cacheprovider", *where]))
        sys.stdout.flush()
        os._exit(code)
    sys.exit(main(sys.argv[1:]))
