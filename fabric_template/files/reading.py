"""Reading: checkpoint files opened without trusting them; a damaged one is refused before anything is built from it.

Needs `opening.py`, `errors.py`, `ordinary.py`, torch and the standard library: the four can be copied alone.
"""

import argparse
import contextlib
import json
import os
import pickle
import pickletools
import re
import struct
import sys
import warnings
import zipfile
from collections import defaultdict
from collections.abc import Iterable
from pathlib import Path
from typing import IO, Any

import torch

from .errors import CheckpointError, DamagedError, cause_of, is_passing, local_path
from .opening import opened
from .ordinary import tensors_in

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
_Pushed = tuple[str, Any] | None  # ("name", ...), ("text", ...), None for all else

_OLD = "is an old-style pickle, which can run any program"


def verify_checkpoint(path: str | Path) -> None:
    """Read a file from end to end and raise `CheckpointError` unless it is a whole checkpoint.

    A torch file carries a CRC for each part, so that any flipped bit is found. A safetensors file has none: there only
    the header and the sizes are checked.

    Example:
        >>> torch.save({"epoch": 3}, "demo.ckpt")
        >>> verify_checkpoint("demo.ckpt")
    """
    path = local_path(path)
    with opened(path) as file:
        _verify(file, path)


def read_checkpoint(
    path: str | Path, *, trusted: bool = False, map_location: Any = "cpu", mapped: bool = False
) -> dict[str, Any]:
    """Verify a file, then load it; nothing that the file names is imported or called.

    Args:
        path: A torch zip file with a dict in it (ours, Fabric's, Trainer's), or a `.safetensors` file, which comes back
            as `{"state_dict": ...}`.
        trusted: Also load pickles that need arbitrary classes. Such a file can run any program: only where you know
            who wrote it.
        map_location: As in `torch.load`.
        mapped: Leave the tensors of a torch file on the disk until they are looked at, where the system can (Linux).

    Example:
        >>> torch.save({"epoch": 3}, "demo.ckpt")
        >>> read_checkpoint("demo.ckpt")
        {'epoch': 3}
    """
    path = local_path(path)
    # Opened once: what was verified is what is loaded, also while another process renames a new file over the name.
    with opened(path) as file:
        if mapped:
            _MAPPED[str(path)] = os.fstat(file.fileno())
        is_legacy = trusted and path.suffix != ".safetensors" and _is_pickle(file)
        if not is_legacy:
            _verify(file, path)
        if path.suffix == ".safetensors":
            return {"state_dict": _load_safetensors(path, map_location)}
        # From here on the checksums are right: what cannot be read was written so, which is no damage.
        checkpoint, reason = (None, _OLD) if is_legacy else _load_plain(file, map_location, mapped)
        if reason is not None and not trusted:
            raise CheckpointError(_needs_trust(path, reason))
        if reason is not None:
            warnings.warn(f"'{path}' {reason}; loaded all the same, because of trusted=True.", stacklevel=2)
            file.seek(0)
            checkpoint = torch.load(file, map_location=map_location, weights_only=False)
    if mapped:
        check_mapped(path)
    if not isinstance(checkpoint, dict):
        raise CheckpointError(
            f"'{path}' holds a {type(checkpoint).__name__}, not a dict: save {{'state_dict': model.state_dict()}}."
        )
    return checkpoint


# files whose tensors were left on the disk, as they were before they were verified
_MAPPED: dict[str, os.stat_result] = {}


def check_mapped(path: str | Path) -> None:
    """Refuse a file that was written to since its tensors were left there; a page that is gone is SIGBUS, and no error.

    To be asked before tensors are looked at, and behind that. One that was replaced keeps its pages.
    """
    before = _MAPPED.get(str(path))
    with contextlib.suppress(OSError):
        now = os.stat(path)
        is_it = before is not None and (now.st_dev, now.st_ino) == (before.st_dev, before.st_ino)
        if is_it and before is not None and (now.st_size, now.st_mtime_ns) != (before.st_size, before.st_mtime_ns):
            raise DamagedError(
                f"'{path}' was written to while it was read ({before.st_size:,} bytes before, {now.st_size:,} now): use another"
                " file, or type the same again once it is whole"
            )


def forget_mapped(path: str | Path) -> None:
    """What is read of this path from now on is another file's: nobody looks any more at what was left on the disk."""
    _MAPPED.pop(str(path), None)


def load_header(path: str | Path) -> dict[str, Any]:
    """What a file says of itself, its tensors left on the disk; to choose among large files, not to go on from one.

    Raises:
        CheckpointError: nothing can be made of it. Damage inside a tensor is not seen here, `read_checkpoint` sees it.

    Example:
        >>> torch.save({"global_step": 3, "state_dict": {"w": torch.ones(2)}}, "demo.ckpt")
        >>> load_header("demo.ckpt")["global_step"]
        3
    """
    with opened(local_path(path)) as file:
        if damage := _zip_damage(file, os.fstat(file.fileno()).st_size, read_all=False):
            raise DamagedError(f"'{path}' is damaged or no checkpoint: {damage}.")
        try:
            content, reason = _load_plain(file, "meta")
        except RuntimeError:  # since torch 2.15 no sparse tensor is made without its elements
            content, reason = _load_plain(file, "cpu")
    if reason is not None:
        raise CheckpointError(_needs_trust(path, reason))
    return content if isinstance(content, dict) else {}


def find_weights(checkpoint: dict[str, Any], expected: Iterable[str] = ()) -> dict[str, Any]:
    """Return the state dict inside a checkpoint, without the prefixes of the wrappers it was saved from.

    Understands Lightning's layout (`state_dict`), what `fabric.save({"model": ...})` writes, and a bare state dict. The
    prefixes of DDP (`module.`) and Fabric (`_forward_module.`) go where all keys have them, `torch.compile`'s
    (`_orig_mod.`) goes everywhere.

    Args:
        checkpoint: What `read_checkpoint` returned.
        expected: The model's own keys. They are left alone, should the model itself have a child called `module`.

    Example:
        >>> find_weights({"model": {"module.weight": torch.ones(1)}})
        {'weight': tensor([1.])}
    """
    for key in ("state_dict", "model", "model_state_dict"):
        weights = checkpoint.get(key)
        if isinstance(weights, dict) and all(isinstance(name, str) for name in weights):
            break
    else:
        weights = checkpoint
        if not weights or not all(isinstance(k, str) and isinstance(v, torch.Tensor) for k, v in weights.items()):
            keys = ", ".join(str(key)[:40] for key in list(checkpoint)[:8]) or "nothing"
            raise CheckpointError(
                f"no weights found: the checkpoint's keys are {keys}. Expected a dict of tensors under 'state_dict' or "
                "'model', or nothing but tensors: save {'state_dict': model.state_dict()}."
            )
    expected = set(expected)
    plain = {k if k in expected else k.replace("_orig_mod.", ""): v for k, v in weights.items()}
    weights = plain if len(plain) == len(weights) else dict(weights)  # two keys that would become one stay apart
    while weights and not (expected and expected.issuperset(weights)):
        prefix = next((p for p in ("module.", "_forward_module.") if all(k.startswith(p) for k in weights)), None)
        if prefix is None:
            break
        weights = {key.removeprefix(prefix): value for key, value in weights.items()}
    return weights


def explain_mismatch(expected: dict[str, Any], found: dict[str, Any]) -> str | None:
    """Say in one line how two state dicts differ in keys and shapes; None if they do not.

    Example:
        >>> explain_mismatch({"a": torch.ones(2), "b": torch.ones(1)}, {"a": torch.ones(3)})
        "2 differences: missing 'b'; 'a' has shape (3,) in the file, (2,) in the model"
    """
    differences = [f"missing '{key}'" for key in expected if key not in found]
    differences += [f"unexpected '{key}'" for key in found if key not in expected]
    for key in expected:
        ours, theirs = (getattr(side.get(key), "shape", None) for side in (expected, found))
        if ours is not None and key in found and ours != theirs:
            shape = "no shape" if theirs is None else f"shape {tuple(theirs)}"
            differences.append(f"'{key}' has {shape} in the file, {tuple(ours)} in the model")
    if not differences:
        return None
    count = len(differences)
    end = f"; and {count - 3} more" if count > 3 else ""
    return f"{count} difference{'s' * (count > 1)}: {'; '.join(differences[:3])}{end}"


def _verify(file: IO[bytes], path: Path) -> None:
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        raise DamagedError(f"'{path}' is empty: use another file.")
    if path.suffix == ".safetensors":
        damage = _safetensors_damage(file, size)
    elif _is_pickle(file):
        raise CheckpointError(_needs_trust(path, _OLD))
    else:
        damage = _zip_damage(file, size)
    file.seek(0)
    if damage:
        raise DamagedError(f"'{path}' is damaged or no checkpoint: {damage}. Use another file, or save it again.")


def _zip_damage(file: IO[bytes], size: int, read_all: bool = True) -> str | None:
    file.seek(0)
    start = file.read(4)
    if start != b"PK\x03\x04":
        return f"it starts with {start!r}, a torch file with b'PK\\x03\\x04'"
    try:
        with zipfile.ZipFile(file) as archive:
            members = archive.infolist()
            # All from the directory alone, before any part is read: torch stores, and never compresses.
            if any(m.compress_type != zipfile.ZIP_STORED or m.compress_size != m.file_size for m in members):
                return "it has compressed parts, which torch.save never writes (torch.jit.save does)"
            if sum(m.file_size for m in members) > size:
                return f"its parts claim to be larger than the file's {size} bytes"
            names = [m.filename for m in members]
            # Twice a name (in torch's reader also "A" and "a"), another folder, a prefix, a "folder" with content: zipfile and
            # torch's own reader would see different bytes.
            odd = len({name.lower() for name in names}) < len(names) or len({name.split("/")[0] for name in names}) > 1
            odd = odd or bool(archive.comment) or any(m.external_attr & 0x10 for m in members)
            if odd or not members or min(m.header_offset for m in members) != 0:
                return "its directory is not one that torch.save writes"
            if _pickle_in(names) not in names:
                return "it is a zip file without a data.pkl"
            if read_all and (bad := archive.testzip()):  # reads everything, 1 MiB at a time
                return f"the checksum of its part '{bad}' is wrong"
        file.seek(0)
        with contextlib.suppress(pickle.UnpicklingError):  # torch's own reader looks at fields that zipfile ignores
            torch.serialization.get_unsafe_globals_in_checkpoint(file)
        return None
    except Exception as error:  # a damaged directory makes zipfile raise anything
        if is_passing(error):
            raise
        return f"it is cut off or altered ({cause_of(error)})"


def _safetensors_damage(file: IO[bytes], size: int) -> str | None:
    file.seek(0)
    (length,) = struct.unpack("<Q", file.read(8).ljust(8, b"\0"))
    if not 2 <= length <= size - 8:
        return f"its header claims {length} bytes, the file has {size}"
    try:
        header = json.loads(file.read(length))
        end = max((int(entry["data_offsets"][1]) for key, entry in header.items() if key != "__metadata__"), default=0)
    except Exception as error:
        if is_passing(error):
            raise
        return f"its header cannot be read ({cause_of(error)})"
    return None if 8 + length + end == size else f"its tensors need {8 + length + end} bytes, the file has {size}"


def _load_safetensors(path: Path, map_location: Any) -> dict[str, torch.Tensor]:
    try:
        from safetensors.torch import load_file
    except ImportError as error:
        raise CheckpointError(f"'{path}' needs the safetensors package: pip install safetensors.") from error
    return load_file(path, device=str(map_location) if isinstance(map_location, str | torch.device) else "cpu")


def _is_pickle(file: IO[bytes]) -> bool:
    file.seek(0)
    start = file.read(2)
    file.seek(0)
    return len(start) == 2 and start[0] == 0x80 and start[1] <= pickle.HIGHEST_PROTOCOL


def _needs_trust(path: str | Path, reason: str) -> str:
    return f"'{path}' {reason}; refused. If you know who wrote it, give trusted=True, and save it again from there."


def _allocator_in(data: bytes) -> str | None:
    """The first name in a pickle that could be called for any amount of memory."""
    under: _Pushed = None
    below: _Pushed = None
    top: _Pushed = None  # what was pushed last
    memo: dict[Any, _Pushed] = {}
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


def _pickle_in(names: list[str]) -> str:
    """What torch's own reader takes for the pickle: in the folder of the first part."""
    return f"{names[0].split('/')[0] if names else ''}/data.pkl"


def _declared(content: Any) -> int:
    """The bytes of all tensors, of each view once, if every element had memory of its own."""
    plain = [tensor for tensor in tensors_in(content) if tensor.layout is torch.strided]
    views = {
        (t.untyped_storage().data_ptr(), t.storage_offset(), t.shape, t.stride()): t.numel() * t.itemsize for t in plain
    }
    return sum(views.values())


def _load_plain(file: IO[bytes], map_location: Any, mapped: bool = False) -> tuple[Any, str | None]:
    """Return the content, or the reason why it takes more than plain values to load it."""
    with zipfile.ZipFile(file) as archive:
        data = archive.read(_pickle_in(archive.namelist()))
    if (name := _allocator_in(data)) is not None:
        return None, f"wants to call {name}, which can take any amount of memory"
    del data
    file.seek(0)
    # the file that is open, whatever has its name by now
    source: Any = f"/proc/self/fd/{file.fileno()}" if mapped and sys.platform == "linux" else file
    # The context would also take away, at its end, what the user had allowed before.
    mine = [
        entry for entry in _PLAIN_CLASSES + _omegaconf_classes() if entry not in torch.serialization.get_safe_globals()
    ]
    try:
        with torch.serialization.safe_globals(mine), warnings.catch_warnings():
            warnings.simplefilter("ignore")  # what torch warns of here (a newer pickle protocol) ends as our complaint
            content = torch.load(source, map_location=map_location, weights_only=True, mmap=source is not file or None)
        declared, size = _declared(content), os.fstat(file.fileno()).st_size
        if declared <= 2 * size + 2**26:
            return content, None
        much = f"{declared / 1e6:.0f} MB in {size / 1e6:.1f} MB"
        return None, f"holds tensors of {much}, as their elements share memory (expand)"
    except pickle.UnpicklingError as error:
        wanted = re.search(r"GLOBAL (\S+) ", str(error))
        last = str(error).split("WeightsUnpickler error:")[-1].strip().splitlines()
        what = (
            f"the class or function {wanted[1]}" if wanted else f"more than plain values ({last[0] if last else error})"
        )
        return None, f"wants {what}, which can run any program"
