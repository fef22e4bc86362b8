"""Recall: repeating a passage after the prompt that holds it was cut."""

from __future__ import annotations

import random
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from kvpolicy.evaluate.task import Context, EvaluationTask, Metric

_WORD = re.compile("[Ġ▁][A-Za-z]{4,}")
_COMMON = 500


@dataclass(frozen=True)
class Recall(EvaluationTask):
    """Repeats a passage of random words that stands somewhere in the prompt.

    Each prompt is a sample of the text with a passage hidden in it, at depths spread evenly over the samples, and ends
    with the first `cue` words of the passage. The prompt is read in one call and cut. Then come the other words, one
    by one: a word counts if the model found it the likeliest before it read it. Copying is what even small models can
    do, and the words follow from nothing but the passage, so what is counted is whether the passage was kept.

    The last word of the cue comes after the cut: no word is predicted while the whole prompt can still be seen.
    """

    cue: int = 8
    """Words that the model is reminded of."""
    answer: int = 16
    """Words that it must find."""

    name = "recall"
    metrics = {
        "accuracy": Metric("words of the hidden passage that were repeated after the prompt was cut", "share"),
        "tokens": Metric("words that this is of", better=None),
    }

    @property
    def least_tokens(self) -> int:  # type: ignore[override]
        return 3 * (self.cue + self.answer)

    def run(self, context: Context) -> Mapping[str, float]:
        rows = self.rows(context)
        first = rows.shape[1] - self.answer - 1
        right = 0
        for some in rows.split(context.batch):
            for index, logits in context.decode(some, first):
                if index > first:
                    right += int((logits.argmax(-1) == some[:, index]).sum())
        scored = len(rows) * self.answer
        return {"accuracy": right / scored, "tokens": scored}

    def rows(self, context: Context) -> Tensor:
        """Prompts and answers, ``[samples, tokens]``, as long as the samples."""
        words = common_words(context.tokenizer)
        draw = random.Random(context.seed)
        count, length = context.samples.shape
        passage_length = self.cue + self.answer
        room = length - 2 * passage_length
        rows = []
        for index, sample in enumerate(context.samples.tolist()):
            passage = draw.sample(words, passage_length)
            depth = 1 + round((room - 1) * (index + 0.5) / count)  # the first token of a text stays the first
            rows.append(sample[:depth] + passage + sample[depth:room] + passage)
        return torch.tensor(rows, device=context.samples.device)


def common_words(tokenizer: Any) -> list[int]:
    """Tokens that are whole words, of the first and so most frequent ones in the vocabulary.

    Where there are too few (bytes, characters), any tokens will do.
    """
    special = set(tokenizer.all_special_ids)
    ids = [index for index in sorted(tokenizer.get_vocab().values()) if index not in special]
    words = [index for index, text in zip(ids, tokenizer.convert_ids_to_tokens(ids), strict=True) if _is_word(text)]
    return words[:_COMMON] if len(words) >= _COMMON else ids


def _is_word(text: Any) -> bool:
    return isinstance(text, str) and _WORD.fullmatch(text) is not None
