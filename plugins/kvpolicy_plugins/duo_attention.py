"""DuoAttention: heads that look back far keep everything, the others sinks and a sliding window."""

from collections.abc import Iterable, Mapping
from typing import Annotated, Any, ClassVar, Literal

import torch
from pydantic import BeforeValidator, Field, PlainSerializer, model_validator
from torch import Tensor

from kvpolicy.budget import ratio
from kvpolicy.cache import EvictionCache
from kvpolicy.compose import Heads
from kvpolicy.config import beside
from kvpolicy.document import Document, Loc, Unreadable, read_file
from kvpolicy.errors import ConfigError
from kvpolicy.policy import EvictionPolicy, Tokens, View
from kvpolicy.rehearsal import compress
from kvpolicy_plugins.full import Full
from kvpolicy_plugins.kvzip import KVzip
from kvpolicy_plugins.streaming_llm import StreamingLLM

HEADS = "heads"
Join = Literal["max", "mean"]
Gate = Annotated[float, Field(ge=0, le=1, strict=True)]
Gates = Annotated[tuple[Annotated[tuple[Gate, ...], Field(min_length=1)], ...], Field(min_length=1)]
"""A number from 0 to 1 for each KV head, by layer."""

DIGITS = 6
"""Decimals of a gate that is measured."""


def gates_from(value: Any) -> Any:
    """Gates as lists by layer, from a mapping of layers or from a file (YAML or JSON) that has one.

    The numbers are checked where a field is of :data:`Gates`, or here where they come from a file.

    Raises:
        ValueError: layers are missing, or the file is wrong: then with its line and column.
    """
    if isinstance(value, str):
        return _from_file(beside(value))
    return _in_order(value) if isinstance(value, Mapping) else value


def _in_order(layers: Mapping[Any, Any]) -> list[Any]:
    named = {str(layer).strip(): gates for layer, gates in layers.items()}
    if wrong := [layer for layer in named if not layer.isdecimal()]:
        raise ValueError(f"needs numbers of layers (0, 1, ...) and their gates, not {wrong[0]!r}")
    numbers = {int(layer): gates for layer, gates in named.items()}
    missing = sorted(set(range(max(numbers, default=0) + 1)) - set(numbers))
    if missing:
        raise ValueError(f"layer {missing[0]} is missing; each layer needs its list of gates")
    return [numbers[layer] for layer in sorted(numbers)]


def _from_file(file: str) -> Any:
    try:
        document = read_file(file)
    except Unreadable as error:
        raise ValueError(str(error.problem)) from None
    loc: Loc = (HEADS,) if HEADS in document.value else ()
    layers = document.value[HEADS] if loc else document.value
    if not isinstance(layers, (Mapping, list)):
        raise _wrong(document, loc, "needs gates by layer, such as 0: [0.9, 0.2]")
    try:
        found = _in_order(layers) if isinstance(layers, Mapping) else layers
    except ValueError as error:
        raise _wrong(document, loc, str(error)) from None
    for layer, gates in enumerate(found):
        if not isinstance(gates, list) or not gates:
            raise _wrong(document, (*loc, layer), "needs a list of gates, one for each KV head")
        for head, gate in enumerate(gates):
            if isinstance(gate, bool) or not isinstance(gate, (int, float)) or not 0 <= gate <= 1:
                raise _wrong(document, (*loc, layer, head), f"needs a number from 0 to 1, not {gate!r}")
    return found


def _wrong(document: Document, loc: Loc, message: str) -> ValueError:
    return ValueError(str(document.problem(loc, message)))


def measured_gates(model: Any, tokenizer: Any, contexts: Iterable[Tensor], join: Join) -> list[list[float]]:
    """How much each KV head looks back when the model repeats what it has read, by layer.

    Args:
        contexts: token ids, ``[tokens]`` each; their gates are averaged.
        join: how the scores that :class:`KVzip` gives to a head's tokens make its gate. Sinks are left out: every head
            looks at them.
    """
    policy = KVzip(budgets="uniform")
    found = []
    for context in contexts:
        cache = EvictionCache(model, policy, 1.0)
        compress(model, tokenizer, cache, context[None])
        scores = [cache.scores(layer)["score"][0, :, policy.sinks :] for layer in range(len(cache.layers))]
        found.append([(score.amax(-1) if join == "max" else score.mean(-1)).tolist() for score in scores])
    means = [torch.tensor(layer, dtype=torch.float64).mean(0) for layer in zip(*found, strict=True)]
    return [[round(gate, DIGITS) for gate in layer.tolist()] for layer in means]


class _Profiled(Heads):
    """The heads of one layer, as many as there are gates."""

    layer: int = Field(exclude=True)
    gates: int = Field(exclude=True)

    def owners(self, heads: int) -> list[str]:
        if heads != self.gates:
            raise ConfigError(
                f"duo_attention: heads has {self.gates} gates for layer {self.layer}, and there the model has {heads} "
                "KV heads"
            )
        return super().owners(heads)


class DuoAttention(EvictionPolicy):
    """Retrieval heads and streaming heads (Xiao et al., ICLR 2025, arXiv 2410.10819), told apart by a profile.

    The profile gives a gate to each KV head of each layer, 0 to 1. A head whose gate is above `threshold` keeps
    everything; any other keeps `sinks` first tokens and `recent` last ones. Which heads are which is settled before
    anything runs, and no budget is needed. The paper trains its gates; ``kvpolicy profile`` takes them from what heads
    look at when the model repeats a text.
    """

    kind: Literal["duo_attention"] = "duo_attention"
    heads: Annotated[
        Gates,
        BeforeValidator(gates_from, json_schema_input_type=Gates | dict[str, list[float]] | str),
        PlainSerializer(lambda gates: dict(enumerate(gates)), when_used="json"),
    ]
    """The gates: by layer (``0: [0.9, 0.2]``), as a list of lists, or a file that has them."""
    threshold: Annotated[float, Field(ge=0, le=1, strict=True)] = 0.5
    """A head whose gate is above keeps everything."""
    sparsity: Annotated[float, Field(ge=0, le=1, strict=True)] | None = None
    """In place of the threshold: the share of all heads that stream, those with the lowest gates."""
    sinks: Tokens = 64
    """First tokens that a streaming head keeps."""
    recent: Annotated[int, Field(ge=1, strict=True)] = 256
    """Last tokens that a streaming head keeps."""
    about: dict[str, Any] | None = None
    """Where the gates come from; for people."""

    bounded: ClassVar[bool] = False
    divided: ClassVar[bool] = True

    @model_validator(mode="after")
    def _one_of_the_two(self) -> "DuoAttention":
        if self.sparsity is not None and "threshold" in self.model_fields_set:
            raise ValueError("threshold and sparsity say the same in two ways: give one of the two")
        return self

    @classmethod
    def profiled(cls, model: Any, tokenizer: Any, contexts: Iterable[Tensor], *, join: Join = "max") -> "DuoAttention":
        """Gates by how much heads look back when the model repeats what it has read.

        Args:
            join: how the scores of a head's tokens make its gate.
        """
        return cls(heads=measured_gates(model, tokenizer, contexts, join))

    @property
    def own_budget(self) -> int:  # type: ignore[override]
        return self.sinks + self.recent

    def retrieval(self) -> list[list[bool]]:
        """Which heads keep everything, by layer."""
        if self.sparsity is None:
            return [[gate > self.threshold for gate in gates] for gates in self.heads]
        places = [(gate, layer, head) for layer, gates in enumerate(self.heads) for head, gate in enumerate(gates)]
        over, under = ratio(self.sparsity)
        count = (2 * len(places) * over + under) // (2 * under)
        # Of equal gates the earlier head keeps everything.
        streaming = {place[1:] for place in sorted(places, key=lambda place: (place[0], -place[1], -place[2]))[:count]}
        return [
            [(layer, head) not in streaming for head in range(len(gates))] for layer, gates in enumerate(self.heads)
        ]

    def for_layer(self, layer: int, layers: int) -> EvictionPolicy:
        if len(self.heads) != layers:
            raise ConfigError(f"duo_attention: heads has gates for {len(self.heads)} layers, the model has {layers}")
        streaming = [head for head, keeps in enumerate(self.retrieval()[layer]) if not keeps]
        window = StreamingLLM(sinks=self.sinks)
        return _Profiled(
            at={",".join(map(str, streaming)): window} if streaming else {":": Full()},
            default=Full(),
            tokens=self.own_budget,
            layer=layer,
            gates=len(self.heads[layer]),
        )

    def room(self, decoding: bool) -> float:
        return 0

    def priority(self, view: View) -> Tensor:
        raise TypeError("a cache asks each layer's policy, for_layer(), not the profile")
