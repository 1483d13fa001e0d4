"""Shards: a checkpoint whose tensors lie in pieces, one per rank, in a folder beside a small file that names them.

The small file is written last, whole, by one rename: that is the commit. It holds everything plain, and of each piece its
size and checksum, of each tensor where its parts lie. A folder that a file names is never written again.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import zlib
from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from .disk import BINARY, NOT_A_LINK, fs, make_folder
from .errors import CheckpointError, DamagedError, MissingCheckpoint, cause_of
from .names import PIECES
from .opening import names_in, opened
from .ordinary import SHARDS
from .reading import load_header
from .schema import MOST, check, count, text
from .storage import Stream

ELSEWHERE = "in the pieces beside this file"
BLOCK = 2**20

_INDEX = {
    "folder": text, "pieces": {text: (count, count)},
    "tensors": [{"at": [lambda key: count if isinstance(key, int) else text], "dtype": text, "size": [count],
                 "chunks": [(text, count, count, [count], [count])]}],
}  # fmt: skip


def index_of(checkpoint: Mapping[str, Any], path: str | Path) -> dict[str, Any] | None:
    """What a file says of its pieces, checked before anything of it is used; None: it holds its tensors itself."""
    if (index := checkpoint.get(SHARDS)) is None:
        return None
    try:
        check(_INDEX, index, "its list of pieces")
        names = [index["folder"].removesuffix(PIECES), *index["pieces"]]
        if index["folder"] == names[0] or not all(re.fullmatch(r"[\w=-]+(\.distcp)?", name) for name in names):
            raise CheckpointError("its list of pieces has a name that none of ours has")
        for tensor in index["tensors"]:
            _check_tensor(tensor, index["pieces"])
            if not _stands_at(checkpoint, tensor["at"]):
                raise CheckpointError("its list of pieces has a tensor that it has not")
    except (CheckpointError, LookupError, TypeError) as error:
        raise CheckpointError(f"'{path}' cannot be used: {cause_of(error)}; it was altered: use another file") from None
    return index


def _check_tensor(tensor: dict[str, Any], pieces: dict[str, Any]) -> None:
    """Refuse parts that lie outside of their tensor or their piece, or are not all of it."""
    size, dtype, held = tensor["size"], getattr(torch, tensor["dtype"], None), 0
    for piece, offset, length, offsets, sizes in tensor["chunks"]:
        numel, fits = math.prod(sizes), len(offsets) == len(sizes) == len(size)
        inside = fits and all(a + b <= c for a, b, c in zip(offsets, sizes, size, strict=True))
        is_dtype = isinstance(dtype, torch.dtype) and numel * dtype.itemsize == length
        if not (inside and is_dtype and piece in pieces and offset + length <= pieces[piece][0]):
            raise CheckpointError("a part of a tensor is not where it should be")
        held += numel
    if held != math.prod(size) or held > MOST:
        raise CheckpointError("the parts of a tensor are not the whole")


def put(nest: Any, way: list[Any], value: Any) -> None:
    """Put a value where this way through dicts and lists ends."""
    for key in way[:-1]:
        nest = nest[key]
    nest[way[-1]] = value


def _stands_at(nest: Any, way: list[Any]) -> bool:
    for key in way:
        nest = nest[key]
    return isinstance(nest, str) and nest.startswith(ELSEWHERE)


def with_shapes(checkpoint: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The checkpoint with empty tensors on the meta device where its pieces have them: to compare, not to go on from."""
    if (index := index_of(checkpoint, path)) is not None:
        check_pieces(index, Path(path).parent / index["folder"], read=False)
        for tensor in index["tensors"]:
            put(checkpoint, tensor["at"], empty(tensor, "meta"))
    return checkpoint


def whole(checkpoint: dict[str, Any], path: str | Path) -> dict[str, Any]:
    """The checkpoint as one, every tensor read from its pieces, on the CPU."""
    if (index := index_of(checkpoint, path)) is None:
        return checkpoint
    folder = Path(path).parent / index["folder"]
    check_pieces(index, folder)
    for tensor in index["tensors"]:
        put(checkpoint, tensor["at"], value := empty(tensor))
        for piece, offset, _, offsets, sizes in tensor["chunks"]:
            into = value
            for dim, (begin, size) in enumerate(zip(offsets, sizes, strict=True)):
                into = into.narrow(dim, begin, size)
            into.copy_(read_part(folder / piece, offset, sizes, value.dtype))
    del checkpoint[SHARDS]
    return checkpoint


def empty(tensor: dict[str, Any], device: str = "cpu") -> Tensor:
    """A tensor of this entry's kind, whatever is in it."""
    return torch.empty(tensor["size"], dtype=dtype_of(tensor), device=device)


def unmapped(checkpoint: dict[str, Any]) -> dict[str, Any]:
    """What was read with its tensors left on the disk: but for weights and optimizers, of which each rank takes its part."""
    parts = ("state_dict", "model", "model_state_dict", "optimizer_states")
    return {key: item if key in parts or isinstance(item, Tensor) else owned(item) for key, item in checkpoint.items()}


def owned(item: Any) -> Any:
    """The same nest with tensors of its own, which nobody changes.

    Example:
        >>> one = {"a": [torch.ones(1)]}
        >>> other = owned(one)
        >>> one["a"][0].zero_(), other["a"][0]
        (tensor([0.]), tensor([1.]))
    """
    if isinstance(item, Tensor):
        return item.detach().clone()
    if type(item) is dict:
        return {key: owned(value) for key, value in item.items()}
    if type(item) in (list, tuple):
        return type(item)(owned(value) for value in item)
    if item is None or isinstance(item, str | bytes | int | float):
        return item
    try:
        return deepcopy(item)
    except Exception:  # the write says what cannot be in a file
        return item


def dtype_of(tensor: Mapping[str, Any]) -> torch.dtype:
    """The dtype that this entry names."""
    return getattr(torch, tensor["dtype"])


def read_part(path: Path, offset: int, sizes: list[int], dtype: torch.dtype) -> Tensor:
    """One part of a tensor, from its piece."""
    part = torch.empty(sizes, dtype=dtype)
    with opened(path) as file:
        file.seek(offset)
        for block in blocks_of(part):
            if file.readinto(block) != len(block):  # type: ignore[attr-defined]
                raise DamagedError(f"'{path}' ends within a tensor: use another checkpoint")
    return part


def blocks_of(tensor: Tensor) -> Iterator[memoryview]:
    """The bytes of a tensor in memory; it has to be dense to be written to."""
    array: Any = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy()
    data = memoryview(array)
    return (data[begin : begin + BLOCK] for begin in range(0, len(data), BLOCK))


def write_piece(path: Path, parts: Iterable[Tensor]) -> tuple[list[int], int]:
    """A new file with the bytes of these, one behind the other, on the disk: where each ends, and the checksum of all."""
    at, crc, ends = 0, 0, []
    fd = fs.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | NOT_A_LINK | BINARY, 0o666)
    try:
        stream = Stream(fd)
        for part in parts:
            for block in blocks_of(part):
                crc, at = zlib.crc32(block, crc), at + len(block)
                stream.write(block)
            ends.append(at)
        stream.flush()
        if stream.error is not None:
            raise stream.error
        fs.fsync(fd)
    finally:
        fs.close(fd)
    return ends, crc


def shares(tensor: Tensor, ranks: int) -> tuple[int, list[Tensor]]:
    """A tensor in one part for each rank, views, along its first dimension that is long enough for all.

    Example:
        >>> dim, parts = shares(torch.ones(1, 5), 2)
        >>> dim, [tuple(part.shape) for part in parts]
        (1, [(1, 3), (1, 2)])
    """
    sizes = list(tensor.shape)
    dim = next((dim for dim, size in enumerate(sizes) if size >= ranks), sizes.index(max(sizes)))
    parts = list(tensor.detach().chunk(ranks, dim))
    return dim, parts + [tensor.detach().narrow(dim, sizes[dim], 0)] * (ranks - len(parts))


def check_pieces(index: dict[str, Any], folder: Path, only: Any = None, read: bool = True) -> None:
    """Refuse pieces that are missing, cut off or altered; ``read``: from end to end, for their checksums.

    Raises:
        DamagedError: names the piece.
    """
    for name, (size, checksum) in index["pieces"].items():
        if only is not None and name not in only:
            continue
        path, crc = folder / name, 0
        try:
            with opened(path) as file:
                found = os.fstat(file.fileno()).st_size
                while found == size and read and (block := file.read(BLOCK)):
                    crc = zlib.crc32(block, crc)
        except MissingCheckpoint:
            raise DamagedError(f"'{path}' is missing, a piece of a checkpoint: use another checkpoint.") from None
        if found != size or (read and crc != checksum):
            what = f"{found:,} bytes, not {size:,}" if found != size else "another checksum than when it was written"
            raise DamagedError(f"'{path}' is damaged: it has {what}; use another checkpoint.")


def check_file(path: str | Path, read: bool = True) -> None:
    """The pieces that a checkpoint file names, if it names any."""
    header: dict[str, Any] = {}
    with contextlib.suppress(CheckpointError):  # whoever reads it says so
        header = load_header(path)
    if (index := index_of(header, path)) is not None:
        check_pieces(index, Path(path).parent / index["folder"], read=read)


# ---- folders of pieces


def make_fresh(beside: Path, step: int) -> Path:
    """Make a new folder for the pieces of a file in this folder, and remove what killed runs have left there."""
    make_folder(beside)
    clear_unnamed(beside)
    number = 0
    while True:
        folder = beside / f"step={step}{f'-{number}' if number else ''}{PIECES}"
        try:
            make_folder(folder, is_new=True)
        except FileExistsError:
            number += 1
        else:
            return folder


def clear_unnamed(folder: str | Path, known: Mapping[str, str] | None = None) -> None:
    """Remove the folders of pieces that no checkpoint file in this folder names; none while one cannot be asked.

    ``known``: what files name that were just written, by the files' names.
    """
    with contextlib.suppress(CheckpointError, OSError):
        names = names_in(folder)
        found = {name for name in names if name.endswith(PIECES)}
        for name in names if found else ():
            if name.endswith(".ckpt"):
                found.discard((known or {}).get(name) or _folder_of(Path(folder, name)))
            elif ".ckpt." in name:  # set aside: what it names stays as long as it can be read
                with contextlib.suppress(CheckpointError):
                    found.discard(_folder_of(Path(folder, name)))
        for name in found:
            remove(Path(folder, name))


_NAMED: dict[tuple[Any, ...], str | None] = {}  # by the file and its change: each is read once


def _folder_of(path: Path) -> str | None:
    """The folder of pieces that a file names."""
    status = path.stat()
    key = str(path), status.st_ino, status.st_size, status.st_mtime_ns
    if key not in _NAMED:
        if len(_NAMED) > 1000:
            _NAMED.clear()
        _NAMED[key] = (load_header(path).get(SHARDS) or {}).get("folder")
    return _NAMED[key]


def remove(folder: Path) -> None:
    """Remove a folder of pieces; what cannot be removed is left for the next time."""
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            fs.unlink(folder / name)
        fs.rmdir(folder)
