"""Write the table of options in reference.md from the docstrings of FabricLoop's options."""

import dataclasses
import html
from pathlib import Path

from fabric_template.config import LoopArguments, document_fields

PAGE = Path(__file__).with_name("reference.md")
HEAD = "| option | default | effect |\n|---|---|---|\n"


def options_table() -> str:
    """Return a Markdown table with a row for each option of FabricLoop."""
    texts = {name: html.escape(text, quote=False) for name, text in document_fields().items()}
    return HEAD + "".join(
        f"| `{field.name}` | `{field.default!r}` | {texts[field.name]} |\n"
        for field in dataclasses.fields(LoopArguments)
    )


def insert_table(page: str) -> str:
    """Return the text of reference.md with an updated table of options."""
    before, _, rest = page.partition(HEAD)
    _, _, after = rest.partition("\n\n")
    return f"{before}{options_table()}\n{after}"


if __name__ == "__main__":
    PAGE.write_text(insert_table(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
