"""One site for all client tests of a process: real engines, a real gateway, real sockets."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from kit.site import Site, site

LLAMA = "meta-llama/Llama-3.1-8B-Instruct"  # as the examples of sgl router's documents name it
STUB = "stub-model"  # as shared benchmarks of gateways name it


@pytest.fixture(scope="session")
def place() -> Iterator[Site]:
    """Started with sgl router's own flags."""
    policies = ("--policy", "cache_aware", "--decode-policy", "power_of_two")
    with site([LLAMA, STUB], *policies) as built:
        yield built


@pytest.fixture(scope="session")
def alone(place: Site) -> str:
    """URL of a gateway where a request need not name the model, since there is one."""
    return place.run(place.another_gateway(only=STUB))


@pytest.fixture
def llama() -> str:
    """The model most tests ask."""
    return LLAMA
