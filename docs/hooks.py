"""Docstrings name things by Sphinx roles; pages show the name alone."""

import re
from typing import Any

_ROLE = re.compile(r":(?:class|func|meth|data|attr):<code>~?(?:[\w.]+\.)?(\w+)</code>")


def on_page_content(html: str, **_: Any) -> str:
    return _ROLE.sub(r"<code>\1</code>", html)
