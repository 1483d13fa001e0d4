"""Trust: what a checkpoint file may ask for while it is read, which is to say nothing but tensors and plain values.

A leaf: torch and the standard library.
"""

import argparse
import contextlib
import pickle
import pickletools
import re
import sys
import warnings
import zipfile
from collections import defaultdict
from pathlib import Path
from typing import IO, Any

import torch

# What `save_hyperparameters()` commonly puts into Trainer's files beyond plain values. Building these runs no code of
# the file's choice: a path holds text, a Namespace attributes. All else (numpy, ...) needs `trusted=True`.
_PLAIN_CLASSES = [(argparse.Namespace, "argparse.Namespace")] + [
    (type(Path()), f"pathlib{module}.{flavour}Path") for module in ("", "._local") for flavour in ("Posix", "Windows")
]


def _omegaconf_classes() -> list:
    """What a DictConfig of plain values is made of (Hydra's hyperparameters), where omegaconf is in use already."""
    if "omegaconf" not in sys.modules:
        return []
    from omegaconf import DictConfig, ListConfig, base, nodes

    types = [
        (kind, f"builtins.{kind.__name__}") for kind in (dict, list, int, float, str, bool)
    ]  # that it notes of keys
    return [DictConfig, ListConfig, base.ContainerMetadata, base.Metadata, nodes.AnyNode, Any, defaultdict, *types]


# torch calls these even with weights_only=True, and each allocates as many bytes as the file likes to say.
_ALLOCATORS = re.compile(
    r"(builtins|__builtin__) bytearray|torch(\.\w+)* \w*Tensor|torch\._utils _rebuild_qtensor|torch\.storage TypedStorage"
)
# Two more that do, but whose names stand in honest files, too: of a storage, before the key of its part, where it is not
# called; and of the function that makes bytes of a text by "latin1", and by any other codec something larger.
_STORAGE = re.compile(r"torch(\.storage)? UntypedStorage")
_ENCODE = ("name", "_codecs encode")


def is_pickle(file: IO[bytes]) -> bool:
    """Whether a file is a bare pickle, as torch wrote them before 1.6, and not a zip file."""
    file.seek(0)
    start = file.read(2)
    file.seek(0)
    return len(start) == 2 and start[0] == 0x80 and start[1] <= pickle.HIGHEST_PROTOCOL


def legacy_reason(file: IO[bytes]) -> str:
    """Why an old pickle is not loaded, with the first names that it would import (read, not run)."""
    names: list[str] = []
    file.seek(0)
    with contextlib.suppress(Exception):
        for _ in range(4):  # old torch files are a few pickles in a row: magic number, version, system, the object
            texts: list[str] = []
            for op, arg, _ in pickletools.genops(file):
                if "UNICODE" in op.name:
                    texts.append(arg)
                elif op.name in ("GLOBAL", "INST"):
                    names.append(arg.replace(" ", "."))
                elif op.name == "STACK_GLOBAL":
                    names.append(".".join(texts[-2:]))
    file.seek(0)
    wants = f" that imports {', '.join(dict.fromkeys(names[:3]))}" if names else ""
    return f"is an old-style pickle{wants}, which can run any program"


def load_plain(file: IO[bytes], map_location: Any) -> tuple[Any, str | None]:
    """The content of a torch file, or the reason why it takes more than plain values to load it."""
    with zipfile.ZipFile(file) as archive:
        data = archive.read(next(n for n in archive.namelist() if n.endswith("/data.pkl") or n == "data.pkl"))
    if (name := _allocator_in(data)) is not None:
        return None, f"wants to call {name}, which can take any amount of memory"
    del data
    file.seek(0)
    # The context would also take away, at its end, what the user had allowed before.
    mine = [
        entry for entry in _PLAIN_CLASSES + _omegaconf_classes() if entry not in torch.serialization.get_safe_globals()
    ]
    try:
        with torch.serialization.safe_globals(mine), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch warns of here (a newer pickle protocol) ends as our complaint
            return torch.load(file, map_location=map_location, weights_only=True), None
    except pickle.UnpicklingError as error:
        name = re.search(r"GLOBAL (\S+) ", str(error))
        last = str(error).split("WeightsUnpickler error:")[-1].strip().splitlines()
        what = f"the class or function {name[1]}" if name else f"more than plain values ({last[0] if last else error})"
        return None, f"wants {what}, which can run any program"


def _allocator_in(data: bytes) -> str | None:
    """The first name in a pickle that could be called for any amount of memory."""
    under = below = top = None  # what was pushed last: ("name", ...), ("text", ...), None for all else
    memo: dict[int, Any] = {}
    for op, arg, _ in pickletools.genops(data):
        if op.name in ("BINPUT", "LONG_BINPUT"):
            memo[arg] = top
            continue
        under, below, top = below, top, None
        if op.name in ("GLOBAL", "BINUNICODE"):
            top = ("name" if op.name == "GLOBAL" else "text", arg)
        elif op.name in ("BINGET", "LONG_BINGET"):
            top = memo.get(arg)
        kind, name = below or (None, "")
        follows_text = top is not None and top[0] == "text"
        if kind == "name" and (_ALLOCATORS.fullmatch(name) or (_STORAGE.fullmatch(name) and not follows_text)):
            return name.replace(" ", ".")
        if (below == _ENCODE and not follows_text) or (under == _ENCODE and top != ("text", "latin1")):
            return "_codecs.encode"
    return None
