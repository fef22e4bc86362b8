"""A tiny random model in a folder, with a tokenizer of characters: what ``--model`` may be."""

from __future__ import annotations

from pathlib import Path
from string import printable

import torch
from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from tests import tiny

CHARACTERS = ["\n", *(c for c in printable if c.isprintable())]


def save_model(folder: Path, family: str = "llama") -> str:
    """Save a model of `family` and its tokenizer; the path as ``--model`` takes it."""
    tiny.family(family, torch.float32).save_pretrained(folder)
    save_tokenizer(folder)
    return str(folder)


def save_tokenizer(folder: Path) -> None:
    vocabulary = {token: index for index, token in enumerate(["<unk>", *CHARACTERS])}
    tokenizer = Tokenizer(models.WordLevel(vocabulary, unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    tokenizer.decoder = decoders.Fuse()
    PreTrainedTokenizerFast(tokenizer_object=tokenizer, unk_token="<unk>").save_pretrained(folder)


def save_text(file: Path, characters: int = 2000) -> str:
    """A text of that many characters, which are that many tokens."""
    words = "the cache keeps what the policy says and nothing else. "
    file.write_text((words * (characters // len(words) + 1))[:characters])
    return str(file)
