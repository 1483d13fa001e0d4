"""Damaged, altered and invented files for every reader, and what may come of reading them.

Each reader has a maker that turns any bytes into a file (so that hypothesis and atheris can both choose them), aware of the
format: fields of a zip directory, pickle programs with right checksums, JSON headers with large shapes, cells and quotes.
`probe` reads the file and raises `Broken` unless that ended in a clean error or a right result, quickly, in little memory,
and without importing or calling anything that the file names.
"""

import codecs
import contextlib
import fcntl
import io
import json
import os
import resource
import struct
import sys
import time
import warnings
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

os.environ.setdefault("OMP_NUM_THREADS", "1")
sys.path[:0] = [str(Path(__file__).parents[1]), str(Path(__file__).parents[2])]  # the tests' modules, the package

import torch

from fabric_template import CSVLogger, read_logs
from fabric_template.files import locks
from fabric_template.files.reading import read_checkpoint
from fabric_template.process.choose import newest_good
from fabric_template.tools import configs

SLOW = 20.0  # seconds of this thread's own time
SLACK = 32 << 20  # bytes that reading may take from the system beyond twice the file: the interpreter's own arenas
NUMBERS = (
    0,
    1,
    2,
    7,
    8,
    127,
    128,
    255,
    256,
    65535,
    65536,
    2**31 - 1,
    2**31,
    2**32 - 1,
    2**40,
    2**63 - 1,
    2**63,
    2**64 - 1,
)
FORBIDDEN = ("import", "exec", "pickle.find_class", "os.system", "os.exec", "os.fork", "os.posix_spawn", "subprocess.Popen",
             "socket.connect", "ctypes.dlopen")  # fmt: skip


class Broken(AssertionError):
    """A reader did what no file may make it do."""


class Choices:
    """Bytes as a row of choices; after their end all choices are the first."""

    def __init__(self, data: bytes) -> None:
        self.data, self.at = data, 0

    def below(self, limit: int) -> int:
        """A number from 0 to limit - 1."""
        width = (limit.bit_length() + 7) // 8
        return int.from_bytes(self.take(width), "little") % limit

    def of(self, items: Any) -> Any:
        """One of the items."""
        return items[self.below(len(items))]

    def take(self, size: int) -> bytes:
        """The next bytes."""
        self.at += size
        return self.data[self.at - size : self.at]

    def rest(self) -> bytes:
        """All bytes that are left."""
        return self.take(max(len(self.data) - self.at, 0))


def edited(content: bytes, choices: Choices) -> bytes:
    """Some bytes overwritten, flipped, inserted, removed, repeated or cut off."""
    content = bytearray(content)
    for _ in range(1 + choices.below(4)):
        at, how = choices.below(len(content) + 1), choices.below(7)
        if how == 0 and at < len(content):
            content[at] ^= 1 << choices.below(8)
        elif how == 1:
            part = choices.take(1 + choices.below(8))
            content[at : at + len(part)] = part
        elif how == 2:
            content[at:at] = choices.take(1 + choices.below(16))
        elif how == 3:
            del content[at : at + 1 + choices.below(64)]
        elif how == 4:
            content[at:at] = content[choices.below(len(content) + 1) :][: 1 + choices.below(64)]
        elif how == 5:
            content[at : at + 8] = struct.pack("<Q", choices.of(NUMBERS))[: choices.of((1, 2, 4, 8))]
        else:
            del content[at:]
    return bytes(content)


# ---- checkpoints


def _tensors() -> dict[str, Any]:
    return {
        "state_dict": {"w": torch.arange(5.0), "b": torch.ones(2, 3, dtype=torch.int64)[:, 1:], "p": torch.tensor(True)},
        "epoch": 3, "lr": 0.1, "callbacks": {"a": [1, None, "text", (2, 3)]},
    }  # fmt: skip


def _saved(value: Any, **words: Any) -> bytes:
    file = io.BytesIO()
    torch.save(value, file, **words)
    return file.getvalue()


BASE = _saved(_tensors())
OLD = _saved(_tensors(), _use_new_zipfile_serialization=False)
with zipfile.ZipFile(io.BytesIO(BASE)) as _archive:
    PARTS = {name: _archive.read(name) for name in _archive.namelist()}
PICKLE = next(name for name in PARTS if name.endswith("data.pkl"))
GLOBALS = [
    *sorted(name.replace(".", " ") if name.count(".") == 1 else " ".join(name.rsplit(".", 1))
            for name in torch._weights_only_unpickler._get_allowed_globals()),
    "os system", "builtins eval", "builtins exec", "builtins bytearray", "builtins getattr", "posix system", "this s",
    "antigravity x", "torch.hub load", "torch load", "pathlib PosixPath", "argparse Namespace", "io open", "socket socket",
]  # fmt: skip


def _zip(parts: dict[str, bytes]) -> bytes:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", zipfile.ZIP_STORED) as archive:
        for name, content in parts.items():
            archive.writestr(zipfile.ZipInfo(name), content)
    return file.getvalue()


def pickled(choices: Choices) -> bytes:
    """A pickle program: plain values, tensors of any size, calls of whatever name; grammatical more often than not."""
    out = bytearray(b"\x80\x02")

    def number() -> None:
        out.extend(b"\x8a\x09" + choices.of(NUMBERS).to_bytes(9, "little"))

    def text(value: str) -> None:
        out.extend(b"X" + struct.pack("<I", len(value)) + value.encode())

    def several(depth: int) -> None:
        out.extend(b"(")
        for _ in range(choices.below(4)):
            item(depth + 1)
        out.extend(b"t")

    def storage() -> None:
        out.extend(b"(")
        text("storage")
        out.extend(b"ctorch\n" + choices.of((b"FloatStorage", b"LongStorage", b"BoolStorage", b"QInt8Storage")) + b"\n")
        text(choices.of(("0", "1", "2", "9", "../x")))
        text("cpu")
        number()
        out.extend(b"tQ")

    def item(depth: int) -> None:
        kind = choices.below(10) if depth < 6 else 0
        if kind == 0:
            number()
        elif kind == 1:
            text(choices.of(("", "a", "state_dict", "epoch", "cpu", "x" * 50)))
        elif kind == 2:
            several(depth)
        elif kind == 3:
            out.extend(choices.of((b"N", b"\x88", b"\x89", b")", b"]", b"}", b"G" + struct.pack(">d", 0.5))))
        elif kind == 4:  # a tensor: storage, offset, size, stride, requires_grad, hooks
            out.extend(
                b"c" + choices.of((b"torch._utils\n_rebuild_tensor_v2\n", b"torch._utils\n_rebuild_qtensor\n")) + b"("
            )
            storage()
            number()
            several(depth)
            several(depth)
            out.extend(b"\x89ccollections\nOrderedDict\n)RtR")
        elif kind == 5:  # a call
            out.extend(b"c" + choices.of(GLOBALS).replace(" ", "\n").encode() + b"\n")
            several(depth)
            out.extend(b"R")
        elif kind == 6:
            out.extend(b"c" + choices.of(GLOBALS).replace(" ", "\n").encode() + b"\n")
        elif kind == 7:
            storage()
        elif kind == 8:  # a state given to an object
            item(depth + 1)
            item(depth + 1)
            out.extend(b"b")
        else:  # said again
            item(depth + 1)
            out.extend(b"q\x00" + b"h\x00" * choices.below(4))

    out.extend(b"}(")
    for _ in range(1 + choices.below(3)):
        text(choices.of(("k", "global_step", "optimizer_states", "fabric_template", "state_dict", "epoch")))
        item(0)
    out.extend(b"u.")
    return bytes(out)


def checkpoint(choices: Choices) -> tuple[bytes, Any]:
    """A torch file; (content, what it must read as, if it reads at all)."""
    kind = choices.below(6)
    if kind == 0:
        return choices.of((b"", b"PK\x03\x04", b"PK\x05\x06", b"\x80\x02")) + choices.rest(), None
    if kind == 1:
        return edited(BASE, choices), _tensors()
    if kind == 2:  # one field of one record of the directory
        content, mark = bytearray(BASE), choices.of((b"PK\x01\x02", b"PK\x03\x04", b"PK\x05\x06", b"PK\x06\x06"))
        places = [i for i in range(len(content)) if content.startswith(mark, i)] or [0]
        at = choices.of(places) + 4 + choices.below(42)
        content[at : at + 4] = struct.pack("<Q", choices.of(NUMBERS))[: choices.of((1, 2, 4))]
        return bytes(content), _tensors()
    parts = dict(PARTS)
    if kind == 3:  # a part altered, its checksum right
        name = choices.of(list(parts))
        parts[name] = edited(parts[name], choices)
    elif kind == 4:
        parts[choices.of([*parts, "x", "archive/data/9", "../x"])] = choices.rest()
    else:
        parts[PICKLE] = pickled(choices)
    return _zip(parts), None


def old_pickle(choices: Choices) -> tuple[bytes, Any]:
    """A file of old torch, or any pickle."""
    return (edited(OLD, choices) if choices.below(2) else pickled(choices)), None


def safetensors(choices: Choices) -> tuple[bytes, Any]:
    """A safetensors file: its header says what the rest is."""
    if choices.below(4) == 0:
        return choices.rest(), None
    header: dict[str, Any] = {}
    for name in ("w", "b")[: 1 + choices.below(2)]:
        header[name] = {
            "dtype": choices.of(("F32", "I64", "BOOL", "F8_E4M3", "X", 3)),
            "shape": [choices.of(NUMBERS) for _ in range(choices.below(4))],
            "data_offsets": [choices.of((0, 4, 8, 2**40, -1)), choices.of((0, 4, 8, 16, 2**40, "x"))],
        }
    if choices.below(4) == 0:
        header["__metadata__"] = choices.of(({}, {"a": "b"}, [], 3))
    text = json.dumps(header).encode()
    if choices.below(2):
        text = edited(text, choices)
    length = choices.of(NUMBERS) if choices.below(4) == 0 else len(text)
    return struct.pack("<Q", length) + text + bytes(choices.of((0, 4, 8, 16, 20))), None


def _read_checkpoint(path: str, expected: Any) -> None:
    found = read_checkpoint(path)
    if not isinstance(found, dict):
        raise Broken(f"a {type(found).__name__} came back")
    if expected is not None and not _same(expected, found):
        raise Broken(f"a damaged file was read as {found}")


def _read_folder(path: str, expected: Any) -> None:
    """What resume="auto" does with it: look into it, go on from it or set it aside."""
    folder = Path(path).parent
    try:
        newest_good([folder])
    finally:
        for other in folder.iterdir():
            other.unlink()


def _same(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return isinstance(other, torch.Tensor) and one.dtype == other.dtype and torch.equal(one, other)
    if isinstance(one, dict):
        return isinstance(other, dict) and one.keys() == other.keys() and all(_same(one[k], other[k]) for k in one)
    return one == other


# ---- tables


TABLE = b'epoch,step,train_loss,"a,b"\n0,10,0.5,x\n1,20,0.25,"y ""z"""\n2,30,nan,\n'


def table(choices: Choices) -> tuple[bytes, Any]:
    """A CSV file."""
    kind = choices.below(4)
    if kind == 0:
        return choices.rest(), None
    if kind == 1:
        return edited(TABLE, choices), None
    cells = ("", "0", "epoch", "step", '"', '""', "=1+1", "\x00", "\ufeff", "nan", "1e999", "9" * 5000, "x", "\r", ",")
    rows = [",".join(choices.of(cells) for _ in range(choices.below(6))) for _ in range(choices.below(6))]
    if choices.below(200) == 1:
        rows.append("x" * 140_000)  # more than the csv module takes unless told
    return choices.of(("\n", "\r\n", "\r")).join(rows).encode() + choices.of((b"", b"\n", b"\xff\xfe")), None


def _read_table(path: str, expected: Any) -> None:
    """Read it, then go on in it: a row appended to whatever was there is found again, and rewinding drops it."""
    content = Path(path).read_bytes()
    with contextlib.suppress(ValueError):
        read_logs(path)
    folder = Path(path).parent
    logger = CSVLogger(folder.parent, name="", version=folder.name)
    try:
        before = logger.position()
        logger.log_epoch({"epoch": 7, "step": 8})
        rows = read_logs(path)
        if str(rows["epoch"].iloc[-1]) not in ("7", "7.0") and "epoch" not in before.get("metrics.csv", {}).get(
            "columns", []
        ):
            raise Broken("the row that was appended is not there")
        logger.rewind(before)
        if logger.position() != before:
            raise Broken(f"rewound to {before}, it stands at {logger.position()}")
    finally:
        Path(path).write_bytes(content)


# ---- configuration, lock


CONFIG = (
    b"# words\nmax_epochs: 3\nmodel: my.Net\ndata: {class: my.Data, batch_size: 4}\ncallbacks:\n- {class_path: a.B}\n"
)


def config(choices: Choices) -> tuple[bytes, Any]:
    """A YAML file."""
    kind = choices.below(4)
    if kind == 0:
        return choices.rest(), None
    if kind == 1:
        return edited(CONFIG, choices), None
    if kind == 2:  # words that are looked at, with values of the wrong kind
        values = (
            "3",
            "[]",
            "{}",
            "null",
            "x",
            "{class_path: 3, init_args: 3}",
            "{class_path: a, init_args: [1]}",
            "{class: {}}",
        )
        words = ("model", "data", "max_epochs", "3", "null", "callbacks", "about")
        return "".join(
            f"{choices.of(words)}: {choices.of(values)}\n" for _ in range(1 + choices.below(4))
        ).encode(), None
    words = ("a: ", "- ", "[", "]", "{", "}", "&x ", "*x", "!!python/object/apply:os.system ", "!!binary x", "2001-99-99", "\n",
             "  ", "? ", "<<: ", "1:2:3", "0x", "'", '"', "[" * 300, "!!int x", "1e400", "\t", "|\n", "%YAML 9\n", "---\n",
             "9" * 5000, ".inf", "model: ", "data: ", "class_path: ", "init_args: ")  # fmt: skip
    return "".join(choices.of(words) for _ in range(choices.below(24))).encode(), None


def _read_config(path: str, expected: Any) -> None:
    if not isinstance(configs.read_configs("fit", {"config": [path]})[0], dict):
        raise Broken("no dict came back")


def lock(choices: Choices) -> tuple[bytes, Any]:
    """A lock file with anything in it."""
    return choices.rest(), None


def _read_lock(path: str, expected: Any) -> None:
    with open(path, "rb+") as other:
        fcntl.flock(other, fcntl.LOCK_EX)
        with mock.patch.object(locks, "MOMENT", 0):  # nobody is going to let go
            locks.one_writer([Path(path).parent]).__enter__()


# ---- the probe


@dataclass
class Reader:
    """One reader: how its files are made, under which name they lie, how they are read."""

    make: Any
    name: str
    read: Any


READERS = {
    "checkpoint": Reader(checkpoint, "a.ckpt", _read_checkpoint),
    "folder": Reader(checkpoint, "run/last.ckpt", _read_folder),
    "old_pickle": Reader(old_pickle, "old.ckpt", _read_checkpoint),
    "safetensors": Reader(safetensors, "a.safetensors", _read_checkpoint),
    "table": Reader(table, "metrics.csv", _read_table),
    "config": Reader(config, "config.yaml", _read_config),
    "lock": Reader(lock, ".lock", _read_lock),
}


@dataclass
class Outcome:
    """How one file was read."""

    read: bool
    seconds: float
    size: int


_seen: list[str] | None = None


def _audit(event: str, args: tuple) -> None:
    if _seen is not None and event in FORBIDDEN:
        _seen.append(f"{event} {str(args[0])[:80] if args else ''}")


@contextlib.contextmanager
def watched():
    """While inside, notes in the list what only a file's own wish could have caused; there is no way to take a hook out."""
    global _seen
    if not getattr(sys, "_fabric_template_audited", False):
        sys._fabric_template_audited = True
        sys.addaudithook(_audit)
    _seen = seen = []
    try:
        yield seen
    finally:
        _seen = None


@contextlib.contextmanager
def limited(size: int):
    """No more than twice the file's size (and SLACK) can be taken from the system; what asks for more fails."""
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    with open("/proc/self/statm", "rb") as file:
        now = int(file.read().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (now + 2 * size + SLACK, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


def probe(name: str, data: bytes, folder: Path) -> Outcome:
    """Make the file that `data` stands for, read it, and raise `Broken` unless all went as it must."""
    reader = READERS[name]
    content, expected = reader.make(Choices(data))
    path = folder / reader.name
    path.parent.mkdir(exist_ok=True)
    path.write_bytes(content)
    error = None
    with watched() as seen, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        began = time.thread_time()
        try:
            with limited(len(content)):
                reader.read(str(path), expected)
        except Broken:
            raise
        except Exception as caught:
            error = caught
        seconds = time.thread_time() - began
    if seen:
        raise Broken(f"reading led to {seen}")
    if seconds > SLOW:
        raise Broken(f"reading {len(content)} bytes took {seconds:.2f} s")
    if error is not None:
        _check_error(error, len(content))
    return Outcome(error is None, seconds, len(content))


def _check_error(error: BaseException, size: int) -> None:
    link: BaseException | None = error
    while link is not None:
        if isinstance(link, MemoryError) or "allocate" in str(link):
            raise Broken(f"{size} bytes asked for more than twice as much memory: {link}") from error
        link = link.__cause__ or link.__context__
    if not isinstance(error, ValueError) or isinstance(error, UnicodeError):
        raise Broken(f"{type(error).__name__}: {error}") from error
    if "\n" in str(error):
        raise Broken(f"more than one line: {error}") from error


def warm_up(folder: Path) -> None:
    """Read one good file of each kind, so that what the readers import is imported."""
    import pandas  # noqa: F401
    import safetensors.torch
    import torch._subclasses.schema_check_mode  # by torch itself, to print a tensor in an error
    import torch.nested._internal.ops  # for the first nested tensor

    safetensors.torch.save_file({"w": torch.ones(2)}, folder / "good.safetensors")
    (folder / "good.ckpt").write_bytes(BASE)
    for path in ("good.safetensors", "good.ckpt"):
        read_checkpoint(str(folder / path))
    for name in READERS:
        for data in (b"", *(bytes([i]) * 8 for i in range(1, 8))):
            content, expected = READERS[name].make(Choices(data))
            (folder / READERS[name].name).parent.mkdir(exist_ok=True)
            (folder / READERS[name].name).write_bytes(content)
            with contextlib.suppress(Exception), warnings.catch_warnings():
                warnings.simplefilter("ignore")
                READERS[name].read(str(folder / READERS[name].name), expected)
    for codec in ("utf_8_sig", "utf_16_le", "utf_16_be", "utf_32_le", "utf_32_be", "raw_unicode_escape"):
        codecs.lookup(codec)  # imported at first use
