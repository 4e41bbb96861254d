"""Encoders: small tokenizers of every make, trained here, for what must hold for all of them."""

from __future__ import annotations

import json
from collections.abc import Callable
from datetime import datetime
from functools import cache
from typing import Any

from tokenizers import (
    AddedToken,
    Regex,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
    trainers,
)
from tokenizers import (
    Tokenizer as Encoder,
)

from kvplane.tokens import Tokenizer

SHORT = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
TAIL = r"\s*[\r\n]+|\s+(?!\S)|\s+"
LLAMA3 = (
    rf"{SHORT}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|{TAIL}"
)
QWEN2 = LLAMA3.replace("{1,3}", "")
UPPER, LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
ANY = r"[^\r\n\p{L}\p{N}]?"
O200K = (
    rf"{ANY}{UPPER}*{LOWER}+{SHORT}?|{ANY}{UPPER}+{LOWER}*{SHORT}?"
    rf"|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]*|{TAIL}"
)
DEEPSEEK = (  # line ends are there as such
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^"""
    "\r\n"
    r"\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+["
    "\r\n"
    r"]*|\s*["
    "\r\n"
    r"]+|\s+(?!\S)|\s+"
)
MARKS = ["<s>", "</s>", "<|im_start|>", "<|im_end|>", "<pad>", "<unk>"]
WORDS = (
    "the end of a word and another one, we'll see: it's 1234 tokens (I'VE 56) !! \n\n  def f(x):\n"
    "\treturn x + 1  # ok\n Привет, мир и слова это й ё 你好，世界。今天、天气 很好\n "
    "안녕 세계 はい。 "
    "café naïve e\u0301 👩‍👩‍👧 ▁a▁ b \u00a0 c\u3000d <|im \t\r\n aaa ... --- it isn't THE END\n"
)
CORPUS = [WORDS[at : at + 97] for at in range(0, len(WORDS), 13)] * 4
Made = Callable[[], Encoder]


def _bpe(
    pre: Any, normal: Any = None, train: Any = None, vocab: int = 500, **model: Any
) -> Encoder:
    """A BPE trained with pre-tokenizer `train` (None: the same), then used with `pre`."""
    encoder = Encoder(models.BPE(**model))
    if normal is not None:
        encoder.normalizer = normal
    learns = train or pre
    if learns is not None:
        encoder.pre_tokenizer = learns
    alphabet = pre_tokenizers.ByteLevel.alphabet() if "unk_token" not in model else []
    marks = [mark for mark in MARKS if mark != "<unk>" or "unk_token" in model]
    encoder.train_from_iterator(
        CORPUS,
        trainers.BpeTrainer(
            vocab_size=vocab, special_tokens=marks, initial_alphabet=alphabet, show_progress=False
        ),
    )
    if pre is not learns and pre is not None:
        encoder.pre_tokenizer = pre
    elif pre is None:
        told = json.loads(encoder.to_str())
        told["pre_tokenizer"] = None
        encoder = Encoder.from_str(json.dumps(told))
    return encoder


def _split(*regexes: str, behavior: str = "isolated", invert: bool = False) -> Any:
    splits = [pre_tokenizers.Split(Regex(one), behavior, invert) for one in regexes]
    return pre_tokenizers.Sequence(
        [*splits, pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)]
    )


def gpt2() -> Encoder:
    """Its own pattern, a blank put before each text, an end put behind it."""
    encoder = _bpe(pre_tokenizers.ByteLevel(add_prefix_space=True))
    encoder.post_processor = processors.RobertaProcessing(("</s>", 1), ("<s>", 0))
    return encoder


def llama3() -> Encoder:
    """Pattern, and words that are whole tokens without being merged."""
    encoder = _bpe(_split(LLAMA3))
    encoder.model.ignore_merges = True
    encoder.post_processor = processors.Sequence(
        [processors.ByteLevel(), processors.TemplateProcessing("<s> $A", None, [("<s>", 0)])]
    )
    return encoder


def qwen2() -> Encoder:
    """Normal form C first."""
    return _bpe(_split(QWEN2), normalizers.NFC())


def nfkd() -> Encoder:
    """A normal form that takes letters apart."""
    return _bpe(_split(O200K), normalizers.Sequence([normalizers.NFKD(), normalizers.Lowercase()]))


def tricky() -> Encoder:
    """Added tokens that take blanks, overlap, hold others, or are normalized."""
    encoder = _bpe(_split(O200K))
    encoder.add_special_tokens(
        [
            AddedToken("<mask>", lstrip=True),
            AddedToken("<|end|>", rstrip=True),
            AddedToken("<|im_end|>!", normalized=False),
            AddedToken("[<s>]", normalized=False),
            AddedToken("\n\n", normalized=False),
        ]
    )
    encoder.add_tokens([AddedToken("<think>"), AddedToken("  ", normalized=False)])
    return encoder


def overlapping() -> Encoder:
    """An added token that may begin in another one."""
    encoder = _bpe(_split(O200K))
    encoder.add_special_tokens(["s><", "|><|"])
    return encoder


def ends_in_letters() -> Encoder:
    """An added token that ends like a word: what follows it gets a mark as if it began."""
    encoder = llama2()
    encoder.add_tokens([AddedToken("Token", normalized=False)])
    return encoder


def holds_gaps() -> Encoder:
    """Added tokens that hold a letter and a gap."""
    encoder = _bpe(_split(LLAMA3))
    encoder.add_tokens([AddedToken("<a b>", normalized=False), AddedToken("<a，>")])
    return encoder


def single_words() -> Encoder:
    """An added token that looks at both its sides, and one that it may see there."""
    encoder = _bpe(_split(LLAMA3))
    encoder.add_tokens([AddedToken("-=", single_word=True, normalized=False)])
    encoder.add_special_tokens(["im>"])
    return encoder


def llama2(crossing: bool = False) -> Encoder:
    """No pre-tokenizer: merges go over the whole text. `crossing`: and over blanks, too."""
    normal = normalizers.Sequence([normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")])
    train = None if crossing else pre_tokenizers.Metaspace(prepend_scheme="never")
    encoder = _bpe(None, normal, train, unk_token="<unk>", fuse_unk=True)
    encoder.post_processor = processors.TemplateProcessing(
        "<s> $A </s>", None, [("<s>", 0), ("</s>", 1)]
    )
    return encoder


def gemma() -> Encoder:
    """Blanks are marks before anything splits at blanks."""
    train = pre_tokenizers.Metaspace(prepend_scheme="never")
    pre = pre_tokenizers.Split(" ", "merged_with_previous")
    return _bpe(pre, normalizers.Replace(" ", "▁"), train, unk_token="<unk>")


def mistral() -> Encoder:
    """Only the first word of a text gets a mark."""
    pre = pre_tokenizers.Metaspace(prepend_scheme="first", split=False)
    return _bpe(pre, None, pre_tokenizers.Metaspace(prepend_scheme="first"), unk_token="<unk>")


def bert() -> Encoder:
    """Words at blanks and punctuation, accents gone."""
    encoder = Encoder(models.WordPiece(unk_token="<unk>"))
    encoder.normalizer = normalizers.BertNormalizer()
    encoder.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    encoder.train_from_iterator(
        CORPUS, trainers.WordPieceTrainer(vocab_size=300, special_tokens=MARKS, show_progress=False)
    )
    encoder.post_processor = processors.BertProcessing(("</s>", 1), ("<s>", 0))
    return encoder


def unigram(split: bool = True, nmt: bool = False) -> Encoder:
    """The likeliest pieces of each word, or (`split` off) of the whole text."""
    encoder = Encoder(models.Unigram())
    if nmt:
        encoder.normalizer = normalizers.Sequence([normalizers.Nmt(), normalizers.NFKC()])
    encoder.pre_tokenizer = pre_tokenizers.Metaspace()
    encoder.train_from_iterator(
        CORPUS,
        trainers.UnigramTrainer(
            vocab_size=300, special_tokens=MARKS, unk_token="<unk>", show_progress=False
        ),
    )
    encoder.pre_tokenizer = pre_tokenizers.Metaspace(split=split)
    encoder.decoder = decoders.Metaspace()
    return encoder


ENCODERS: dict[str, Made] = {
    "gpt2": gpt2,
    "llama3": llama3,
    "qwen2": qwen2,
    "o200k": lambda: _bpe(_split(O200K, behavior="removed", invert=True)),
    "deepseek": lambda: _bpe(_split(r"\p{N}{1,3}", "[一-龥぀-ゟ゠-ヿ]+", DEEPSEEK)),
    "nfkd": nfkd,
    "tricky": tricky,
    "overlapping": overlapping,
    "ends_in_letters": ends_in_letters,
    "holds_gaps": holds_gaps,
    "single_words": single_words,
    "llama2": llama2,
    "crossing": lambda: llama2(crossing=True),
    "gemma": gemma,
    "mistral": mistral,
    "bert": bert,
    "bert_bytes": lambda: _bpe(_split(r" ?\p{L}+|\s+"), normalizers.BertNormalizer()),
    "unigram": unigram,
    "unigram_whole": lambda: unigram(split=False),
    "unigram_nmt": lambda: unigram(nmt=True),
    "unknown_pattern": lambda: _bpe(_split(r"\w+ ?|[^\w]+")),
    "bytes_whole": lambda: _bpe(
        pre_tokenizers.ByteLevel(False, use_regex=False), None, _split(QWEN2)
    ),
    "bytes_first": lambda: _bpe(
        pre_tokenizers.Sequence(
            [
                pre_tokenizers.ByteLevel(False, use_regex=False),
                pre_tokenizers.Split(Regex(LLAMA3), "isolated"),
            ]
        )
    ),
}


@cache
def tokenizer(name: str) -> Tokenizer:
    """One of them, or the builtin one."""
    if name == "builtin":
        return Tokenizer.load(name)
    return Tokenizer(ENCODERS[name](), {}, datetime.now)
