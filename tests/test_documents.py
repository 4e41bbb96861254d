"""The gateway's document names the index's routes as they are reached there, each name once."""

from __future__ import annotations

from collections import Counter

from fastapi import FastAPI
from pydantic import BaseModel

from kvplane.documents import with_index


class Body(BaseModel):
    """Of the gateway's only."""

    url: str


def app() -> tuple[FastAPI, FastAPI]:
    gateway, index = FastAPI(), FastAPI()

    @gateway.post("/workers")
    async def workers(body: Body) -> None:
        """The gateway's."""

    @index.post("/workers")
    async def of_index() -> None:
        """The index's."""

    of_index.__name__ = "workers"
    return gateway, index


def test_both_are_in_one_document_that_is_made_once() -> None:
    gateway, index = app()
    both = with_index(gateway, index)
    found = both.openapi()
    assert both.openapi() is found
    assert set(found["paths"]) == {"/workers", "/index/workers", "/index/changes"}
    assert found["paths"]["/index/workers"]["post"]["description"] == "The index's."
    assert "Body" in found["components"]["schemas"]
    told = [one for methods in found["paths"].values() for one in methods.values()]
    names = Counter(one["operationId"] for one in told)
    assert set(names.values()) == {1}
    assert set(index.openapi()["paths"]) == {"/workers"}  # its own stays as it is
