"""The command line: kvplane COMMAND; options.py lists the commands.

Door. Reads argv, environment and file, has them checked by settings.py and hands the result to
wiring.py. Exit status: 0 done, 1 failed while running, 2 told something wrong, 130 by Ctrl-C.
Imports almost nothing before main() runs, so that an early Ctrl-C finds no traceback to print.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from collections.abc import Sequence
    from typing import Any

    from kvplane.settings import Settings

# One thread of linear algebra: results must not depend on how a sum was split over cores, and
# four engines share the cores of one machine. Has to be set before numpy is imported anywhere.
BLAS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")

# What is loaded stays: at the 700 of Python an eighth of the start were looks at it for garbage.
# A command that serves sets its own when all is loaded (runtime.py).
LOOKS_WHILE_LOADING = (50_000, 20, 10)


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    _end_at_once_by_ctrl_c()
    gc.set_threshold(*LOOKS_WHILE_LOADING)
    from kvplane import logs
    from kvplane.settings import BadSetting

    try:
        settings = _settings(argv)
    except BadSetting as error:
        print(f"kvplane: {error}", file=sys.stderr)
        return 2
    logs.begin(settings.values.get("log_level", "warning"), settings.values.get("log_format", ""))
    for name in BLAS:
        os.environ.setdefault(name, "1")
    from kvplane import wiring  # late: --help and wrong flags answer before the heavy imports

    return wiring.run(settings)


def _end_at_once_by_ctrl_c() -> None:
    """Until wiring.py listens for it, nothing was begun that had to be undone."""
    if threading.current_thread() is not threading.main_thread():
        return
    if signal.getsignal(signal.SIGINT) is signal.default_int_handler:  # an ignored one stays so
        signal.signal(signal.SIGINT, signal.SIG_DFL)


def _settings(argv: Sequence[str] | None) -> Settings:
    from kvplane.settings import read, resolve

    flags = read(argv)
    return resolve(flags, os.environ, _file(flags.get("config"), os.environ.get("KVPLANE_CONFIG")))


def _file(flag: str | None, variable: str | None) -> dict[str, Any]:
    """kvplane.toml of the current folder where it exists, or the file that was named."""
    import tomllib
    from pathlib import Path

    from kvplane.settings import BadSetting

    path = Path(flag or variable or "kvplane.toml")
    if not (flag or variable or path.exists()):
        return {}
    source = "environment KVPLANE_CONFIG" if variable else "the file here"
    if flag:
        source = "flag --config"
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        want = f"must be a file that can be read ({error.strerror})"
        raise BadSetting("config", source, str(path), want) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSetting("config", source, str(path), f"is not TOML: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
