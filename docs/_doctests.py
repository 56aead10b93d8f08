"""Shows the examples in docstrings as code: Markdown would take `>>>` for a quotation."""

from __future__ import annotations

import re
from typing import Any

import griffe

_EXAMPLE = re.compile(r"^>>> .*(?:\n(?!\s*$).*)*", re.MULTILINE)


class Doctests(griffe.Extension):
    """Puts fences around examples; griffe calls it for each object that it loads."""

    def on_instance(self, *, obj: griffe.Object, **_: Any) -> None:
        """Change the docstring of an object."""
        if obj.docstring is not None and ">>> " in obj.docstring.value:
            text = obj.docstring.value
            obj.docstring.value = _EXAMPLE.sub(lambda example: f"```pycon\n{example[0]}\n```", text)
