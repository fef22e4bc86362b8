"""Runs the examples of the documentation: every Python block of README.md and docs/ is a test."""

from __future__ import annotations

import os
from contextlib import ExitStack
from importlib.metadata import version
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from sybil import Sybil
from sybil.parsers.markdown import PythonCodeBlockParser, SkipParser


@pytest.fixture(scope="module")
def tokenizer() -> Any:
    """One token a byte."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers
    from transformers import PreTrainedTokenizerFast

    vocabulary = {"<pad>": 0} | {
        byte: index for index, byte in enumerate(sorted(pre_tokenizers.ByteLevel.alphabet()), 1)
    }
    bytewise = Tokenizer(models.BPE(vocab=vocabulary, merges=[]))
    bytewise.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bytewise.decoder = decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=bytewise, pad_token="<pad>", padding_side="left")


@pytest.fixture(scope="module")
def model(tokenizer: Any) -> Any:
    """A random Llama: two layers, four query heads, two KV heads."""
    import torch
    from transformers import AutoModelForCausalLM, LlamaConfig

    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        pad_token_id=tokenizer.pad_token_id,
        eos_token_id=None,
    )
    torch.manual_seed(0)
    return AutoModelForCausalLM.from_config(config).eval()


def _begin(namespace: dict[str, Any]) -> None:
    """What a page takes for granted beside `model` and `tokenizer`: torch, and a folder to write to."""
    import torch
    from transformers.utils import logging

    logging.set_verbosity_error()
    namespace["torch"] = torch
    namespace["_left"] = left = ExitStack()
    folder = left.enter_context(TemporaryDirectory())
    left.callback(os.chdir, os.getcwd())
    os.chdir(folder)


def _end(namespace: dict[str, Any]) -> None:
    namespace["_left"].close()


# The pages use the newest name of generate's argument, `cache`.
if tuple(map(int, version("transformers").split(".")[:2])) >= (5, 24):
    pytest_collect_file = Sybil(
        parsers=[PythonCodeBlockParser(), SkipParser()],
        patterns=["README.md", "docs/*.md"],
        setup=_begin,
        teardown=_end,
        fixtures=["model", "tokenizer"],
    ).pytest()
