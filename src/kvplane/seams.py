r"""Seams: where may a text be cut so that the tokens of its parts are the tokens of the whole?

Pure, ground floor. Reads a tokenizer.json; recall.py cuts by it, so that of a conversation only the
new end is tokenised. Imports nothing of ours. Open it to teach it another pre-tokenizer.

    ...the end<|im_end|>        before a mark: an added token that is found in the raw text, before
              ^                 anything else happens; what stands left and right never meet again
    ...a letter and| a gap      before a gap: a blank, line end or comma of Asia after a letter,
                   ^            where this tokenizer never has both in one word

Said of a gap, word by word: tokens(left + right) = tokens(left) + tokens("a" + right) without those
of "a". It needs that (1) no added token reaches over it or ends before it, (2) the normalizer does
not, (3) a pre-tokenizer always splits there, or no token of a BPE reaches over it, and (4) nothing
looks back.
Patterns are taken alternative by alternative: each in the table below holds no letter that a gap
follows, and looks ahead only behind white space. What is not known has no seams: never a guess.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping
from typing import Any

Json = Mapping[str, Any]
Frame = tuple[tuple[int, ...], tuple[int, ...]]

LETTERS = "A-Za-zА-ИК-Яа-ик-я一-龥가-힣"  # letters that no normal form takes apart into marks
GAPS = " \n，。、"
GUARD = "a"  # stands for the left side where a part is tokenised alone

MODELS = {"BPE", "Unigram", "WordPiece", "WordLevel"}  # each word by itself
SPLITTERS = {  # each piece by itself, whatever stands beside it
    "BertPreTokenizer", "ByteLevel", "CharDelimiterSplit", "Digits", "FixedLength", "Metaspace",
    "Punctuation", "Split", "UnicodeScripts", "Whitespace", "WhitespaceSplit",
}  # fmt: skip
CALM = {"NFC", "NFD", "NFKC", "NFKD", "Lowercase", "StripAccents", "BertNormalizer", "Prepend"}
BLANKS = {"BertPreTokenizer": GAPS, "Whitespace": GAPS, "WhitespaceSplit": " \n"}

_SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_CASED = tuple(rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}{n}" for n in (f"*{_LOWER}+", f"+{_LOWER}*"))
WORDS: tuple[frozenset[str], ...] = tuple(  # any of these takes every letter into a match
    map(
        frozenset,
        [
            {r" ?\p{L}+"},
            {r"[^\r\n\p{L}\p{N}]?\p{L}+"},
            {r"[^\r\n\p{L}\p{N}]?+\p{L}+"},
            {r"[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"},
            set(_CASED),
            {f"{one}{_SHORT}?" for one in _CASED},
        ],
    )
)
OTHERS = {
    "'s", "'t", "'re", "'ve", "'m", "'ll", "'d", _SHORT, r"'(?i:[sdmt]|ll|ve|re)",
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+""", "[一-龥぀-ゟ゠-ヿ]+",
    r"\p{N}", r"\p{N}+", r" ?\p{N}+", r"\p{N}{1,3}", r"\p{N}{1,3}+",
    r" ?[^\s\p{L}\p{N}]+", r" ?[^\s\p{L}\p{N}]+[\r\n]*", r" ?[^\s\p{L}\p{N}]+[\r\n/]*",
    r" ?[^\s\p{L}\p{N}]++[\r\n]*", r" ?[\p{P}\p{S}]+[\r\n]*",
    r"\s*[\r\n]+", r"\s*[\r\n]", r"\s+(?!\S)", r"\s+", r"\s",
}  # fmt: skip
_ALTERNATIVE = re.compile(r"(?:\\.|\[(?:\\.|[^\]\\])*\]|\((?:\\.|[^()\\])*\)|[^|\\])+", re.DOTALL)


class Seams:
    """Where texts of one tokenizer may be cut, and what it puts around a text (`frame`)."""

    def __init__(
        self,
        marks: Iterable[str] = (),
        gaps: str = "",
        frame: Frame | None = None,
        reason: str = "",
    ) -> None:
        self.marks, self.gaps = tuple(marks), gaps
        self.frame = frame  # ids before and after a text; None = not known
        self.reason = reason  # why there are none
        heads = "".join(map(re.escape, sorted({mark[0] for mark in self.marks})))
        after = [f"(?<=[{LETTERS}][{gaps}])"] * bool(gaps) + [f"(?<=[{heads}])"] * bool(heads)
        places = f"[{gaps}{heads}](?:{'|'.join(after)})"  # a set first: it is quickly looked for
        self._places = re.compile(places) if after else None

    def __repr__(self) -> str:
        return f"Seams({len(self.marks)} marks, gaps {self.gaps!r}, {self.reason or 'known'})"

    def pieces(self, text: str, least: int) -> list[str]:
        """The parts of a text; each but the last has `least` characters or more. Where two texts
        begin alike, so do their parts."""
        found, at = [], 0
        while (cut := self._next(text, at + least)) >= 0:
            found.append(text[at:cut])
            at = cut
        found.append(text[at:])
        return found

    def _next(self, text: str, start: int) -> int:
        if self._places is not None:
            for match in self._places.finditer(text, start):
                if match[0] in self.gaps or text.startswith(self.marks, match.start()):
                    return match.start()
        return -1

    def guarded(self, piece: str) -> bool:
        """Does this part, which is not the first, need the guard before it?"""
        return piece[:1] in self.gaps


def seams_of(told: Json) -> Seams:
    """The seams of a tokenizer, from its tokenizer.json."""
    added, frame = told.get("added_tokens") or [], _frame(_flat(told.get("post_processor")))
    model, steps = told["model"], _flat(told.get("pre_tokenizer"))
    kinds = {step["type"] for step in steps}
    if model.get("type") not in MODELS or model.get("dropout"):
        return Seams(frame=frame, reason="model")
    if not kinds <= SPLITTERS:
        return Seams(frame=frame, reason="pre-tokenizer")
    if any(token["single_word"] for token in added):  # looks at both sides of a cut
        return Seams(frame=frame, reason="single words")
    marks, gaps = _marks(added), _clear(added, _gaps(told, steps), told.get("normalizer"))
    return Seams(marks, gaps, frame, "" if marks or gaps else "no seams")


def _flat(step: Json | None) -> list[Json]:
    """The steps of a Sequence, in order."""
    if not step:
        return []
    for name in ("normalizers", "pretokenizers", "processors"):
        if step["type"] == "Sequence" and name in step:
            return [one for inner in step[name] for one in _flat(inner)]
    return [step]


def _frame(steps: list[Json]) -> Frame | None:
    """Ids that the post-processor puts before and after a text."""
    before: tuple[int, ...] = ()
    after: tuple[int, ...] = ()
    for step in steps:
        if step["type"] in ("BertProcessing", "RobertaProcessing"):
            around: tuple[list[int], list[int]] = [step["cls"][1]], [step["sep"][1]]
        elif step["type"] == "TemplateProcessing":
            pieces = step["single"]
            if sum("Sequence" in piece for piece in pieces) != 1:
                return None
            at = next(n for n, piece in enumerate(pieces) if "Sequence" in piece)
            named = [_named(step, part) for part in (pieces[:at], pieces[at + 1 :])]
            around = named[0], named[1]
        elif step["type"] == "ByteLevel":  # touches offsets only
            continue
        else:
            return None
        before, after = (*around[0], *before), (*after, *around[1])
    return before, after


def _named(step: Json, pieces: Iterable[Json]) -> list[int]:
    names = [piece["SpecialToken"]["id"] for piece in pieces]
    return [number for name in names for number in step["special_tokens"][name]["ids"]]


# Marks ------------------------------------------------------------------------------------------


def _marks(added: Iterable[Json]) -> list[str]:
    """Added tokens that are found wherever they stand: no other begins before one and reaches into
    it, or holds it. Those that take blanks on their left are left out."""
    raw = [token for token in added if not token["normalized"] and token["content"]]
    every = "\0".join(token["content"] for token in raw)
    tails = {text[at:] for text in every.split("\0") for at in range(1, len(text))}
    return sorted(
        token["content"]
        for token in raw
        if not token["lstrip"] and _alone(token["content"], every, tails)
    )


def _alone(mark: str, every: str, tails: set[str]) -> bool:
    if len(mark) < 2 or mark[0].isspace() or mark[0] in GAPS or every.count(mark) != 1:
        return False
    return not any(mark[:end] in tails for end in range(1, len(mark) + 1))


# Gaps -------------------------------------------------------------------------------------------


def _gaps(told: Json, steps: list[Json]) -> str:
    """Characters that never share a word with a letter on their left."""
    normal = _flat(told.get("normalizer"))
    if not all(step["type"] in CALM or _is_blank_mark(step) for step in normal):
        return ""
    kinds = {step["type"] for step in normal}
    if "BertNormalizer" in kinds and not (steps and steps[0]["type"] in BLANKS):
        return ""  # puts blanks beside letters of Asia, which only these throw away again
    usable = GAPS if kinds <= {"NFC"} else " \n"  # NFKC makes another comma of those of Asia
    found: set[str] = set()
    shown = {" ": "▁" if any(map(_is_blank_mark, normal)) else " ", "\n": "\n"}
    for step in steps:
        split = _splits(step, shown)
        if split is None:
            return "".join(sorted(found & set(usable)))
        found.update(split)
        if step["type"] == "ByteLevel":
            shown = {" ": "Ġ", "\n": "Ċ"}
        elif step["type"] == "Metaspace":
            shown[" "] = step["replacement"]
    if told["model"]["type"] == "BPE" and "BertNormalizer" not in kinds:
        found.update(_unreached(told["model"], shown))
    return "".join(sorted(found & set(usable)))


def _is_blank_mark(step: Json) -> bool:
    """The step that makes ▁ of blanks, one by one."""
    made = step.get("pattern"), step.get("content")
    return step["type"] == "Replace" and made == ({"String": " "}, "▁")


def _splits(step: Json, shown: Mapping[str, str]) -> str | None:
    """Gaps before which a pre-tokenizer always splits; "" where cuts there leave its other splits
    as they are; None where that is not known. `shown`: what it sees for a blank and a line end."""
    kind = step["type"]
    if shown["\n"] != "\n":
        return None  # sees bytes as letters
    if kind in ("Digits", "Punctuation"):
        return ""
    if kind == "Metaspace":
        return " " if step["split"] else ""
    if shown[" "] != " ":
        blanks = kind == "Split" and step["pattern"] == {"String": " "}  # there are none left
        return "" if blanks or (kind == "ByteLevel" and not step["use_regex"]) else None
    if kind == "ByteLevel":
        return GAPS if step["use_regex"] else ""
    if kind == "Split" and step["behavior"] in ("Isolated", "Removed"):
        return _pattern(step["pattern"].get("Regex", ""))
    return BLANKS.get(kind)


def _pattern(regex: str) -> str | None:
    """Of a pattern whose every alternative is known."""
    plain = regex.replace("\r", r"\r").replace("\n", r"\n")
    parts = frozenset(_ALTERNATIVE.findall(plain))
    words = frozenset().union(*WORDS)
    if not parts or "||" in plain or not parts <= words | OTHERS:
        return None
    return GAPS if any(one <= parts for one in WORDS) else ""


def _unreached(model: Json, shown: Mapping[str, str]) -> list[str]:
    """Gaps over which no token of a BPE reaches, so that no merge does."""
    if any(map(model.get, ("ignore_merges", "continuing_subword_prefix", "end_of_word_suffix"))):
        return []
    found = []
    for gap, seen in shown.items():
        reaches = re.compile(f"[^{re.escape(seen)}]{re.escape(seen)}").search
        held = (text for text in model["vocab"] if seen in text)
        if seen in model["vocab"] and not any(map(reaches, held)):
            found.append(gap)
    return found


def _clear(added: Iterable[Json], gaps: str, normalizer: Json | None) -> str:
    """Gaps over which no added token reaches either. Left of them must stand a letter of a word:
    what follows an added token may be normalized another way."""
    for token in added:
        text = token["content"]
        plain = all("!" <= one <= "~" for one in text)  # no normalizer makes gaps of these
        if token["normalized"] and _flat(normalizer) and not plain:
            return ""
        if re.search(f"[{LETTERS}]$", text):
            return ""
        gaps = "".join(g for g in gaps if not re.search(f"[{LETTERS}]{re.escape(g)}", text))
    return gaps
