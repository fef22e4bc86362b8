"""KIVI: what a policy keeps is stored in a few bits."""

from typing import Annotated, Literal

from pydantic import Field, model_validator

from kvpolicy.compose import Wrapper
from kvpolicy.errors import BudgetError
from kvpolicy.policy import Policy, Tokens
from kvpolicy.quantised import Quantised
from kvpolicy_plugins.full import Full


class KIVI(Wrapper):
    """Tuning-free asymmetric quantisation (Liu et al., ICML 2024, arXiv 2402.02750) of what `of` keeps.

    Keys are quantised per channel and values per token; the newest tokens stay in full precision. `of` decides what
    goes, as if it were alone, and sees keys and values as attention does: those that come back from storage.
    """

    kind: Literal["kivi"] = "kivi"
    bits: Literal[2, 4, 8, 16] = 2
    """Bits of a number. With 16 nothing is quantised."""
    group: Annotated[int, Field(ge=1, strict=True)] = 32
    """Tokens of one channel of a key, and channels of one value, that share a scale."""
    residual: Tokens = 32
    """How many newest tokens stay in full precision, at least."""
    counts: Literal["tokens", "bytes"] = "tokens"
    """What a budget counts: tokens, or the bytes of the keys and values of so many in full precision. All that is held
    fits into these, and more tokens are kept."""
    of: Policy = Full()
    """The policy that decides what goes; by default nothing does, as in the paper."""

    @property
    def storage(self) -> Quantised | None:
        if self.bits == 16:
            return None
        return Quantised(self.bits, self.group, self.residual, by_bytes=self.counts == "bytes")

    @model_validator(mode="after")
    def _stored_once(self) -> "KIVI":
        if self.storage is not None and self.of.storage is not None:
            raise ValueError(f"{self.of.kind} says itself how a layer is stored: leave one of the two out")
        return self

    def check(self, budget: int, prefix: int = 0) -> None:
        if (storage := self.storage) is not None and storage.by_bytes:
            if budget <= storage.residual + storage.group:
                raise storage.too_little(budget)
        elif storage is not None and "residual" in self.model_fields_set and budget <= self.residual:
            raise BudgetError(
                f"kivi: of a budget of {budget} tokens a residual of {self.residual} leaves nothing to quantise; "
                "raise the budget or lower residual"
            )
        super().check(budget, prefix)
