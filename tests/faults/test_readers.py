"""No file can make a reader crash, hang, take memory or run anything; and the probe that says so can fail.

`make soak` reads a million such files, chosen by atheris.
"""

import codecs
import collections
import os
import time
from pathlib import Path

import pytest
import readers
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from fabric_template.files.reading import CheckpointError, read_checkpoint


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    folder = tmp_path_factory.mktemp("readers") / "v"
    folder.mkdir()
    readers.warm_up(folder)
    return folder


@pytest.mark.parametrize("reader", readers.READERS)
def test_fuzzed(folder, reader):
    @settings(max_examples=1000, suppress_health_check=list(HealthCheck))
    @given(st.binary(max_size=200))
    def check(data):
        readers.probe(reader, data, folder)

    check()


# ---- one file for each thing that was found


class Call:
    """Pickled as a call of a function with arguments."""

    def __init__(self, function, *arguments):
        self.function, self.arguments = function, arguments

    def __reduce__(self):
        return self.function, self.arguments


def parse(text):
    raise ValueError(f"no number: {text}")


def storage():
    return torch.storage.TypedStorage(wrap_storage=torch.UntypedStorage(8), dtype=torch.qint8, _internal=True)


@pytest.mark.parametrize(
    ("name", "call"),
    [
        ("torch.storage.UntypedStorage", Call(torch.UntypedStorage, 2**31)),
        ("torch.storage.TypedStorage", Call(torch.storage.TypedStorage, 2**31)),
        ("_codecs.encode", Call(codecs.encode, Call(codecs.encode, "ab", "hex"), "hex")),  # each doubles it
        (
            "torch._utils._rebuild_qtensor",
            Call(torch._utils._rebuild_qtensor, storage(), 0, (2**31,), (1,), (torch.per_tensor_affine, 0.1, 0), False,
                 collections.OrderedDict()),
        ),
    ],
    ids=["UntypedStorage", "TypedStorage", "codec", "quantized"],
)  # fmt: skip
def test_a_call_that_takes_any_amount_of_memory_is_refused(tmp_path, name, call):
    path = tmp_path / "a.ckpt"
    torch.save({"w": torch.ones(2), "k": call}, path)
    with pytest.raises(CheckpointError, match=f"wants to call {name}, which can take any amount of memory; refused"):
        read_checkpoint(path)


def test_storages_of_every_type_are_still_read(tmp_path):
    path = tmp_path / "a.ckpt"
    saved = {f"{kind}{i}": torch.zeros(2, dtype=kind) for kind in (torch.float8_e4m3fn, torch.uint16) for i in range(2)}
    torch.save(saved, path)
    assert {name: value.dtype for name, value in read_checkpoint(path).items()} == {
        k: v.dtype for k, v in saved.items()
    }


def test_bytes_are_still_read(tmp_path):
    saved = {"a": b"\x00\xff", "b": [b"\x00\xff", b"other"], "c": bytes(range(256))}
    torch.save(saved, tmp_path / "a.ckpt")
    assert read_checkpoint(tmp_path / "a.ckpt") == saved


def test_a_name_in_the_file_with_several_lines(tmp_path):
    (tmp_path / "a.ckpt").write_bytes(readers._zip(readers.PARTS | {"archive/a\nb": b"x"}).replace(b"x", b"y"))
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(tmp_path / "a.ckpt")
    assert "\n" not in str(caught.value)


def test_sizes_in_words_in_a_safetensors_header(tmp_path):
    path = tmp_path / "a.safetensors"
    header = b'{"w":{"dtype":"F32","shape":[1],"data_offsets":[0,"x"]}}'
    path.write_bytes(len(header).to_bytes(8, "little") + header + bytes(4))
    with pytest.raises(CheckpointError, match="its header cannot be read"):
        read_checkpoint(path)


# ---- the probe itself


@pytest.mark.parametrize(
    ("misdeed", "complaint"),
    [
        (lambda: os.system("true"), "reading led to ..os.system"),
        (lambda: torch.empty(2**28), "asked for more than twice as much memory"),
        (lambda: bytearray(2**28), "asked for more than twice as much memory"),
        (lambda: __import__("this_is_no_module"), "reading led to ..import this_is_no_module"),
        (lambda: [].pop(), "IndexError: pop from empty list"),
        (lambda: parse("no\nfile"), "more than one line"),
    ],
    ids=["system", "torch_memory", "python_memory", "import", "error", "lines"],
)
def test_the_probe_sees(folder, monkeypatch, misdeed, complaint):
    monkeypatch.setattr(readers.READERS["lock"], "read", lambda path, expected: misdeed())
    with pytest.raises(readers.Broken, match=complaint):
        readers.probe("lock", b"", folder)


def test_the_probe_sees_a_slow_reader_and_a_wrong_answer(folder, monkeypatch):
    def slow(path, expected):
        while time.thread_time() < until:
            pass

    monkeypatch.setattr(readers, "SLOW", 0.01)
    until = time.thread_time() + 0.05
    monkeypatch.setattr(readers.READERS["lock"], "read", slow)
    with pytest.raises(readers.Broken, match="took 0.0"):
        readers.probe("lock", b"", folder)
    path = Path(folder, "other.ckpt")
    torch.save({"w": torch.ones(2)}, path)
    with pytest.raises(readers.Broken, match="a damaged file was read as"):
        readers._read_checkpoint(str(path), {"w": torch.zeros(2)})
