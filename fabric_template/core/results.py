"""Results: what a validation or test has measured, as a table."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any


def print_results(results: list[dict[str, Any]], stage: str) -> None:
    """Print what was logged as a table: a row for each metric, a column for each loader.

    Example:
        >>> print_results([{"val_acc": 0.5}], "validate")
        ────────────────────────────────────────────────────
             Validate metric            DataLoader 0
        ────────────────────────────────────────────────────
                 val_acc                     0.5
        ────────────────────────────────────────────────────
    """
    results = [{name.split("/dataloader_idx_")[0]: value for name, value in result.items()} for result in results]
    names = sorted({name for result in results for name in result})
    if not names:
        return
    heads = [f"DataLoader {index}" for index in range(len(results))]
    width = max(25, *(len(text) for text in [*names, *heads]))
    rule = "─" * (width + 1) * (len(heads) + 1)

    def line(cells: Iterable[Any]) -> str:
        return " ".join(f"{cell!s:^{width}}" for cell in cells).rstrip()

    rows = [line([name, *(result.get(name, "") for result in results)]) for name in names]
    print("\n".join([rule, line([f"{stage} metric".capitalize(), *heads]), rule, *rows, rule]))
