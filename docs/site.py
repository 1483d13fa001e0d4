"""For `make docs`: what the site needs done to pages and docstrings."""

import re
from typing import Any

from griffe import Extension


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Links that leave this folder, to files of the repository, become their names; called by mkdocs."""
    return re.sub(r"\[([^\]]*)\]\((?:\.\./)+[^)]*\)", r"\1", markdown)


class Examples(Extension):
    """Google's style knows "Examples:" only; here "Example:" is the same."""

    def on_object(self, *, obj: Any, **_: Any) -> None:
        """Called by griffe for each module, class and function."""
        if obj.docstring is not None:
            obj.docstring.value = re.sub(
                r"^( *)Example:$", r"\1Examples:", obj.docstring.value, flags=re.M
            )
