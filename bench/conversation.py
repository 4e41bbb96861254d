"""Conversation: what a chat of 64 k tokens costs in its first turn, and in its next one.

A turn is a reply and one more message, 200 tokens each. Rows: the template; tokenise and hash as
without a memory, in a first turn with an empty one, in the second; and what share of the first that
is. `text` is the same as a completion's prompt that grows.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from tokenizers import Regex, models, pre_tokenizers, trainers
from tokenizers import Tokenizer as Encoder

from bench.timing import ROUNDS, Row
from kvplane.index import Chains, chain
from kvplane.recall import Recall
from kvplane.tokens import Tokenizer
from kvplane.vocabulary import Namespace

TOKENS, NEW = 65_536, 200
SPACE = Namespace("bench", 16)
ROOT = Path(__file__).parents[1]
PATTERN = (  # of Llama 3
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
Turn = list[dict[str, Any]]


def rows(tokens: int = TOKENS, rounds: int = ROUNDS) -> Iterator[Row]:
    """A trained BPE of 8000 tokens with Llama 3's pattern, then the tiny engine's bytes."""
    text = "".join(path.read_text() for path in sorted(ROOT.glob("*/*.py")))
    for name, tokenizer in (("BPE", _trained(text)), ("bytes", Tokenizer.load("builtin"))):
        per_token = len(text) / len(tokenizer.encode(text, False))
        asked, more = text[: round(tokens * per_token)], text[-round(2 * NEW * per_token) :]
        first, second = _chat(asked, more, round(400 * per_token))
        yield from _turns(f"chat, {name}", tokenizer, [first, first + second], rounds)
        yield from _asked(f"text, {name}", tokenizer, [asked, asked + more], True, rounds)


def _trained(text: str) -> Tokenizer:
    encoder = Encoder(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    trainer = trainers.BpeTrainer(
        vocab_size=8000,
        special_tokens=["<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    encoder.train_from_iterator([text[: len(text) // 3]], trainer)
    return Tokenizer(encoder, {"chat_template": TEMPLATE}, datetime.now)


def _chat(text: str, more: str, step: int) -> tuple[Turn, Turn]:
    """A conversation in messages of `step` characters, every second a reply; how it goes on."""
    found = Turn()
    for part in (text[at : at + step] for at in range(0, len(text), step)):
        found.append({"role": "assistant" if len(found) % 2 else "user", "content": part})
    parts = more[: len(more) // 2], more[len(more) // 2 :]
    roles = ("assistant", "user") if len(found) % 2 else ("user", "assistant")
    return found, [{"role": role, "content": part} for role, part in zip(roles, parts, strict=True)]


def _turns(name: str, tokenizer: Tokenizer, turns: list[Turn], rounds: int) -> Iterator[Row]:
    yield _milliseconds(f"{name}, template of a turn", lambda: tokenizer.render(turns[1]), rounds)
    yield from _asked(name, tokenizer, [tokenizer.render(turn) for turn in turns], False, rounds)


def _asked(
    name: str, tokenizer: Tokenizer, texts: list[str], special: bool, rounds: int
) -> Iterator[Row]:
    """Both turns, each round with memories of its own; their tokens and names are checked."""
    right = [chain(tokenizer.encode(text, special), SPACE) for text in texts]
    took: tuple[list[float], list[float]] = ([], [])
    for _ in range(rounds):
        recall, chains = Recall(2**28, check_every=0), Chains(2**26)
        recall.encode_many(tokenizer, [texts[0][-4000:]], special)  # the tokenizer is looked at
        for turn, text in enumerate(texts):
            began = time.perf_counter()
            (ids,) = recall.encode_many(tokenizer, [text], special)
            found = chains.chain(ids, SPACE)
            took[turn].append((time.perf_counter() - began) * 1000)
            assert found == right[turn], "what is recalled is what is asked"
    size = f"{name}, {right[0].tokens:,} tokens"

    def whole() -> object:
        return chain(tokenizer.encode(texts[0], special), SPACE)

    yield _milliseconds(f"{size}, whole", whole, rounds)
    yield Row(f"{name}, first turn", "ms", tuple(took[0]))
    yield Row(f"{name}, second turn", "ms", tuple(took[1]))
    shares = tuple(100 * second / first for first, second in zip(*took, strict=True))
    yield Row(f"{name}, second turn of the first", "%", shares)


def _milliseconds(name: str, work: Callable[[], object], rounds: int) -> Row:
    values = []
    for _ in range(rounds):
        began = time.perf_counter()
        work()
        values.append((time.perf_counter() - began) * 1000)
    return Row(name, "ms", tuple(values))
