"""schemathesis for long: thousands of requests a route, of a seed that is printed.

KVPLANE_SOAK_S=300   about how long       KVPLANE_SOAK_SEED=7   the first seed
"""

from __future__ import annotations

import json
import os
import random
import time
from pathlib import Path

from kit.openapi import inference, shake
from kit.site import site

MODELS = ["one/model", "another"]
EXAMPLES = 100  # a route and round


def test_no_route_ever_answers_with_a_server_error(tmp_path: Path) -> None:
    lasts_s = float(os.environ.get("KVPLANE_SOAK_S", "300"))
    seed = int(os.environ.get("KVPLANE_SOAK_SEED", random.SystemRandom().randrange(10**6)))
    told = tmp_path / "inference.json"
    told.write_text(json.dumps(inference(MODELS)))
    with site(MODELS) as place:
        ends, rounds = time.monotonic() + lasts_s, 0
        while not rounds or time.monotonic() < ends:
            at = place.run(place.another_gateway())
            documents = {f"{at}/openapi.json": at, f"{at}/index/openapi.json": f"{at}/index"}
            for document, url in (documents | {str(told): place.url}).items():
                done = shake(document, url, EXAMPLES, seed, tmp_path)
                assert done.returncode == 0, f"seed {seed}\n{done.stdout[-8000:]}{done.stderr}"
            place.idle()
            seed, rounds = seed + 1, rounds + 1
        print(f"openapi: {rounds} rounds up to seed {seed - 1}, no server error")
