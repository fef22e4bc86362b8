"""An explanation for people: what the budget comes to, who keeps what, what it costs."""

from __future__ import annotations

import math
from collections.abc import Iterator
from itertools import chain
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text
from rich.tree import Tree

from kvpolicy.budget import portion
from kvpolicy.explain import Explanation, LayerNumbers, Part
from kvpolicy.policy import Need, SlotField
from kvpolicy.report.kept import ranges, runs_text
from kvpolicy.report.rows import size

Group = tuple[list[int], LayerNumbers]

NEEDS = {
    "attention_sum": "column sums of attention",
    "attention_rows": "every row of attention",
    "logits": "every row before the softmax",
}


def explanation_report(found: Explanation, title: str) -> Iterator[Any]:
    """All of it, part by part: `title` says what is explained."""
    yield Text(f"\n{title}, a prompt of {found.prompt:,} tokens", style="bold")
    yield _facts(
        ("model", _model(found)),
        ("budget", _budget(found)),
        ("layers", _layers(found)),
        ("heads", _heads(found)),
        ("prefix", f"the first {found.prefix:,} tokens always stay" if found.prefix else ""),
        ("attention", "\n".join(map(need_text, found.needs)) or "nothing: a prompt is attended fused"),
        ("after the prompt", _pass(found)),
        ("while decoding", _overshoot(found)),
    )
    for groups in _by_structure(found):
        yield _tree(groups)
        yield _table(groups, found.prompt)
    yield _facts(*_bytes(found))


def _pass(found: Explanation) -> str:
    named = ", ".join(found.rehearsing)
    return f"a pass for {named}, by kvpolicy.compress: two to three times the time of the prompt" if named else ""


def need_text(need: Need) -> str:
    """What attention must hand out, and what that costs."""
    if need == Need.QUERIES:
        return "the queries: a prompt is attended in blocks, unless nothing else is needed"
    if need == Need.ROTATION:
        return "how the model rotates queries and keys, which costs nothing"
    if need == Need.OUTPUT:
        return "the weights of the output projection: nothing that attention has to do"
    if need.rows is None:
        return f"{NEEDS.get(need.name, need.name)}: a prompt is attended in blocks, not fused"
    rows = "row" if need.rows == 1 else f"{need.rows:,} rows"
    return f"the last {rows} of attention: a prompt is attended fused, and these rows once more"


def _facts(*facts: tuple[str, str]) -> Table:
    grid = Table.grid(padding=(0, 2))
    for label, text in facts:
        if text:
            grid.add_row(Text(label, style="dim"), Text(text))
    return grid


def _model(found: Explanation) -> str:
    shape = found.shape
    return f"{shape.layers} layers with {shape.kv_heads} KV heads of {shape.head_dim}, {shape.dtype}"


def _budget(found: Explanation) -> str:
    budget, tokens = found.budget, found.average
    if budget is None or tokens is None:
        own = any(layer.tokens for layer in found.layers)
        return "none: the policy says what is kept" if own else "none: everything is kept"
    mean = " on average" if budget.layers or budget.heads or found.policy.together else ""
    what = f"for each KV head of each layer{mean}"
    if budget.share is None:
        return f"{tokens:,} tokens {what}"
    of = "tokens seen" if budget.grows else "prompt tokens"
    share = portion(budget.share, found.prompt)
    bound = "" if share == tokens else f", {'raised' if tokens > share else 'lowered'} to {tokens:,},"
    growth = f"\nthen one more for each {1 / budget.share:.3g} tokens" if budget.grows else ""
    return f"{budget.share:g} of {found.prompt:,} {of} = {share:,}{bound} {what}{growth}"


def _layers(found: Explanation) -> str:
    tokens = [layer.tokens for layer in found.layers if layer.tokens is not None]
    others = len(found.layers) - len(tokens)
    kept = f"; {others} more evict nothing" if others and tokens else ""
    if not tokens or found.budget is None:
        return ""
    if found.policy.together:
        return f"one threshold for all of them{kept}"
    if found.budget.layers is None:
        return f"all have the same{kept}"
    if found.budget.measured is not None:
        how = "all the same, as the prompt fits" if found.prompt <= tokens[0] else "measured while the prompt is read"
        total = f"in all {sum(tokens):,} = {len(tokens)} × {found.average:,}"
        return f"{_allocator(found.budget.layers)}: {how}, {total}{kept}"
    return (
        f"{_allocator(found.budget.layers)}: {max(tokens):,} to {min(tokens):,} tokens, in all {sum(tokens):,} = "
        f"{len(tokens)} × {found.average:,}{kept}"
    )


def _heads(found: Explanation) -> str:
    if not any(layer.tokens for layer in found.layers):
        return ""
    if found.policy.together:
        return "the best tokens of all layers and heads stay; given are means"
    if found.policy.divided:
        return "some evict nothing; given are means"
    if found.budget is None:
        return ""
    if found.budget.heads is None:
        return "all have the same"
    return f"{_allocator(found.budget.heads)}: what {found.shape.kv_heads} heads have is divided anew at each cut"


def _allocator(allocator: Any) -> str:
    options = ", ".join(f"{name} {value}" for name, value in allocator.model_dump(exclude={"kind"}).items())
    return f"{allocator.kind} ({options})" if options else allocator.kind


def _overshoot(found: Explanation) -> str:
    if not found.policy.bounded and not any(layer.tokens for layer in found.layers):
        return "\n".join(["nothing goes", *_attended(found)])
    if found.overshoot == math.inf:
        return "what is written stays: the cache grows with it"
    if found.overshoot:
        return f"up to {found.overshoot + 1:,.0f} tokens beyond the budget come before the next cut"
    return "one token goes for each that comes"


def _attended(found: Explanation) -> Iterator[str]:
    """What a step attends to, where policies select it: by how much, and in which layers."""
    amounts = {layer.attends for layer in found.layers if layer.attends is not None}
    for tokens in sorted(amounts, reverse=True):
        layers = [index for index, layer in enumerate(found.layers) if layer.attends == tokens]
        yield f"in layers {ranges(layers)} a step attends to some {tokens:,} tokens"


def _by_structure(found: Explanation) -> list[list[Group]]:
    """Groups of layers, those with the same policy together."""
    structures: dict[str, list[Group]] = {}
    for layers, numbers in found.groups():
        parts = [(path, part.kind, part.options) for path, part in numbers.tree.walk()]
        structures.setdefault(repr(parts), []).append((layers, numbers))
    return list(structures.values())


def _tree(groups: list[Group]) -> Tree:
    layers = sorted(chain.from_iterable(layers for layers, _ in groups))
    tree = Tree(Text.assemble("\n", (f"layers {ranges(layers)}  ", "dim"), _label(groups[0][1].tree)))
    _grow(tree, groups[0][1].tree)
    return tree


def _grow(tree: Tree, part: Part) -> None:
    for child in part.parts:
        _grow(tree.add(Text.assemble((f"{child.name}  ", "dim"), _label(child))), child)


def _label(part: Part) -> str:
    return " ".join([part.kind, *(f"{name}={value}" for name, value in part.options.items())])


def _table(groups: list[Group], prompt: int) -> Table:
    """A line for each group of layers; a column for each part of the policy."""
    _, first = groups[0]
    parts = [(path, part.kind) for path, part in first.tree.walk() if path]
    divided = any(numbers.least is not None for _, numbers in groups)
    columns = [
        "layers",
        "tokens",
        *(["each at\nleast"] if divided else []),
        *(f"{path}\n{kind}" for path, kind in parts),
    ]
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False)
    for column in columns:
        table.add_column(column, justify="right", overflow="fold")
    table.add_column("stay for certain", overflow="fold")
    table.add_column("slots", justify="right")
    table.add_column("bytes", justify="right")
    for layers, numbers in groups:
        kept = [_tokens(part.tokens) for path, part in numbers.tree.walk() if path]
        least = [_tokens(numbers.least)] if divided else []
        certain = "all" if numbers.certain == ((0, prompt - 1),) else runs_text(numbers.certain)
        row = [_tokens(numbers.tokens), *least, *kept, certain, f"{numbers.slots:,}", size(numbers.bytes.total)]
        table.add_row(ranges(layers), *row)
    return table


def _tokens(tokens: int | None) -> str:
    return "all" if tokens is None else f"{tokens:,}"


def _field(found: Explanation, name: str, field: SlotField) -> str:
    each = f" for {field.every} together" if field.every > 1 else ""
    return f"{name} {found.shape.bytes_of_field(field)}{each}"


def _bytes(found: Explanation) -> Iterator[tuple[str, str]]:
    taken, full = found.bytes, found.full_bytes
    share = f"{100 * taken.keys_and_values / full:.1f} %"
    yield (
        "keys and values",
        f"{size(taken.keys_and_values)}, {share} of the {size(full)} of all {found.prompt:,} tokens",
    )
    fields = ", ".join(_field(found, name, field) for name, field in found.fields.items())
    yield "slot fields", f"{size(taken.slot_fields)} (bytes of a slot: {fields})" if fields else "none"
    if found.head_fields:
        fields = ", ".join(f"{name} {found.shape.bytes_of_field(of)}" for name, of in found.head_fields.items())
        yield "head fields", f"{size(taken.head_fields)} (bytes of a head: {fields})"
    yield "positions", f"{size(taken.bookkeeping)}"
    pages = (
        ", and up to 15 slots a head more, since heads have pages of 16" if found.budget and found.budget.heads else ""
    )
    yield "together", f"{size(taken.total)} after the prompt, for a batch of one{pages}"
