"""DuoAttention: heads that look back far keep everything, the others sinks and a sliding window."""

from collections.abc import Iterable
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, PlainSerializer, model_validator
from torch import Tensor

from kvpolicy.budget import ratio
from kvpolicy.compose import Heads
from kvpolicy.errors import ConfigError
from kvpolicy.policy import EvictionPolicy, Tokens, View
from kvpolicy_plugins._gates import Gates, Join, gates_from, measured_gates
from kvpolicy_plugins.full import Full
from kvpolicy_plugins.streaming_llm import StreamingLLM


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
