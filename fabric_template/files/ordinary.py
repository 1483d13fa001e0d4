"""Ordinary: whether a checkpoint holds what weights_only reads as it is, as nearly all do; what others need is in plain.py."""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor

NOTES = "fabric_template_kinds"  # where a file says what its plain values stand for
SHARDS = "fabric_template.shards"  # where tensors lie that are not in the file

_READ = frozenset({type(None), bool, float, str})
_NESTS = frozenset({dict, OrderedDict, list, tuple})
_NUMBERS = frozenset({torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8,
                      torch.bool})  # fmt: skip
SMALL = 2**26  # bytes of tensors that a file may claim, however small it is
LONGEST = 512  # bits of a number from which on it is an odd one


def ordinary_bytes(content: Any) -> int | None:
    """The bytes of its tensors, where it is made of dicts, lists, numbers, texts and ordinary tensors alone; else None.

    Example:
        >>> ordinary_bytes({"w": [torch.ones(2), 1]}), ordinary_bytes({"w": torch.ones(2).to_sparse()})
        (8, None)
    """
    size, seen, left = 0, set[int](), [content]
    while left:
        item = left.pop()
        kind = type(item)
        if kind is Tensor or kind is torch.nn.Parameter:
            is_odd = item.dtype not in _NUMBERS or item.layout is not torch.strided or item.is_nested or vars(item)
            is_odd = is_odd or (0 in item.stride() and item.numel() > 1)  # an expanded one claims more than is there
            if is_odd or item.device.type not in ("cpu", "cuda"):
                return None
            size += item.nbytes
        elif kind in _NESTS:
            if id(item) not in seen:
                seen.add(id(item))
                if kind is OrderedDict:
                    left.append(vars(item))  # the _metadata of a state_dict
                for parts in (item,) if kind in (list, tuple) else (item, item.values()):
                    kinds = set(map(type, parts))  # there may be many, all alike
                    if kinds == {int}:
                        left += max(parts), min(parts)
                    elif not kinds <= _READ:
                        left += [part for part in parts if type(part) not in _READ]
        elif kind is int:
            if item.bit_length() >= LONGEST:
                return None
        elif kind not in _READ:
            return None
    return size


def tensors_in(content: Any) -> Iterator[Tensor]:
    """Every tensor in a nest of dicts and lists, once."""
    seen: set[int] = set()
    left = [content]
    while left:
        item = left.pop()
        if isinstance(item, Tensor):
            yield item
        elif isinstance(item, dict | list | tuple | deque) and id(item) not in seen:
            seen.add(id(item))
            left.extend(item.values() if isinstance(item, dict) else item)
