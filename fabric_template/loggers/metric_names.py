"""Find by a metric's name whether small or large values are good."""

from __future__ import annotations

import re
from typing import Any

# Columns of metrics.csv that are not metrics.
NOT_METRICS = ("epoch", "step", "samples_per_second", "time", "name", "version")
LOW_IS_GOOD = re.compile(
    r"(?i)loss|error|perplexity|(^|[\W_])(nll|r?mse|mae|ppl|wer|cer|fid)([\W_]|$)"
)
HIGH_IS_GOOD = re.compile(r"(?i)acc|score|precision|recall|auroc|(^|[\W_])(f1|auc|iou)(\W|_|$)")


def find_direction(metric: str, options: dict[str, Any]) -> str | None:
    """Return "min" if a metric's smallest value is the best, "max" if its largest is, or None."""
    if metric == options.get("monitor"):
        return "max" if options.get("mode") == "max" else "min"
    if LOW_IS_GOOD.search(metric):
        return "min"
    return "max" if HIGH_IS_GOOD.search(metric) else None
