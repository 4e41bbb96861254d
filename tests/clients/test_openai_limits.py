"""OpenAI's package where the gateway says no, or not now."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
from kit.site import Site

HELLO: Any = [{"role": "user", "content": "Hello"}]


def client(url: str, retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=retries, timeout=60)


def test_who_finds_no_place_is_told_when_to_come_back_and_then_does(
    place: Site, llama: str
) -> None:
    url = place.run(place.another_gateway("--max-concurrent-requests", "1", "--queue-size", "0"))
    asked: Any = {"model": llama, "messages": HELLO}
    with client(url) as first, client(url) as second, client(url, retries=8) as patient:
        stream = first.chat.completions.create(
            **asked, max_tokens=1500, stream=True, extra_body={"ignore_eos": True}
        )
        next(stream)
        with pytest.raises(openai.RateLimitError) as refused:
            second.chat.completions.create(**asked, max_tokens=2)
        assert refused.value.code == "overloaded"
        assert int(refused.value.response.headers["retry-after"]) >= 1
        with ThreadPoolExecutor(1) as pool:
            later = pool.submit(patient.chat.completions.create, **asked, max_tokens=2)
            stream.close()
            assert later.result(60).choices, "its own retries are enough"
    place.idle()


def test_what_a_prefill_and_a_decode_cannot_do_together_is_said(place: Site, llama: str) -> None:
    with client(place.url) as found:
        with pytest.raises(openai.APIStatusError) as refused:
            found.responses.create(model=llama, input="Hello")
        assert (refused.value.status_code, refused.value.code) == (501, "unsupported_route")
        with pytest.raises(openai.NotFoundError):  # passed on; these engines have no such route
            found.embeddings.create(model=llama, input="Hello")


def test_many_at_once_are_all_answered_each_with_its_own(place: Site, llama: str) -> None:
    """Streams and plain answers mixed: none is given another's."""
    prompts = [f"{number} is the number of this prompt" for number in range(6)]

    def ask(number: int) -> tuple[str, str]:
        prompt = prompts[number % 6]
        asked: Any = {"model": llama, "prompt": prompt, "max_tokens": 12}
        with client(place.url) as found:
            if number % 4 < 2:
                return prompt, found.completions.create(**asked).choices[0].text
            stream = found.completions.create(**asked, stream=True)
            return prompt, "".join(part.choices[0].text for part in stream)

    with ThreadPoolExecutor(6) as pool:
        said = list(pool.map(ask, range(18)))
    texts: dict[str, set[str]] = {}
    for prompt, text in said:
        texts.setdefault(prompt, set()).add(text)
    assert all(len(each) == 1 for each in texts.values())
    assert len({text for each in texts.values() for text in each}) == 6
    place.idle()
