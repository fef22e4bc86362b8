"""Write what both environments read, a tiny Llama and fixed prompts: ``python -m tests.peers.prepare FOLDER``."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import torch
from transformers.utils import logging

from tests import tiny

VOCAB = 1024
TOKENS = 256


def main(folder: Path) -> None:
    logging.disable_progress_bar()
    folder.mkdir(parents=True, exist_ok=True)
    config = tiny.llama(layers=4)
    config.vocab_size = VOCAB
    tiny.build(config, torch.float32).save_pretrained(folder / "model")
    (folder / "prompts.json").write_text(json.dumps({"distinct": [distinct(0), distinct(1)], "repeated": [repeated()]}))


def distinct(seed: int) -> list[int]:
    """No token twice: equal tokens have keys of equal length in the first layer, and tied scores are another matter."""
    drawn = torch.randperm(VOCAB - 2, generator=torch.Generator().manual_seed(seed))[:TOKENS] + 2
    return [int(token) for token in drawn]


def repeated(different: int = 32) -> list[int]:
    return [2 + index % different for index in range(TOKENS)]


if __name__ == "__main__":
    main(Path(sys.argv[1]))
