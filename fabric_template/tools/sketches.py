"""Sketches: what is kept of a tensor, and of the random numbers' states, so that two runs can be compared later."""

from __future__ import annotations

import hashlib
import math
import random
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

MOST_ROWS = 256  # of a batch: by their samples batches are told from reshuffled ones
_SAMPLES = 6


@dataclass(frozen=True)
class Sketch:
    """A tensor's bits as a digest, and enough of its values to tell rounding from something else.

    Example:
        >>> one, other = sketch(torch.ones(3)), sketch(torch.ones(3) * (1 + 1e-6))
        >>> one == other, one.is_near(other), one.is_near(sketch(torch.zeros(3)))
        (False, True, False)
    """

    digest: str
    shape: tuple[int, ...]
    norm: float
    samples: tuple[float, ...]
    tolerance: float

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Sketch) and (self.digest, self.shape) == (other.digest, other.shape)

    def __hash__(self) -> int:
        return hash(self.digest)

    def is_near(self, other: Sketch, most: float = 0.0) -> bool:
        """Whether they differ by rounding alone; or by no more than so much."""
        most = most or max(self.tolerance, other.tolerance)
        size = max(self.norm, other.norm)
        usual = size / math.sqrt(max(1, math.prod(self.shape)))
        pairs = [
            (self.norm, other.norm, size),
            *((a, b, usual) for a, b in zip(self.samples, other.samples, strict=False)),
        ]
        return self.shape == other.shape and all(abs(a - b) <= most * max(abs(a), scale) for a, b, scale in pairs)

    def ratio(self, other: Sketch) -> float | None:
        """By what this one is multiplied to get the other; None: it is something else."""
        if self.shape != other.shape or not self.norm or not math.isfinite(other.norm / self.norm):
            return None
        by = other.norm / self.norm
        scaled = Sketch("", self.shape, self.norm * by, tuple(value * by for value in self.samples), self.tolerance)
        return by if scaled.is_near(other) else None


@torch.no_grad()
def sketch(tensor: Tensor, bits: bool = True) -> Sketch:
    """What is kept of a tensor, a sparse one as if it were dense; without its bits its norm and samples stand for it."""
    dense = tensor.detach()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    flat = dense.reshape(-1)
    values = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    values = values.float() if values.dtype != torch.float64 else values
    norm = float(torch.linalg.vector_norm(values)) if values.numel() else 0.0
    places = sorted({i * (values.numel() - 1) // (_SAMPLES - 1) for i in range(_SAMPLES)}) if values.numel() else []
    samples = tuple(values[places].tolist())
    rough = tensor.dtype in (torch.bfloat16, torch.float16)
    own = digest(flat) if bits else repr((norm, samples))
    return Sketch(own, tuple(tensor.shape), norm, samples, 3e-2 if rough else 1e-4)


@torch.no_grad()
def digest(tensor: Tensor) -> str:
    """A tensor's bits, whatever its shape is.

    Example:
        >>> digest(torch.ones(2, 3)) == digest(torch.ones(6)) != digest(torch.zeros(6))
        True
    """
    dense = tensor.detach()
    if dense.layout != torch.strided:
        dense = dense.to_dense()
    flat = dense.resolve_conj().resolve_neg().cpu().contiguous().reshape(-1)
    return _of(flat.view(torch.uint8).numpy().data if flat.numel() else b"")


def rows(tensor: Tensor) -> tuple[str, ...]:
    """The samples of a batch, each as a digest."""
    if tensor.dim() == 0 or tensor.layout != torch.strided:
        return ()
    return tuple(digest(row) for row in tensor[:MOST_ROWS])


def tensors_in(value: Any, depth: int = 0) -> Iterator[Tensor]:
    """Every tensor in what a module was given: in lists, dicts, and objects that hold some, such as a graph's batch."""
    if isinstance(value, Tensor):
        yield value
    elif depth < 4:
        if isinstance(value, Mapping):
            parts = list(value.values())
        elif isinstance(value, list | tuple):
            parts = list(value)
        else:
            parts = [one for one in getattr(value, "__dict__", {}).values() if isinstance(one, Tensor)]
        for part in parts:
            yield from tensors_in(part, depth + 1)


def random_states() -> dict[str, str]:
    """A digest of the state of each library's random numbers; of CUDA's where it is in use.

    Example:
        >>> before = random_states()
        >>> _ = torch.rand(1)
        >>> sorted(name for name, state in random_states().items() if state != before[name])
        ['torch']
    """
    states = {"python": _of(repr(random.getstate()).encode()), "torch": digest(torch.get_rng_state())}
    if "numpy" in sys.modules:
        _, keys, *place = sys.modules["numpy"].random.get_state()
        states["numpy"] = _of(keys.tobytes() + repr(place).encode())
    if torch.cuda.is_available() and torch.cuda.is_initialized():
        states["cuda"] = digest(torch.cuda.get_rng_state())
    return states


def _of(content: Any) -> str:
    return hashlib.blake2b(content, digest_size=8).hexdigest()
