"""Listing: what a command says, for programs."""

from __future__ import annotations

import json
import math
from typing import Any


def to_json(value: Any) -> str:
    """As every reader of JSON takes it: what is no number is null."""

    def plain(value: Any) -> Any:
        if isinstance(value, dict):
            return {str(key): plain(part) for key, part in value.items()}
        if isinstance(value, list | tuple):
            return [plain(part) for part in value]
        return None if isinstance(value, float) and not math.isfinite(value) else value

    return json.dumps(plain(value), indent=1, allow_nan=False)
