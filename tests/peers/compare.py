"""Compare what kvpress kept with what kvpolicy keeps: ``python -m tests.peers.compare FOLDER``.

Reads what `prepare.py` and `kvpress_kept.py` wrote, runs the policy of each pair on the same prompts, and writes
``results/kvpress-VERSION.json``. Exit status 1 means that a pair is not what `pairs.json` declares it to be: equal, or
different for the reason given there.
"""

from __future__ import annotations

import json
import platform
import re
import sys
from importlib.metadata import version
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, DynamicCache
from transformers.utils import logging

from kvpolicy import EvictionCache
from tests.tiny import cache_argument

HERE = Path(__file__).parent
CLOSE = 1e-5
"""Keys of both environments differ by rounding at most."""

Heads = list[list[int]]
"""Positions kept by each KV head of a layer."""


def main(folder: Path) -> int:
    if not (folder / "kept.json").exists():
        sys.exit(f"{folder / 'kept.json'} is missing: `make peers` writes it")
    theirs = json.loads((folder / "kept.json").read_text())
    prompts = json.loads((folder / "prompts.json").read_text())
    logging.disable_progress_bar()
    model = AutoModelForCausalLM.from_pretrained(folder / "model", dtype=torch.float32).eval()
    apart = keys_apart(model, prompts, torch.load(folder / "keys.pt"))
    pairs = [
        compared(
            pair,
            theirs["kept"][pair["name"]],
            [kept(model, prompt, pair) for prompt in prompts[pair.get("prompts", "distinct")]],
        )
        for pair in json.loads((HERE / "pairs.json").read_text())
    ]
    results = {
        "command": "make peers",
        "versions": {
            "python": platform.python_version(),
            "kvpress": theirs["versions"],
            "kvpolicy": {name: version(name) for name in ("kvpolicy", "transformers", "torch")},
        },
        "model": {"layers": model.config.num_hidden_layers, "kv_heads": model.config.num_key_value_heads},
        "prompts": {name: [len(prompt) for prompt in of] for name, of in prompts.items()},
        "largest_difference_of_keys": apart,
        "pairs": pairs,
    }
    file = HERE / "results" / f"kvpress-{theirs['versions']['kvpress']}.json"
    file.write_text(readable(results))
    wrong = [pair for pair in pairs if pair["equal"] != pair["declared_equal"]]
    for pair in pairs:
        print(line(pair))
    if apart > CLOSE:
        print(f"keys of the full caches differ by {apart:.1e}: the two environments do not compute the same model")
    print(f"{len(pairs) - len(wrong)} of {len(pairs)} pairs are as tests/peers/pairs.json declares them; see {file}")
    return int(bool(wrong) or apart > CLOSE)


def keys_apart(model: Any, prompts: dict[str, Any], keys: dict[str, Any]) -> float:
    """The largest difference between their keys and ours, with nothing evicted."""
    apart = 0.0
    for name, of in prompts.items():
        for prompt, theirs in zip(of, keys[name], strict=True):
            ours = [layer.keys[0] for layer in filled(DynamicCache(), model, prompt).layers]
            apart = max(apart, *(float((a - b).abs().max()) for a, b in zip(ours, theirs, strict=True)))
    return apart


def kept(model: Any, prompt: list[int], pair: dict[str, Any]) -> list[Heads]:
    """Positions that kvpolicy keeps after the prompt, for each layer."""
    cache = filled(EvictionCache(model, pair["policy"], pair["budget"]), model, prompt)
    return [cache.positions(layer)[0].tolist() for layer in range(len(cache.layers))]


@torch.no_grad()
def filled(cache: Any, model: Any, prompt: list[int]) -> Any:
    model(torch.tensor([prompt]), **cache_argument(cache))
    return cache


def compared(pair: dict[str, Any], theirs: list[list[Heads]], ours: list[list[Heads]]) -> dict[str, Any]:
    """The pair, and how alike the sets are: numbers are ``[prompts][layers][kv_heads]``."""
    return {
        "name": pair["name"],
        "press": pair["press"],
        "options": pair["options"],
        "policy": pair["policy"],
        "budget": pair["budget"],
        "prompts": pair.get("prompts", "distinct"),
        "declared_equal": pair["equal"],
        "equal": theirs == ours,
        "because": pair.get("because", ""),
        "jaccard": each(lambda one, other: round(jaccard(set(one), set(other)), 4), theirs, ours),
        "only_kvpress": each(lambda one, other: len(set(one) - set(other)), theirs, ours),
        "only_kvpolicy": each(lambda one, other: len(set(other) - set(one)), theirs, ours),
    }


def each(measure: Any, theirs: list[list[Heads]], ours: list[list[Heads]]) -> list[list[list[Any]]]:
    return [
        [[measure(*heads) for heads in zip(*layers, strict=True)] for layers in zip(*prompts, strict=True)]
        for prompts in zip(theirs, ours, strict=True)
    ]


def jaccard(one: set[int], other: set[int]) -> float:
    return len(one & other) / len(one | other)


def readable(results: dict[str, Any]) -> str:
    """As JSON, lists of numbers on one line."""
    text = json.dumps(results, indent=1)
    return re.sub(r"\[[\d.,\s\[\]]+\]", lambda found: re.sub(r"\s+", " ", found[0]), text) + "\n"


def line(pair: dict[str, Any]) -> str:
    least = min(head for prompt in pair["jaccard"] for layer in prompt for head in layer)
    found = "equal" if pair["equal"] else f"different, least Jaccard {least:.2f}"
    declared = "" if pair["equal"] == pair["declared_equal"] else "  <- NOT as declared"
    return f"{pair['name']:50} {found}{declared}"


if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
