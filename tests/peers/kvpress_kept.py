"""Which positions kvpress keeps: ``python tests/peers/kvpress_kept.py FOLDER``.

Runs in an environment with kvpress, transformers and torch, and imports nothing else. It reads the model and prompts of
`prepare.py` and writes ``kept.json``, for each pair ``[prompts][layers][kv_heads][kept]``, and ``keys.pt``, the keys
of the full caches.
"""

from __future__ import annotations

import json
import sys
from contextlib import nullcontext
from importlib.metadata import version
from pathlib import Path
from typing import Any

try:
    import kvpress
    import torch
    from transformers import AutoModelForCausalLM, DynamicCache
    from transformers.utils import logging
except ImportError as error:
    sys.exit(f"{error.name} is missing: this script runs in the environment that `make peers` creates")

PAIRS = Path(__file__).with_name("pairs.json")


def main(folder: Path) -> None:
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    prompts = json.loads((folder / "prompts.json").read_text())
    full = {name: [keys_of(model, prompt) for prompt in of] for name, of in prompts.items()}
    torch.save(full, folder / "keys.pt")
    kept = {}
    for pair in json.loads(PAIRS.read_text()):
        which = pair.get("prompts", "distinct")
        kept[pair["name"]] = [
            [found(some, every) for some, every in zip(keys_of(model, prompt, press(pair)), keys, strict=True)]
            for prompt, keys in zip(prompts[which], full[which], strict=True)
        ]
    versions = {name: version(name) for name in ("kvpress", "transformers", "torch")}
    (folder / "kept.json").write_text(json.dumps({"versions": versions, "kept": kept}))


def press(pair: dict[str, Any]) -> Any:
    return getattr(kvpress, pair["press"])(**pair["options"])


@torch.no_grad()
def keys_of(model: Any, prompt: list[int], press: Any = None) -> list[torch.Tensor]:
    """Keys that the cache holds after the prompt, one tensor ``[kv_heads, kept, head_dim]`` for each layer."""
    cache = DynamicCache()
    with nullcontext() if press is None else press(model):
        model(torch.tensor([prompt]), past_key_values=cache)
    return [layer.keys[0].clone() for layer in cache.layers]


def found(kept: torch.Tensor, keys: torch.Tensor) -> list[list[int]]:
    """Positions of the `kept` keys among all `keys` of a layer, ascending: each equals exactly one, bit by bit."""
    same = (kept.unsqueeze(2) == keys.unsqueeze(1)).all(-1)
    if not (same.sum(-1) == 1).all():
        sys.exit("a kept key is not exactly one of the keys of the full cache, so its position is not known")
    return same.int().argmax(-1).sort(-1).values.tolist()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
