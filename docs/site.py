"""For `make docs`: what the site needs done to pages and docstrings."""

import re
from typing import Any

from griffe import Extension


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Replace links to files outside this folder by their names. mkdocs calls this."""
    return re.sub(r"\[([^\]]*)\]\((?:\.\./)+[^)]*\)", r"\1", markdown)


def on_page_content(html: str, page: Any, **_: Any) -> str:
    """Name the table of options for site.css. mkdocs calls this."""
    if page.file.src_uri != "reference.md":
        return html
    return html.replace("<table>", '<table id="options">', 1)


class Examples(Extension):
    """Google's style knows "Examples:" only; here "Example:" is the same."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called by griffe for each module, class and function."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M
            )
