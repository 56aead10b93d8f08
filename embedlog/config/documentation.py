"""What settings mean, as their configs say in the strings below them."""

from __future__ import annotations

from functools import cache


@cache
def field_docstrings(cls: type) -> dict[str, str]:
    """Return the strings below the fields of a class and its bases, by the name of the field.

    They are read from the source: Python does not keep them.
    """
    import ast
    import inspect
    import textwrap

    docstrings: dict[str, str] = {}
    for each in reversed(cls.__mro__[:-1]):
        (defined,) = ast.parse(textwrap.dedent(inspect.getsource(each))).body
        assert isinstance(defined, ast.ClassDef)
        for field, following in zip(defined.body, defined.body[1:], strict=False):
            if isinstance(field, ast.AnnAssign) and isinstance(following, ast.Expr):
                assert isinstance(field.target, ast.Name)
                docstrings[field.target.id] = inspect.cleandoc(ast.literal_eval(following.value))
    return docstrings


def meanings(cls: type) -> dict[str, str]:
    """Return what the settings of a config mean, in a line each, by their dotted names."""
    return {
        name.replace("_", "."): " ".join(text.replace("`", "").split())
        for name, text in field_docstrings(cls).items()
    }
