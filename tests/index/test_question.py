"""Question: items of a prompt become extra keys of blocks; what cannot be meant is named."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from kvplane.index import BadValue, chain
from kvplane.index.question import MOST_ITEMS, Item, Question, chains, extra, read
from kvplane.vocabulary import Namespace

TOKENS = list(range(40))


def asked(items: Any, **more: Any) -> Question:
    return read(
        msgspec.json.encode({"model": "m", "token_ids": TOKENS, "items": items, **more}), 100
    )


def item(id: str = "img", start: int = 6, length: int = 4) -> dict[str, Any]:
    return {"id": id, "start": start, "length": length}


@pytest.mark.parametrize(
    ("items", "size", "found"),
    [
        ([], 4, {}),
        ([Item("a", 6, 4)], 4, {1: ["a@2"], 2: ["a@-2"]}),
        ([Item("a", 6, 4)], 16, {0: ["a@6"]}),
        ([Item("a", 0, 9)], 4, {0: ["a@0"], 1: ["a@-4"], 2: ["a@-8"]}),
        ([Item("a", 4, 4)], 4, {1: ["a@0"]}),
        ([Item("a", 3, 1), Item("b", 4, 1), Item("c", 5, 1)], 4, {0: ["a@3"], 1: ["b@0", "c@1"]}),
    ],
)
def test_items_reach_into_blocks(items: list[Item], size: int, found: Any) -> None:
    assert extra(items, size) == found


def test_each_block_size_has_keys_of_its_own() -> None:
    found = chains(asked([item(start=17, length=2), item("first", 1, 1)]), {4, 16})
    assert found[4] == chain(TOKENS, Namespace("m", 4), {0: ["first@1"], 4: ["img@1"]})
    assert found[16] == chain(TOKENS, Namespace("m", 16), {0: ["first@1"], 1: ["img@1"]})


def test_a_prompt_without_items_is_what_it_was() -> None:
    assert chains(asked([]), {4}) == chains(asked(None), {4})
    assert chains(asked(None), {4})[4] == chain(TOKENS, Namespace("m", 4))


@pytest.mark.parametrize(
    ("items", "field", "want"),
    [
        (7, "items", "array"),
        ([7], r"items\[0\]", "object"),
        ([item(), {"id": "x", "start": 1}], r"items\[1\]\.length", "given"),
        ([item(start="x")], r"items\[0\]\.start", "int"),  # type: ignore[arg-type]
        ([item(), item(id="")], r"items\[1\]\.id", "name of the content"),
        ([item(start=-1)], r"items\[0\]\.start", "from 0"),
        ([item(length=0)], r"items\[0\]\.length", "1 token or more"),
        ([item(start=38, length=3)], "items of 'img'", "within the 40 tokens"),
        ([item(start=10**12)], "items of 'img'", "within the 40 tokens"),
        ([item(start=0, length=40)] * 5, "items", "hardly overlap"),
        ([item()] * (MOST_ITEMS + 1), "items", f"at most {MOST_ITEMS}"),
    ],
)
def test_items_that_cannot_be_meant_are_named(items: Any, field: str, want: str) -> None:
    with pytest.raises(BadValue, match=f"^{field}: .* must be .*{want}"):
        chains(asked(items), {4})


def test_hashes_have_their_items_already() -> None:
    body = {"model": "m", "block_hashes": ["0" * 16], "items": [item()]}
    with pytest.raises(BadValue, match="items: 1 is wrong, must be left out"):
        read(msgspec.json.encode(body), 100)
    assert list(read(msgspec.json.encode({**body, "items": []}), 100).hashes or ()) == [0]


HEX = [f"{number * 0x9E3779B97F4A7C15 % 2**64:016x}" for number in range(40)]


@pytest.mark.parametrize("many", [0, 1, 2, 40])
def test_hashes_are_read_whatever_their_letters(many: int) -> None:
    texts = [text.upper() if at % 3 else text for at, text in enumerate(HEX[:many])]
    found = read(msgspec.json.encode({"block_hashes": texts}), 100).hashes
    assert found is not None and list(found) == [int(text, 16) for text in texts]


@pytest.mark.parametrize(
    "wrong",
    ["", " ", " " * 16, "0" * 15, "0" * 17, "0" * 33, "0" * 16 + " " + "0" * 16, " " + "0" * 15,
     "00 00" + "0" * 11, "0x" + "0" * 14, "g" * 16, "０" * 16, "0" * 15 + "\n", "-" + "0" * 15],
)  # fmt: skip
@pytest.mark.parametrize("at", [0, 7, 39])
def test_a_hash_that_is_none_is_named_wherever_it_stands(wrong: str, at: int) -> None:
    texts = [*HEX]
    texts[at] = wrong
    for some in (texts, [*texts[:at], wrong, "0" * 15, *texts[at + 1 :]]):
        with pytest.raises(BadValue, match=rf"^block_hashes\[{at}\]: .*16 hex digits"):
            read(msgspec.json.encode({"block_hashes": some}), 100)


@pytest.mark.parametrize("name", ["model", "adapter", "salt"])
def test_names_that_would_fill_the_memory_are_refused(name: str) -> None:
    fits = {"model": "m" * 4096, "adapter": "a" * 4096, "salt": "s" * 4096, "token_ids": [1]}
    assert len(getattr(read(msgspec.json.encode(fits), 10), name)) == 4096
    for other in ("", "x" * 4000):
        body = {
            "model": other,
            "adapter": other,
            "salt": other,
            "token_ids": [1],
            name: "x" * 13000,
        }
        with pytest.raises(BadValue, match=f"^{name}: .* at most 4096 characters"):
            read(msgspec.json.encode(body), 10)
