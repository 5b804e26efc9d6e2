"""Show aligned lists of qrt's docstrings as lists: Markdown would run their lines together.

name      what it is,
          over several lines
other     what that is

The docstring of a class that is `documented` (qrt/setting.py) is made when it is imported.
"""

import re
from importlib import import_module

from griffe import Attribute, Class, Docstring, ExprCall, Extension, Object

ENTRY = re.compile(r"^(\S+(?: \S+){0,4}) {2,}(\S.*)$")


class AlignedLists(Extension):
    """Rewrites the docstring of every class and function that is shown."""

    def on_instance(self, *, obj: Object, **_: object) -> None:
        """Replace the text before it is rendered."""
        if obj.docstring is not None:
            text = obj.docstring.value
            if isinstance(obj, Class) and any(str(each.value) == "documented" for each in obj.decorators):
                text = getattr(import_module(obj.module.path), obj.name).__doc__
            text = "\n\n".join(map(listed, text.split("\n\n")))
            obj.docstring = Docstring(text, lineno=obj.docstring.lineno, parent=obj)

    def on_attribute_instance(self, *, attr: Attribute, **_: object) -> None:
        """Show the default of a setting as its value."""
        if isinstance(attr.value, ExprCall) and str(attr.value.function) == "setting":
            attr.value = attr.value.arguments[0]


def listed(paragraph: str) -> str:
    """Return an aligned list as a Markdown one, and any other paragraph as it is."""
    lines = paragraph.splitlines()
    if not lines or not (first := ENTRY.match(lines[0])):
        return paragraph
    column, items = first.start(2), []
    for line in lines:
        name, text = line[:column].strip(), line[column:]
        if line[column - 1 : column] != " ":
            return paragraph
        items += [f"- `{name}`: {text}"] if name else [f"  {text}"]
    return "\n".join(items)
