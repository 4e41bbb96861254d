"""The command line: kvplane COMMAND; options.py lists the commands.

Door. Reads argv, environment and file, has them checked by settings.py and hands the result to
wiring.py. Exit status: 0 done, 1 failed while running, 2 told something wrong.
"""

from __future__ import annotations

import logging
import os
import sys
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from kvplane.doors import PortTaken
from kvplane.settings import BadSetting, Settings, parser, resolve

# One thread of linear algebra: results must not depend on how a sum was split over cores, and
# four engines share the cores of one machine. Has to be set before numpy is imported anywhere.
BLAS = ("OPENBLAS_NUM_THREADS", "OMP_NUM_THREADS", "MKL_NUM_THREADS")
FORMAT = "%(asctime)s %(levelname).1s %(name)s %(message)s"


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command; returns the exit status."""
    try:
        settings = _settings(argv)
    except BadSetting as error:
        print(f"kvplane: {error}", file=sys.stderr)
        return 2
    level = settings.values.get("log_level", "warning")
    logging.basicConfig(level=level.upper(), format=FORMAT, stream=sys.stderr)
    for name in BLAS:
        os.environ.setdefault(name, "1")
    from kvplane import wiring  # late: --help and wrong flags answer before the heavy imports

    try:
        return wiring.run(settings)
    except PortTaken as error:
        print(f"kvplane: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return 130


def _settings(argv: Sequence[str] | None) -> Settings:
    flags = vars(parser().parse_args(argv))
    return resolve(flags, os.environ, _file(flags.get("config")))


def _file(named: str | None) -> dict[str, Any]:
    """kvplane.toml of the current folder where it exists, or the file named by --config."""
    path = Path(named or "kvplane.toml")
    if named is None and not path.exists():
        return {}
    try:
        return tomllib.loads(path.read_text())
    except OSError as error:
        raise BadSetting("config", "flag --config", str(path), str(error.strerror)) from None
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise BadSetting("config", "file", str(path), f"is not TOML: {error}") from None


if __name__ == "__main__":
    sys.exit(main())
