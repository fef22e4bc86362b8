"""JSON Schema of configuration files, made from the classes of everything installed, for editors and checkers.

A file may leave out what it extends has, so there is a second form of every mapping, in which nothing is required.
Items of lists are complete in both forms: a list takes the place of its base's.
"""

from __future__ import annotations

import inspect
import json
from collections.abc import Mapping
from typing import Any
from urllib.parse import quote, unquote

from pydantic import ValidationError
from pydantic.json_schema import GenerateJsonSchema, JsonSchemaValue

from kvpolicy.allocator import HeadAllocator, LayerAllocator
from kvpolicy.budget import Budget
from kvpolicy.document import AMOUNTS, BUDGET, EXTENDS
from kvpolicy.plugins import Registry, registry
from kvpolicy.wording import Model

Schema = dict[str, Any]

DIALECT = "https://json-schema.org/draft/2020-12/schema"
PARTIAL = "partial."
_DEFS = "#/$defs/"
_ANY = ("anyOf", "oneOf")


def schema(installed: Registry | None = None) -> Schema:
    """The schema of files, by default of what is installed in this environment."""
    installed = installed or registry()
    defs = _definitions(installed)
    files = [_file(defs, kind) for kind in sorted(installed.policies)]
    partial = _Partial(defs)
    extending = [partial.of(file) for file in files]
    return {
        "$schema": DIALECT,
        "title": "kvpolicy",
        "description": "A policy by its kind, with its options and a budget; and files that it extends.",
        "type": "object",
        "properties": {"kind": _ref("policy", "properties", "kind"), EXTENDS: _EXTENDS},
        "if": {"required": [EXTENDS]},
        "then": {"anyOf": extending},
        "else": {"anyOf": files},
        "$defs": dict(sorted((defs | partial.defs).items())),
    }


def schema_text(installed: Registry | None = None) -> str:
    """:func:`schema` as the text of a JSON file."""
    return json.dumps(schema(installed), indent=2, ensure_ascii=False) + "\n"


_EXTENDS: Schema = {
    "description": "Files to start from, relative to this one; of several the later wins, and this file over all.",
    "anyOf": [{"type": "string", "minLength": 1}, {"type": "array", "items": {"type": "string", "minLength": 1}}],
}


def _definitions(installed: Registry) -> Schema:
    policies, allocators = installed.policies, installed.allocators
    over_layers = {kind: cls for kind, cls in allocators.items() if issubclass(cls, LayerAllocator)}
    over_heads = {kind: cls for kind, cls in allocators.items() if issubclass(cls, HeadAllocator)}
    defs: Schema = {
        "policy": _any_of("policy", policies, "A policy: a kind with its defaults, or a mapping with options."),
        "layer_allocator": _any_of("allocator", over_layers, "How a budget is divided over layers."),
        "head_allocator": _any_of("allocator", over_heads, "How the budget of a layer is divided over its KV heads."),
        BUDGET: _budget(),
    }
    _add_model(defs, f"{BUDGET}.mapping", Budget)
    defs[f"{BUDGET}.mapping"]["oneOf"] = [_not_null(amount) for amount in AMOUNTS]
    for sort, classes in (("policy", policies), ("allocator", allocators)):
        for kind, cls in classes.items():
            _add_model(defs, f"{sort}.{kind}", cls)
    return defs


def _any_of(sort: str, classes: Mapping[str, Model], description: str) -> Schema:
    """Each class, as a mapping or, where nothing has to be said, as its kind alone."""
    known = sorted(classes.items())
    kinds = [_kind(kind, cls) for kind, cls in known]
    alone = [_kind(kind, cls) for kind, cls in known if _is_complete(cls, kind)]
    return {
        "description": description,
        "properties": {"kind": {"anyOf": kinds}},  # for editors, which else complete only what nothing is missing from
        "anyOf": [*alone, *(_ref(f"{sort}.{kind}") for kind, _ in known)],
    }


def _kind(kind: str, cls: Model) -> Schema:
    return {"const": kind, "description": (inspect.getdoc(cls) or "").partition("\n")[0]}


def _is_complete(cls: Model, kind: str) -> bool:
    try:
        cls.model_validate({"kind": kind})
    except ValidationError:
        return False
    return True


def _budget() -> Schema:
    return {
        "description": "How many tokens each layer, row and KV head may keep: a number (64), or a share (0.25, 25%).",
        "anyOf": [
            {"type": "integer", "minimum": 1},
            {"type": "number", "exclusiveMinimum": 0, "maximum": 1},
            {"type": "string", "pattern": r"^\s*\+?[0-9.]+([eE][+-]?[0-9]+)?\s*%?\s*$"},
            _ref(f"{BUDGET}.mapping"),
            {"type": "null"},
        ],
    }


def _not_null(name: str) -> Schema:
    return {"required": [name], "properties": {name: {"not": {"type": "null"}}}}


def _file(defs: Schema, kind: str) -> Schema:
    """A file with a policy of that kind: its options, a budget, and what it extends."""
    name = f"policy.{kind}"
    options = {option: _ref(name, "properties", option) for option in defs[name]["properties"] if option != "kind"}
    return {
        **defs[name],
        "properties": {"kind": defs[name]["properties"]["kind"], **options, BUDGET: _ref(BUDGET), EXTENDS: True},
    }


def _add_model(defs: Schema, name: str, cls: Model) -> None:
    """Define `name` as the mapping that `cls` is made from; the models in it become definitions of their own."""
    template = f"{_DEFS}{quote(_escaped(name))}.{{model}}"
    made = cls.model_json_schema(ref_template=template, schema_generator=_Generator)
    nested = made.pop("$defs", {})
    defs.update({f"{name}.{model}": _tidy(found) for model, found in nested.items()})
    defs[name] = _tidy(made)
    if "kind" in cls.model_fields:
        kind = cls.model_fields["kind"].default
        defs[name] = {"title": kind, **defs[name], "required": ["kind", *defs[name].get("required", ())]}
        defs[name]["properties"] = {**defs[name]["properties"], "kind": _kind(kind, cls)}


class _Generator(GenerateJsonSchema):
    """pydantic's own, which refuses references to what it did not define unless they lead out of the schema."""

    def generate_inner(self, schema: Any) -> JsonSchemaValue:
        made = super().generate_inner(schema)
        if made.get("$ref") in _OURS:
            made = {**made, "$ref": _OUTSIDE + made["$ref"]}
        return made


_OURS = [_DEFS + name for name in ("policy", "layer_allocator", "head_allocator")]
_OUTSIDE = "https://kvpolicy"


class _Partial:
    """Schemas of mappings of which a base may have the rest. `defs` are the definitions that they need."""

    def __init__(self, whole: Schema) -> None:
        self.whole = whole
        self.defs: Schema = {}

    def of(self, schema: Any) -> Any:
        """`schema` with nothing required, and the same for the mappings in it."""
        if not isinstance(schema, dict):
            return schema
        changed = {key: value for key, value in schema.items() if key not in ("required", "minProperties", *_ANY)}
        if "$ref" in schema:
            changed["$ref"] = self._ref(schema["$ref"])
        for key in _ANY:
            if kept := [self.of(part) for part in schema.get(key, ()) if set(part) - {"required", "properties"}]:
                changed[key] = kept
        if "properties" in schema:
            changed["properties"] = {name: self.of(option) for name, option in schema["properties"].items()}
        if "additionalProperties" in schema:
            changed["additionalProperties"] = self.of(schema["additionalProperties"])
        return changed

    def _ref(self, ref: str) -> str:
        """The partial form of what `ref` leads to."""
        path = ref.removeprefix(_DEFS)
        name = unquote(path.partition("/")[0]).replace("~1", "/").replace("~0", "~")
        if PARTIAL + name not in self.defs:
            self.defs[PARTIAL + name] = {}  # it may lead to itself
            self.defs[PARTIAL + name] = self._definition(name)
        return _DEFS + PARTIAL + path

    def _definition(self, name: str) -> Schema:
        whole, changed = self.whole[name], self.of(self.whole[name])
        for option, schema in whole.get("properties", {}).items():
            if changed["properties"][option] == schema:
                changed["properties"][option] = _ref(name, "properties", option)
        return changed


def _ref(*path: str) -> Schema:
    return {"$ref": _DEFS + quote("/".join(map(_escaped, path)))}


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _tidy(schema: Any) -> Any:
    """Without the titles that pydantic makes of names, with short descriptions, and with our references as meant."""
    if isinstance(schema, list):
        return [_tidy(part) for part in schema]
    if not isinstance(schema, dict):
        return schema
    tidy = {key: _tidy(value) for key, value in schema.items()}
    if isinstance(schema.get("title"), str):
        del tidy["title"]
    if isinstance(text := schema.get("description"), str):
        tidy["description"] = " ".join(text.partition("\n\n")[0].split())
    if isinstance(ref := schema.get("$ref"), str):
        tidy["$ref"] = ref.removeprefix(_OUTSIDE)
    return tidy
