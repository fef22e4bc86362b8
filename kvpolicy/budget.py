"""How many tokens may remain: a number of them or a share, and how it is divided over layers and heads."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from dataclasses import dataclass
from fractions import Fraction
from numbers import Integral, Real
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, ValidationError, model_validator

from kvpolicy.allocator import MeasuredLayerAllocator, OverHeads, OverLayers, largest_remainder
from kvpolicy.errors import BudgetError

if TYPE_CHECKING:
    from kvpolicy.policy import EvictionPolicy

Count = Annotated[int, Field(ge=1, strict=True)]


def _share(value: Any) -> Any:
    number = _number(value) if isinstance(value, str) else value
    if not isinstance(number, Real) or isinstance(number, Integral) or not 0 < float(number) <= 1:
        raise ValueError("needs a share above 0.0 and up to 1.0 (0.25 or 25%)")
    return float(number)


_Percent = Annotated[str, Field(pattern=r"^\s*[0-9.]+([eE][+-]?[0-9]+)?\s*%?\s*$")]
_Written = Annotated[float, Field(gt=0, le=1)] | _Percent


class Budget(BaseModel):
    """A number of tokens, or a share of what is there: exactly one of the two.

    >>> Budget.parse(64).tokens, Budget.parse("25%").share
    (64, 0.25)

    ``1`` is one token and ``1.0`` is the whole prompt; the two are different budgets, which is why they are
    different fields: as one number they would compare equal.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False, use_attribute_docstrings=True)

    tokens: Count | None = None
    """Tokens that each layer, row and KV head may keep."""
    share: Annotated[float, BeforeValidator(_share, json_schema_input_type=_Written)] | None = None
    """The same as a share, rounded half up and at least one token."""
    of: Literal["prompt", "seen"] = "prompt"
    """What a share refers to: the prompt (fixed once it is read), or all that was seen (grows with it)."""
    min: Count | None = None
    """A share never comes to less than this."""
    max: Count | None = None
    """A share never comes to more than this."""
    layers: OverLayers | None = None
    """How the budget is divided over the layers; by default each has the same."""
    heads: OverHeads | None = None
    """How the budget of a layer is divided over its KV heads; by default each has the same."""

    @model_validator(mode="after")
    def _possible(self) -> Budget:
        if (self.tokens is None) == (self.share is None):
            raise ValueError("a budget is either tokens (tokens: 64) or a share (share: 0.25), one of the two")
        if self.min is not None and self.max is not None and self.min > self.max:
            raise ValueError(f"min ({self.min}) is above max ({self.max})")
        if self.share is None and (self.min, self.max, self.of) != (None, None, "prompt"):
            raise ValueError("min, max and of go with a share; a number of tokens is fixed")
        if self.grows and self.heads is not None:
            raise ValueError(
                "heads are divided when a prompt is cut, so their budget is a share of the prompt: of: prompt"
            )
        if self.measured is not None and self.grows:
            raise ValueError(
                f"layers: {self.measured.kind} is measured once, while a prompt is read, so that its budget is a "
                "number of tokens or a share of the prompt: of: prompt"
            )
        if self.measured is not None and self.heads is not None:
            raise ValueError(
                f"layers: {self.measured.kind} cuts layers more than once, and heads: {self.heads.kind} divides what "
                "is there at each cut; give one of the two"
            )
        return self

    def __hash__(self) -> int:
        return hash(self.model_dump_json())

    @classmethod
    def parse(cls, value: Any) -> Budget:
        """What a user means by 64, 0.25, ``"64"``, ``"25%"`` or a mapping; a budget is returned as it is.

        Raises:
            BudgetError: it is none of these, or one that cannot be.
        """
        if isinstance(value, Budget):
            return value
        try:
            return cls.model_validate(cls.mapping(value))
        except ValidationError as error:
            if not isinstance(value, Mapping):
                raise _impossible(value) from None  # as the user wrote it
            raise BudgetError("; ".join(_line(details) for details in error.errors())) from error

    @staticmethod
    def mapping(value: Any) -> Mapping[str, Any]:
        """The mapping that `value` is short for: ``{"tokens": 64}`` for 64."""
        if isinstance(value, Mapping):
            return value
        number = _number(value) if isinstance(value, str) else value
        if isinstance(number, bool) or not isinstance(number, Real):
            raise _impossible(value)
        return {"tokens": int(number)} if isinstance(number, Integral) else {"share": float(number)}

    @property
    def amount(self) -> int | float:
        """The number itself: an ``int`` is tokens, a ``float`` a share."""
        return self.tokens if self.tokens is not None else float(self.share or 0)

    @property
    def grows(self) -> bool:
        """Whether it rises with the tokens seen."""
        return self.of == "seen"

    @property
    def measured(self) -> MeasuredLayerAllocator | None:
        """What divides it over the layers, if that goes by what is measured while a prompt is read."""
        return self.layers if isinstance(self.layers, MeasuredLayerAllocator) else None

    def resolve(self, prompt_tokens: Any) -> Any:
        """The average budget of a layer in tokens, for a number of tokens or for a tensor of such numbers."""
        whole = isinstance(prompt_tokens, Integral)
        if self.share is None:
            return self.tokens if whole else prompt_tokens.new_full(prompt_tokens.shape, self.tokens)
        low, high = self.min or 1, self.max
        if not whole:
            return portion(self.share, prompt_tokens).clamp(low, high)
        tokens = max(low, portion(self.share, int(prompt_tokens)))
        return tokens if high is None else min(tokens, high)

    def __str__(self) -> str:
        return str(self.amount)


@dataclass(frozen=True)
class LayerBudget:
    """The budget of one layer among those that have one."""

    budget: Budget
    layer: int
    layers: tuple[int, ...]
    """Indices of the layers that have a budget."""
    of: int
    """How many layers the model has."""
    prompt: int | None = None
    """The length of the prompt, where it is known before; then the first call does not tell it."""

    @property
    def constant(self) -> bool:
        """Whether it is the same for every row."""
        fixed = self.prompt is not None and not self.budget.grows
        return fixed or (self.budget.share is None and self.budget.layers is None)

    @property
    def known(self) -> bool:
        """Whether it is known before the prompt is."""
        return self.budget.share is None or (self.prompt is not None and not self.budget.grows)

    def resolve(self, seen: int | None) -> int:
        """Tokens of this layer after so many seen (``None``: not known, where tokens are given)."""
        prompt = seen if self.prompt is None or self.budget.grows else self.prompt
        average = self.budget.resolve(prompt or 1)
        return over_layers(self.budget, average, self.layers, self.of, prompt)[self.layers.index(self.layer)]


def layer_budgets(
    policy: EvictionPolicy, budget: Budget | None, layers: int, prefix: int = 0, prompt: int | None = None
) -> list[tuple[EvictionPolicy, LayerBudget | None]]:
    """Policy and budget of each layer, checked as far as that is possible before the prompt is known.

    A layer whose policy has no use for one (``full``) has no budget, unless no layer has: then the budget is a limit.
    One whose policy has a budget of its own has that.

    Raises:
        BudgetError: a layer's budget cannot hold what its policy must protect, or nothing goes by `budget`.
    """
    policies = [policy.for_layer(layer, layers) for layer in range(layers)]
    by_attention = budget is not None and {"heads": budget.heads, "layers": budget.measured}
    divided_by_attention = next((name for name, by in (by_attention or {}).items() if by is not None), None)
    if divided_by_attention and any(own.storage is not None for own in policies):
        raise BudgetError(
            f"budget.{divided_by_attention}: {policy.kind} has layers stored in a way of their own, in which KV heads "
            "have the same number of slots and layers are cut once; leave it out, or store them in full"
        )
    having = tuple(layer for layer, own in enumerate(policies) if own.budgeted)
    if budget is not None and not having:
        if any(own.own_budget is not None for own in policies):
            raise BudgetError(f"{policy.kind} says by itself how many tokens it keeps: leave the budget out")
        having = tuple(range(layers))
    divided = [_own(layer, own, layers) for layer, own in enumerate(policies)]
    if budget is not None:
        for layer in having:
            divided[layer] = LayerBudget(budget, layer, having, layers, prompt)
    for own, its in zip(policies, divided, strict=True):
        if its is not None and (own.own_budget is not None or own.budgeted) and its.known:
            _check(own, its, prefix)
    return list(zip(policies, divided, strict=True))


def _own(layer: int, policy: EvictionPolicy, layers: int) -> LayerBudget | None:
    """The budget that the policy of a layer brings with it."""
    if policy.own_budget is None:
        return None
    return LayerBudget(Budget(tokens=policy.own_budget), layer, (layer,), layers)


def _check(policy: EvictionPolicy, its: LayerBudget, prefix: int) -> None:
    try:
        policy.check(its.resolve(None), prefix)
    except BudgetError as error:
        where = f"layer {its.layer}: " if its.budget.layers is not None else ""
        raise BudgetError(f"{where}{error}") from None


_divided: dict[Any, list[int]] = {}


def over_layers(budget: Budget, average: int, layers: tuple[int, ...], of: int, prompt: int | None) -> list[int]:
    """Tokens for each of `layers`, which add up to ``average * len(layers)``.

    Raises:
        BudgetError: a layer would be left with nothing.
    """
    if budget.layers is None:
        return [average] * len(layers)
    key = (budget.layers, average, layers, of, prompt)
    if key not in _divided:
        if len(_divided) > 1000:
            _divided.clear()
        _divided[key] = _at_least_one(largest_remainder(budget.layers.quotas(average, layers, of, prompt)))
    return _divided[key]


def _at_least_one(tokens: list[int]) -> list[int]:
    """No layer with nothing: what it takes comes from the layer that has most, the last of these first."""
    tokens = list(tokens)
    while (least := min(tokens)) < 1:
        most = max(range(len(tokens)), key=lambda i: (tokens[i], i))
        tokens[tokens.index(least)] += 1
        tokens[most] -= 1
    return tokens


def portion(share: float, whole: Any) -> Any:
    """The share of a number of tokens, or of each in a tensor of them, rounded half up."""
    over, under = ratio(share)
    whole = whole if isinstance(whole, int) else whole.long()
    return (2 * whole * over + under) // (2 * under)


_ratios: dict[float, tuple[int, int]] = {}  # a plain dictionary, because torch.compile warns of functools.cache


def ratio(share: float) -> tuple[int, int]:
    """The fraction a user means: the decimal as written (0.29, not the binary number just below it), or 1/3.

    Halves are then halves, whole numbers suffice, and every device rounds alike.
    """
    if share not in _ratios:
        _ratios[share] = Fraction(str(share)).limit_denominator(10**6).as_integer_ratio()
    return _ratios[share]


def _number(text: str) -> int | float | None:
    text = text.strip()
    if text.endswith("%"):
        text = f"{text[:-1].strip()}e-2"
    for kind in (int, float):
        with suppress(ValueError):
            return kind(text)
    return None


def _line(details: Any) -> str:
    path = ".".join(str(part) for part in details["loc"])
    text = details["msg"].removeprefix("Value error, ")
    return f"budget{'.' if path else ''}{path}: {text[0].lower()}{text[1:]}"


def _impossible(value: Any) -> BudgetError:
    return BudgetError(
        f"{value!r} is no budget; give a number of tokens, 1 or more (64), "
        "or a share of the prompt, above 0.0 and up to 1.0 (0.25 or 25%)"
    )
