"""Damage is proven, or it is none: an error while a checkpoint is read ends the start with its cause, nothing is touched."""

import builtins
import errno
import io
import os
import zipfile

import pytest
import torch
from modules import Classifier, make_loader
from runs import fit, loud

from fabric_template import FabricLoop
from fabric_template.checkpoint.checkpoint_io import load_header, read_checkpoint, verify_checkpoint
from fabric_template.errors import CheckpointError, DamagedError, UnreadableError
from fabric_template.tools import cli

TREE = {"state_dict": {"w": torch.arange(30000.0)}, "global_step": 3}


class Failing:
    """Some reads of the files under a folder fail, or say that the file has ended; `count` counts them all."""

    def __init__(self, folder, which=(), error=None):
        self.folder, self.which, self.error, self.count = str(folder), which, error, 0

    def __enter__(self):
        self.real = builtins.open
        builtins.open = self.open
        return self

    def __exit__(self, *exception):
        builtins.open = self.real

    def open(self, file, mode="r", buffering=-1, *args, **words):
        if mode != "rb" or not str(file).startswith(self.folder):
            return self.real(file, mode, buffering, *args, **words)
        raw = _Raw(file, "rb")
        raw.layer = self
        return raw if buffering == 0 else io.BufferedReader(raw)


class _Raw(io.FileIO):
    def readinto(self, buffer):
        self.layer.count += 1
        if self.layer.count in self.layer.which:
            if self.layer.error is not None:
                raise self.layer.error
            self.layer.is_early = self.tell() < os.fstat(self.fileno()).st_size
            return 0
        return super().readinto(buffer)


EIO = OSError(errno.EIO, os.strerror(errno.EIO))
ERRORS = {
    "the disk reports an input/output error": EIO,
    "there is not enough memory": MemoryError(),
    "Too many open files": OSError(errno.EMFILE, os.strerror(errno.EMFILE)),
    "an early end": None,
}


@pytest.mark.parametrize("function", [verify_checkpoint, read_checkpoint, load_header])
def test_no_error_of_a_read_is_taken_for_damage(tmp_path, function):
    """Every single read of a good file fails, in each way; zipfile and torch make errors of their own of it, or none."""
    path = tmp_path / "a.ckpt"
    torch.save(TREE, path)
    with Failing(tmp_path) as layer:
        function(path)
    assert (count := layer.count) > 4
    for cause, error in ERRORS.items():
        for n in range(1, count + 1):
            told = None
            with Failing(tmp_path, [n], error) as layer:
                try:
                    function(path)
                except UnreadableError as caught:
                    told = str(caught)
            if error is None and not layer.is_early:  # zipfile reads behind the end
                assert told is None
                continue
            words = "the disk reports an input/output error" if error is None else cause
            assert told == (
                f"'{path}' could not be read: {words}. That proves no damage, and the file was left as it is: type the"
                " same again once that is mended, or give another file."
            )


@pytest.mark.parametrize("where", ["zipfile.ZipFile.testzip", "torch.load", "json.loads"])
def test_no_memory_is_no_damage(tmp_path, monkeypatch, where):
    """Also in torch's own words, where its allocator is what fails."""
    path = tmp_path / ("a.safetensors" if where.startswith("json") else "a.ckpt")
    torch.save(TREE, path)
    if where.startswith("json"):
        pytest.importorskip("safetensors.torch").save_file({"w": torch.ones(3)}, path)
    words = "[enforce fail at alloc_cpu.cpp:127] . DefaultCPUAllocator: can't allocate memory: you tried to allocate 8 bytes"
    for error in (MemoryError(), RuntimeError(words)):

        def fails(*args, error=error, **words):
            raise error

        monkeypatch.setattr(where, fails)
        with pytest.raises(UnreadableError, match="That proves no damage"):
            read_checkpoint(path)


def test_damage_is_still_damage(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save(TREE, path)
    whole = path.read_bytes()
    flipped = bytearray(whole)
    flipped[len(whole) // 2] ^= 1
    for data in (b"", b"PK", whole[:-1], whole[:1000], whole[1:], bytes(flipped)):
        path.write_bytes(data)
        with pytest.raises(DamagedError):
            read_checkpoint(path)
        with pytest.raises(DamagedError):
            verify_checkpoint(path)


def test_right_checksums_are_no_damage_whatever_they_are_of(tmp_path):
    """Written as it is by somebody: no reason to rename it."""
    path = tmp_path / "a.ckpt"
    torch.save({"a": 1}, tmp_path / "b.ckpt")
    with zipfile.ZipFile(tmp_path / "b.ckpt") as old, zipfile.ZipFile(path, "w") as new:
        for member in old.infolist():
            data = old.read(member)
            new.writestr(member.filename, data[:-3] + b"K\x01." if member.filename.endswith("data.pkl") else data)
    with pytest.raises(CheckpointError) as caught:
        read_checkpoint(path)
    assert not isinstance(caught.value, DamagedError)


@pytest.fixture
def saved(tmp_path):
    fit(tmp_path, max_epochs=2)
    return tmp_path


def names(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


@pytest.mark.parametrize("word", ["resume", "load"])
@pytest.mark.parametrize("call", ["open", "stat", "listdir"])
def test_a_start_that_cannot_look_ends_with_the_cause_and_touches_nothing(saved, monkeypatch, word, call):
    """Whichever way a file is looked at: opened, asked for, listed; "auto" begins no new run, and renames nothing."""
    before, real = names(saved), getattr(os, call) if call != "open" else builtins.open

    def fails(path, *args, **words):
        last = str(path).endswith(("last.ckpt", "version_0") if call != "listdir" else ("run", "version_0"))
        if isinstance(path, str | os.PathLike) and "checkpoints" in str(path) and last:
            raise OSError(errno.EMFILE, os.strerror(errno.EMFILE), str(path))
        return real(path, *args, **words)

    value = {"resume": "auto", "load": "last"}[word]
    with monkeypatch.context() as patch:
        patch.setattr(builtins if call == "open" else os, call, fails)
        with pytest.raises(CheckpointError, match="Too many open files") as caught:
            fit(saved, max_epochs=3, **{word: value})
    assert "\n" not in str(caught.value)
    assert names(saved) == before
    loop, _, history = fit(saved, max_epochs=3, **{word: value})
    assert (len(history), names(saved) == before) == (3, word == "resume")
    assert loop.global_step == 30


def test_resume_auto_does_not_go_on_from_an_older_one(saved, tmp_path):
    """The furthest one cannot be read: no reason to go back to the one before."""
    folder = saved / "checkpoints/run/version_0"
    os.link(folder / "last.ckpt", folder / "older.ckpt")
    with Failing(folder / "last.ckpt", range(2, 999), EIO), pytest.raises(UnreadableError, match="last.ckpt"):
        fit(saved, max_epochs=3, resume="auto")
    assert sorted(set(os.listdir(folder)) - {".lock"}) == ["last.ckpt", "older.ckpt"]


def test_verify_tells_what_could_not_be_read_from_what_is_damaged(tmp_path, capsys):
    for name in ("a.ckpt", "b.ckpt"):
        torch.save(TREE, tmp_path / name)
    with Failing(tmp_path / "a.ckpt", range(2, 999), EIO):
        assert cli.main(["verify", str(tmp_path)]) == 2
    out = capsys.readouterr().out
    assert out.startswith(f"not read    {tmp_path}/a.ckpt: ")
    assert out.endswith(f"whole       {tmp_path}/b.ckpt\n")
    (tmp_path / "b.ckpt").write_bytes(b"no")
    with Failing(tmp_path / "a.ckpt", range(2, 999), EIO):
        assert cli.main(["verify", str(tmp_path)]) == 1


def test_validate_says_what_could_not_be_read(saved):
    loop = FabricLoop(**loud(saved))
    with Failing(saved / "checkpoints", range(3, 999), EIO), pytest.raises(UnreadableError):
        loop.validate(Classifier(), make_loader(), load="last")
