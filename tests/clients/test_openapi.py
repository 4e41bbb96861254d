"""schemathesis over every documented route, and over the inference routes: no 5xx, whatever comes.

A few requests of a fixed seed here; `make soak` goes through every case it knows, and many more.
"""

from __future__ import annotations

from pathlib import Path

from kit.openapi import shake
from kit.site import Site


def test_no_route_answers_with_a_server_error(place: Site, tmp_path: Path) -> None:
    url = place.run(place.another_gateway())
    done = shake(url, sorted(place.pairs), examples=2, seed=20261130, folder=tmp_path)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr
    place.idle()
