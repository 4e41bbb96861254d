"""schemathesis for long: every case it knows and thousands of requests, of seed after seed.

KVPLANE_SOAK_S=300 KVPLANE_SOAK_SEED=7: about how long, and the first seed.
"""

from __future__ import annotations

import os
import time
from pathlib import Path

from kit.openapi import shake
from kit.site import site

SECONDS = float(os.environ.get("KVPLANE_SOAK_S", "300"))
SEED = int(os.environ.get("KVPLANE_SOAK_SEED", "1"))
MODELS = ["one/model", "another"]
EXAMPLES = 100  # a route and round


def test_no_route_ever_answers_with_a_server_error(tmp_path: Path) -> None:
    seed, ends = SEED, time.monotonic() + SECONDS
    with site(MODELS) as place:
        while seed == SEED or time.monotonic() < ends:
            url = place.run(place.another_gateway())
            done = shake(url, MODELS, EXAMPLES, seed, tmp_path, "coverage,fuzzing")
            assert done.returncode == 0, f"seed {seed}\n{done.stdout[-8000:]}{done.stderr}"
            place.idle()
            seed += 1
    print(f"openapi: seeds {SEED} to {seed - 1}, no server error")
