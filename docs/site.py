"""Adapt pages and docstrings to the site that `make docs` builds."""

import re
from typing import Any

from griffe import Extension


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace each link to a file outside docs/ with its text. mkdocs calls this function."""
    return re.sub(r"\[([^\]]*)\]\((?:\.\./)+[^)]*\)", r"\1", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Give the table of options the id that site.css uses. mkdocs calls this function."""
    if page.file.src_uri != "reference.md":
        return html
    return html.replace("<table>", '<table id="options">', 1)


class Examples(Extension):
    """Rename the section "Example:" to "Examples:", the only name that Google's style supports."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Rename the section. griffe calls this method for each module, class and function."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M
            )
