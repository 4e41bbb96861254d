"""BLAS: one thread for small matrices.

Edge: reaches into the library numpy brought along. Matrices of 16 rows lose time when shared out,
and a split sum rounds in another order: engines that are compared must split alike. The variable
OPENBLAS_NUM_THREADS=1 does the same, but only before numpy is first imported. Open it when numpy
comes with another BLAS.
"""

from __future__ import annotations

import ctypes
from contextlib import suppress
from pathlib import Path

import numpy as np

SYMBOLS = ("scipy_openblas_set_num_threads64_", "openblas_set_num_threads64_",
           "scipy_openblas_set_num_threads", "openblas_set_num_threads")  # fmt: skip


def libraries() -> list[Path]:
    """OpenBLAS as numpy's wheels bring it; empty for other builds of numpy."""
    home = Path(np.__file__).parent
    places = (home.parent / "numpy.libs", home / ".dylibs")
    return [path for place in places for path in sorted(place.glob("*openblas*"))]


def one_thread() -> bool:
    """Tell the BLAS of this process; False where it is another one than OpenBLAS wheels bring."""
    for path in libraries():
        with suppress(OSError):
            library = ctypes.CDLL(str(path))
            for symbol in SYMBOLS:
                if hasattr(library, symbol):
                    getattr(library, symbol)(ctypes.c_int(1))
                    return True
    return False
