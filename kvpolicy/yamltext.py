"""Writing YAML that is good to read: options below each other, and a list of numbers in one line."""

from __future__ import annotations

from collections.abc import Mapping
from io import StringIO
from typing import Any

from ruamel.yaml import YAML
from ruamel.yaml.representer import SafeRepresenter

WIDTH = 2**20
"""Columns before a line is folded: as good as never."""


class _Representer(SafeRepresenter):
    def represent_list(self, data: list[Any]) -> Any:
        numbers = all(isinstance(item, (int, float)) for item in data)  # in one line, ruamel.yaml misquotes some texts
        return self.represent_sequence("tag:yaml.org,2002:seq", data, flow_style=numbers)


_Representer.add_representer(list, _Representer.represent_list)


def yaml_text(mapping: Mapping[str, Any]) -> str:
    """The text of a YAML file that says what `mapping`, of plain values, lists and mappings, says."""
    yaml: Any = YAML(typ="safe", pure=True)
    yaml.Representer = _Representer
    yaml.default_flow_style = False
    yaml.sort_base_mapping_type_on_output = False
    yaml.width = WIDTH
    text = StringIO()
    yaml.dump(mapping, text)
    return text.getvalue()


def comment(text: str) -> str:
    """The lines of `text` as lines that YAML passes over."""
    return "".join(f"# {line}".rstrip() + "\n" for line in text.splitlines())
