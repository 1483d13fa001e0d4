"""Checkpoint files: whole or not at all, and read without trust."""

import argparse
import errno
import io
import multiprocessing
import os
import pickle
import signal
import struct
import subprocess
import sys
import warnings
import zipfile
from pathlib import Path

import lightning
import pytest
import torch
from fabric_template.files import locks, storage
from fabric_template.files.locks import one_writer
from fabric_template.files.names import safe_name
from hypothesis import given, settings
from hypothesis import strategies as st
from interpreter import ready
from lightning.fabric import Fabric

from fabric_template.checkpoint.checkpoint_io import (
    AtomicCheckpointIO,
    CheckpointError,
    explain_mismatch,
    find_weights,
    inside,
    read_checkpoint,
    verify_checkpoint,
)

ROOT = Path(__file__).parents[2]
STATE = {"w": torch.arange(5.0), "b": torch.ones(2, 2, dtype=torch.int64), "n": 3, "text": "a"}


def save(state, path):
    AtomicCheckpointIO().save_checkpoint(state, path)
    return path


def same(a, b):
    return a.keys() == b.keys() and all(
        torch.equal(v, b[k]) if isinstance(v, torch.Tensor) else v == b[k] for k, v in a.items()
    )


def message(call, *args, **kwargs):
    """The complaint of a call, which is one line that begins with a file or says what failed."""
    with pytest.raises(CheckpointError) as caught:
        call(*args, **kwargs)
    assert "\n" not in str(caught.value)
    return str(caught.value)


def python(code, **kwargs):
    return subprocess.Popen(
        ready([sys.executable, "-c", code]),
        cwd=ROOT,
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        **kwargs,
    )


def rezip(source, target, change=lambda name, data: data, compression=zipfile.ZIP_STORED):
    with zipfile.ZipFile(source) as old, zipfile.ZipFile(target, "w", compression) as new:
        for name in old.namelist():
            new.writestr(name, change(name, old.read(name)))
    return target


class Evil:
    def __init__(self, folder):
        self.command = f"touch {folder}/executed"

    def __reduce__(self):
        return os.system, (self.command,)


# --- writing ---------------------------------------------------------------------------------------------------------


def test_save_and_load_leave_exactly_one_file(tmp_path):
    path = save(STATE, tmp_path / "a" / "b" / "last.ckpt")
    assert os.listdir(path.parent) == ["last.ckpt"]
    assert same(read_checkpoint(path), STATE)
    assert same(torch.load(path, weights_only=True), STATE)
    (tmp_path / "other").touch()
    assert path.stat().st_mode == (tmp_path / "other").stat().st_mode  # as any other file, not private to its owner


def test_name_outside_ascii_and_relative_path(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    save(STATE, "größe.ckpt")
    assert os.listdir() == ["größe.ckpt"]
    assert same(read_checkpoint("größe.ckpt"), STATE)


def test_through_fabric(tmp_path):
    fabric = Fabric(accelerator="cpu", plugins=[AtomicCheckpointIO()])
    model = torch.nn.Linear(2, 1)
    fabric.save(tmp_path / "a.ckpt", {"model": model, "epoch": 3})
    other = torch.nn.Linear(2, 1)
    assert fabric.load(tmp_path / "a.ckpt", {"model": other}) == {"epoch": 3}
    assert torch.equal(other.weight, model.weight)


def test_remove(tmp_path):
    path = save(STATE, tmp_path / "a.ckpt")
    AtomicCheckpointIO().remove_checkpoint(path)
    AtomicCheckpointIO().remove_checkpoint(path)
    assert os.listdir(tmp_path) == []


def test_storage_options_are_refused(tmp_path):
    with pytest.raises(TypeError, match="has no storage_options: leave them out"):
        AtomicCheckpointIO().save_checkpoint({}, tmp_path / "a.ckpt", storage_options={"a": 1})


def failing(real, n, code):
    """The n-th call fails with the error `code`, or writes half ("short"), or kills the process ("kill")."""
    count = [0]

    def call(*args, **kwargs):
        count[0] += 1
        if count[0] != n:
            return real(*args, **kwargs)
        if code == "short":
            return real(args[0], args[1][: (len(args[1]) + 1) // 2])
        raise OSError(code, os.strerror(code))

    return call


CAUSES = {
    errno.ENOSPC: "the disk is full",
    errno.EIO: "the disk reports an input/output error",
    errno.EACCES: "no permission to write there",
    errno.EDQUOT: "the disk quota is used up",
    errno.EMFILE: "Too many open files",
}


@pytest.mark.parametrize("code", CAUSES)
@pytest.mark.parametrize("operation", ["open", "write", "fsync", "replace"])
def test_failed_save_keeps_the_old_file_and_names_the_cause(tmp_path, monkeypatch, operation, code):
    path = save(STATE, tmp_path / "last.ckpt")
    before = path.read_bytes()
    with monkeypatch.context() as patch:
        patch.setattr(storage._fs, operation, failing(getattr(storage._fs, operation), 1, code))
        with pytest.raises(CheckpointError) as caught:
            save({"w": torch.zeros(9)}, path)
    assert str(caught.value) == (
        f"could not save '{path}': {CAUSES[code]}; the old file is unchanged. Mend that, or save to another folder."
    )
    assert isinstance(caught.value.__cause__, OSError)
    assert caught.value.__cause__.errno == code
    assert os.listdir(tmp_path) == ["last.ckpt"]
    assert path.read_bytes() == before


@pytest.mark.parametrize("code", [errno.ENOSPC, "short"])
def test_every_single_write_may_fail_or_be_short(tmp_path, monkeypatch, code):
    path, real = save({"old": 1}, tmp_path / "last.ckpt"), storage._fs.write
    monkeypatch.setattr(storage, "BUFFER", 1)  # each of torch's pieces by itself
    for n in range(1, 1000):
        calls = failing(real, n, code)
        monkeypatch.setattr(storage._fs, "write", calls)
        try:
            save(STATE, path)
        except CheckpointError as error:
            assert "the disk is full; the old file is unchanged" in str(error)  # noqa: PT017
            assert read_checkpoint(path) == {"old": 1}
        else:
            assert same(read_checkpoint(path), STATE)
            if calls.__closure__[1].cell_contents[0] < n:  # the failure was not reached: swept all
                break
        assert os.listdir(tmp_path) == ["last.ckpt"]
    assert n > 20


def test_a_first_file_that_cannot_be_renamed_tells_its_own_cause(tmp_path, monkeypatch):
    """Not that there is nothing under its name."""
    monkeypatch.setattr(storage._fs, "replace", failing(os.replace, 1, errno.EACCES))
    with pytest.raises(CheckpointError, match="no permission to write there"):
        save({"a": 1}, tmp_path / "last.ckpt")
    assert list(tmp_path.iterdir()) == []


def test_folder_that_cannot_be_synced(tmp_path, monkeypatch):
    monkeypatch.setattr(storage._fs, "fsync", failing(os.fsync, 2, errno.EIO))
    assert message(save, STATE, tmp_path / "last.ckpt") == (
        f"saved '{tmp_path}/last.ckpt', but its folder could not be synced: the disk reports an input/output error; "
        "the file may not survive a power cut. Save again, or to another disk."
    )
    assert same(read_checkpoint(tmp_path / "last.ckpt"), STATE)
    monkeypatch.setattr(storage._fs, "fsync", failing(os.fsync, 2, errno.EINVAL))  # a file system without folder sync
    save(STATE, tmp_path / "last.ckpt")


def test_interrupt_is_not_hidden_and_leaves_nothing(tmp_path, monkeypatch):
    def interrupt(*args):
        raise KeyboardInterrupt

    monkeypatch.setattr(storage._fs, "write", interrupt)
    with pytest.raises(KeyboardInterrupt):
        save(STATE, tmp_path / "a.ckpt")
    assert os.listdir(tmp_path) == []


def test_what_cannot_be_pickled(tmp_path):
    text = message(save, {"f": lambda: None}, tmp_path / "a.ckpt")
    assert text.startswith(f"could not save '{tmp_path}/a.ckpt': ")
    assert text.endswith("; nothing was written. Mend that, or save to another folder.")
    assert os.listdir(tmp_path) == []


def test_target_is_a_folder_and_parent_is_a_file(tmp_path):
    (tmp_path / "folder").mkdir()
    assert message(save, STATE, tmp_path / "folder") == (
        f"could not save '{tmp_path}/folder': a folder has this name. Give the path of a file."
    )
    assert "a folder has this name" in message(save, STATE, "")
    (tmp_path / "file").touch()
    assert "could not save" in message(save, STATE, tmp_path / "file" / "a.ckpt")


def test_stale_temporary_files_go_and_living_ones_stay(tmp_path):
    stale, other = tmp_path / ".last.ckpt.1.0123abcd.tmp", tmp_path / ".best.ckpt.1.0123abcd.tmp"
    stale.write_bytes(b"half")
    other.write_bytes(b"half")
    code = "import os, fcntl, sys; f = os.open(sys.argv[1], os.O_CREAT | os.O_WRONLY); fcntl.flock(f, 2); "
    living = tmp_path / ".last.ckpt.2.0123abcd.tmp"
    with subprocess.Popen(
        [sys.executable, "-c", code + "print(1, flush=True); input()", living], stdin=-1, stdout=-1, text=True
    ) as holder:
        holder.stdout.readline()
        save(STATE, tmp_path / "last.ckpt")
        assert sorted(os.listdir(tmp_path)) == sorted([other.name, living.name, "last.ckpt"])
        holder.communicate("\n")
    save(STATE, tmp_path / "last.ckpt")
    assert sorted(os.listdir(tmp_path)) == sorted([other.name, "last.ckpt"])


@pytest.mark.parametrize("n", [1, 9, 30])
def test_sigkill_during_a_save_leaves_the_old_file(tmp_path, n):
    path = save(STATE, tmp_path / "last.ckpt")
    code = f"""
import os, signal, torch
from fabric_template.files import storage
real, count = os.write, [0]
def write(fd, data):
    count[0] += 1
    if count[0] == {n}:
        real(fd, data[:1])
        os.kill(os.getpid(), signal.SIGKILL)
    return real(fd, data)
storage.BUFFER, storage._fs.write = 1, write
storage.AtomicCheckpointIO().save_checkpoint({{"w": torch.ones(9), "v": torch.ones(9)}}, {str(path)!r})
"""
    with python(code) as process:
        assert process.wait() == -signal.SIGKILL
    assert len(os.listdir(tmp_path)) == 2
    assert same(read_checkpoint(path), STATE)
    save({"n": 2}, path)
    assert os.listdir(tmp_path) == ["last.ckpt"]


# --- reading: damage -------------------------------------------------------------------------------------------------


def test_truncated_anywhere(tmp_path):
    raw, cut = save(STATE, tmp_path / "a.ckpt").read_bytes(), tmp_path / "cut.ckpt"
    for size in [*range(0, 8), *range(8, len(raw), 23), *range(len(raw) - 80, len(raw))]:
        cut.write_bytes(raw[:size])
        assert f"'{cut}' is " in message(verify_checkpoint, cut), size
        message(read_checkpoint, cut)


def test_flipped_bits_are_found_or_harmless(tmp_path):
    raw, bad = save(STATE, tmp_path / "a.ckpt").read_bytes(), tmp_path / "bad.ckpt"
    found = 0
    for i, offset in enumerate(range(0, len(raw), 3)):
        altered = bytearray(raw)
        altered[offset] ^= 1 << i % 8
        bad.write_bytes(altered)
        try:
            verify_checkpoint(bad)
        except CheckpointError:
            found += 1
        else:
            assert same(read_checkpoint(bad), STATE), offset
    assert found > len(raw) // 3 // 3  # about half of a small file is padding and dates


def test_flipped_tensor_byte_names_the_part(tmp_path):
    path = save({"w": torch.full((100,), 7.0)}, tmp_path / "a.ckpt")
    raw = bytearray(path.read_bytes())
    raw[raw.index(struct.pack("<f", 7.0) * 100) + 200] ^= 1
    path.write_bytes(raw)
    assert message(read_checkpoint, path) == (
        f"'{path}' is damaged or no checkpoint: the checksum of its part 'archive/data/0' is wrong. "
        "Use another file, or save it again."
    )


def test_part_marked_as_a_folder_is_refused(tmp_path):
    """One bit of the zip directory: torch.load then returns whatever was in memory, without a word."""
    raw, path = save({"w": torch.arange(5.0)}, tmp_path / "a.ckpt").read_bytes(), tmp_path / "bad.ckpt"
    entries = [i for i in range(len(raw)) if raw.startswith(b"PK\x01\x02", i)]
    assert len(entries) > 4
    for entry in entries:
        altered = bytearray(raw)
        altered[entry + 38] |= 0x10
        path.write_bytes(altered)
        assert "its directory is not one that torch.save writes" in message(verify_checkpoint, path)


def test_missing_and_folder_list_what_is_there(tmp_path):
    for name in ("b.ckpt", "a.pt", "notes.txt"):
        (tmp_path / name).touch()
    assert message(read_checkpoint, tmp_path / "x.ckpt") == (
        f"Checkpoint file not found: {tmp_path}/x.ckpt; in '{tmp_path}' there are: a.pt, b.ckpt."
    )
    assert message(verify_checkpoint, tmp_path) == (
        f"'{tmp_path}' is a folder, not a file; in '{tmp_path}' there are: a.pt, b.ckpt."
    )
    for i in range(6):
        (tmp_path / f"c{i}.ckpt").touch()
    assert message(verify_checkpoint, tmp_path).endswith("a.pt, b.ckpt, c0.ckpt, c1.ckpt, c2.ckpt and 3 more.")
    assert "Checkpoint file not found: " in message(read_checkpoint, tmp_path / "no" / "x.ckpt")
    (tmp_path / "empty").mkdir()
    assert "there are no checkpoints in" in message(read_checkpoint, tmp_path / "empty" / "x.ckpt")


def test_empty_pipe_and_text(tmp_path):
    path = tmp_path / "a.ckpt"
    path.touch()
    assert message(read_checkpoint, path) == f"'{path}' is empty: use another file."
    path.write_text("hello there")
    assert "it starts with b'hell', a torch file with b'PK\\x03\\x04'" in message(read_checkpoint, path)
    os.mkfifo(tmp_path / "pipe")
    assert "is not a regular file" in message(read_checkpoint, tmp_path / "pipe")
    assert "not a usable" not in message(read_checkpoint, "a\0b")


@pytest.mark.parametrize("url", ["http://x.org/a.ckpt", "s3://bucket/a", "file:///tmp/a", Path("https://x.org/a.ckpt")])
def test_urls_are_refused(url):
    for call in (read_checkpoint, verify_checkpoint, lambda path: save({}, path)):
        assert message(call, url) == (
            f"'{url}' is a URL; only local files are opened here: download it first and give the path."
        )


def call_in_pickle(function, number):
    return b"\x80\x02}X\x01\x00\x00\x00ac" + function + b"\nJ" + struct.pack("<i", number) + b"\x85Rs."


@pytest.mark.parametrize("kind", ["zip", "old torch", "pickle 2", "pickle 4"])
def test_malicious_pickle_is_refused_and_not_run(tmp_path, kind):
    path, state = tmp_path / "evil.ckpt", {"state_dict": Evil(tmp_path)}
    if kind.startswith("pickle"):
        path.write_bytes(pickle.dumps(state, protocol=int(kind[-1])))
    else:
        torch.save(state, path, _use_new_zipfile_serialization=kind == "zip")
    text = message(read_checkpoint, path)
    assert ("posix.system" if kind == "zip" else "an old-style pickle, which can run any program") in text
    assert text.endswith("; refused. If you know who wrote it, give trusted=True, and save it again from there.")
    if kind != "zip":
        assert message(verify_checkpoint, path) == text
    assert not (tmp_path / "executed").exists()
    if kind.startswith("pickle"):
        return  # nothing that torch ever wrote
    with pytest.warns(UserWarning, match="which can run any program; loaded all the same, because of trusted=True"):
        read_checkpoint(path, trusted=True)
    assert (tmp_path / "executed").exists()  # the check can fail: this file does run a program


def test_unknown_module_is_not_imported(tmp_path):
    path = tmp_path / "a.ckpt"
    rezip(
        save(STATE, path),
        tmp_path / "b.ckpt",
        lambda name, data: call_in_pickle(b"antigravity\nfly", 1) if name.endswith("data.pkl") else data,
    )
    assert "wants the class or function antigravity.fly" in message(read_checkpoint, tmp_path / "b.ckpt")
    assert "antigravity" not in sys.modules


def test_old_torch_format(tmp_path):
    path = tmp_path / "old.pth"
    torch.save(STATE, path, _use_new_zipfile_serialization=False)
    assert "is an old-style pickle, which can run any program" in message(read_checkpoint, path)
    with pytest.warns(UserWarning, match="old.pth' is an old-style pickle"):
        assert same(read_checkpoint(path, trusted=True), STATE)
    with pytest.warns(UserWarning, match="old.pth' is an old-style pickle"):
        assert same(AtomicCheckpointIO().load_checkpoint(path, weights_only=False), STATE)
    message(AtomicCheckpointIO().load_checkpoint, path)


def test_trusted_is_silent_when_it_is_not_needed(tmp_path):
    path = save(STATE, tmp_path / "a.ckpt")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert same(read_checkpoint(path, trusted=True), STATE)


def test_pickled_module_and_newer_protocol_need_trust(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save({"net": torch.nn.Linear(1, 1)}, path)
    assert "wants the class or function torch.nn.modules.linear.Linear" in message(read_checkpoint, path)
    with pytest.warns(UserWarning, match="Linear"):
        assert isinstance(read_checkpoint(path, trusted=True)["net"], torch.nn.Linear)
    torch.save(STATE, path, pickle_protocol=4)
    verify_checkpoint(path)
    assert "wants more than plain values" in message(read_checkpoint, path)


def test_top_level_must_be_a_dict(tmp_path):
    torch.save([torch.ones(1)], tmp_path / "a.ckpt")
    assert message(read_checkpoint, tmp_path / "a.ckpt") == (
        f"'{tmp_path}/a.ckpt' holds a list, not a dict: save {{'state_dict': model.state_dict()}}."
    )


def test_what_users_allowed_before_stays_allowed(tmp_path):
    path = tmp_path / "a.ckpt"
    torch.save({"ns": argparse.Namespace(a=1)}, path)
    entry = (argparse.Namespace, "argparse.Namespace")
    with torch.serialization.safe_globals([entry]):
        assert read_checkpoint(path) == {"ns": argparse.Namespace(a=1)}
        assert entry in torch.serialization.get_safe_globals()
    assert read_checkpoint(path) == {"ns": argparse.Namespace(a=1)}
    assert entry not in torch.serialization.get_safe_globals()


class Lit(lightning.LightningModule):
    def __init__(self, lr=0.1, folder=None, options=None, sizes=(1, 2)):
        super().__init__()
        self.save_hyperparameters()
        self.layer = torch.nn.Linear(2, 1)

    def training_step(self, batch, batch_idx):
        loss = self.layer(batch).sum()
        self.log("train_loss", loss)
        return loss

    def configure_optimizers(self):
        optimizer = torch.optim.AdamW(self.parameters(), lr=self.hparams.lr)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@pytest.mark.filterwarnings("ignore")
def test_trainers_checkpoints_load_without_trust(tmp_path):
    from lightning.pytorch.callbacks import EarlyStopping, ModelCheckpoint, Timer

    module = Lit(folder=Path("data/x"), options=argparse.Namespace(a=1))
    trainer = lightning.Trainer(
        max_epochs=1, accelerator="cpu", logger=False, enable_progress_bar=False, enable_model_summary=False,
        default_root_dir=tmp_path,
        callbacks=[
            ModelCheckpoint(tmp_path, monitor="train_loss"), EarlyStopping("train_loss"), Timer(),
        ],
    )  # fmt: skip
    trainer.fit(module, torch.utils.data.DataLoader(torch.ones(2, 2)))
    trainer.save_checkpoint(tmp_path / "trainer.ckpt")
    checkpoint = read_checkpoint(tmp_path / "trainer.ckpt")
    assert checkpoint["hyper_parameters"]["folder"] == Path("data/x")
    assert checkpoint["hyper_parameters"]["options"] == argparse.Namespace(a=1)
    assert same(find_weights(checkpoint), module.state_dict())


# --- safetensors -----------------------------------------------------------------------------------------------------


def test_safetensors(tmp_path):
    save_file = pytest.importorskip("safetensors.torch").save_file
    path = tmp_path / "a.safetensors"
    save_file({"w": torch.arange(5.0)}, path, metadata={"format": "pt"})
    verify_checkpoint(path)
    checkpoint = read_checkpoint(path)
    assert list(checkpoint) == ["state_dict"]
    assert same(find_weights(checkpoint), {"w": torch.arange(5.0)})
    raw = path.read_bytes()
    for size in range(1, len(raw)):
        path.write_bytes(raw[:size])
        assert "is damaged or no checkpoint" in message(read_checkpoint, path)
    path.write_bytes(struct.pack("<Q", 2**60) + raw[8:])
    assert f"its header claims {2**60} bytes, the file has {len(raw)}" in message(read_checkpoint, path)
    path.write_bytes(raw.replace(b"F32", b"F99"))
    assert "could not be read" in message(read_checkpoint, path)


def test_safetensors_not_installed(tmp_path, monkeypatch):
    path = tmp_path / "a.safetensors"
    path.write_bytes(struct.pack("<Q", 2) + b"{}")
    monkeypatch.setitem(sys.modules, "safetensors.torch", None)
    assert message(read_checkpoint, path) == f"'{path}' needs the safetensors package: pip install safetensors."


# --- weights ---------------------------------------------------------------------------------------------------------

W, B = torch.ones(2, 1), torch.zeros(2)


@pytest.mark.parametrize(
    ("checkpoint", "keys"),
    [
        ({"state_dict": {"a.w": W}, "epoch": 1}, ["a.w"]),
        ({"model": {"a.w": W}, "epoch": 1}, ["a.w"]),
        ({"model_state_dict": {"a.w": W}}, ["a.w"]),
        ({"a.w": W, "b": B}, ["a.w", "b"]),
        ({"state_dict": {}}, []),
        ({"state_dict": {"a.w": W, "_extra_state": 3}}, ["a.w", "_extra_state"]),
        ({"model": {"module.a": W, "module.b": B}}, ["a", "b"]),
        ({"model": {"module.a": W, "b": B}}, ["module.a", "b"]),
        ({"_orig_mod.a": W, "b": B}, ["a", "b"]),
        ({"model._orig_mod.a": W, "model.b": B}, ["model.a", "model.b"]),
        ({"_forward_module.a": W, "_forward_module.b": B}, ["a", "b"]),
        ({"_forward_module.module._orig_mod.a": W}, ["a"]),
        ({"_orig_mod.module.a": W}, ["a"]),
        ({"a._orig_mod.w": W, "a.w": B}, ["a._orig_mod.w", "a.w"]),
    ],
)
def test_find_weights(checkpoint, keys):
    assert list(find_weights(checkpoint)) == keys


def test_find_weights_leaves_the_models_own_names():
    weights = {"module.weight": W, "module.bias": B}
    assert list(find_weights(weights, expected=weights)) == list(weights)
    assert list(find_weights({"module.module.weight": W}, expected=["module.weight"])) == ["module.weight"]
    assert list(find_weights({"_orig_mod.w": W}, expected=["_orig_mod.w"])) == ["_orig_mod.w"]


@pytest.mark.parametrize(
    ("checkpoint", "named"), [({"epoch": 1, "note": "x"}, "epoch, note"), ({}, "nothing"), ({1: W}, "1")]
)
def test_no_weights(checkpoint, named):
    assert message(find_weights, checkpoint) == (
        f"no weights found: the checkpoint's keys are {named}. Expected a dict of tensors under 'state_dict' or "
        "'model', or nothing but tensors: save {'state_dict': model.state_dict()}."
    )


def test_explain_mismatch():
    assert explain_mismatch({"a": W}, {"a": W + 1}) is None
    assert explain_mismatch({"a": W, "e": 1}, {"a": W, "e": None}) is None
    assert explain_mismatch({"a": W}, {"a": B}) == "1 difference: 'a' has shape (2,) in the file, (2, 1) in the model"
    assert explain_mismatch({"a": W, "b": W, "c": W}, {"c": B, "d": W, "e": W}) == (
        "5 differences: missing 'a'; missing 'b'; unexpected 'd'; and 2 more"
    )
    assert (
        explain_mismatch(dict.fromkeys("abcd", W), {})
        == "4 differences: missing 'a'; missing 'b'; missing 'c'; and 1 more"
    )


# --- names -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "name"),
    [
        ("val_loss=0.25", "val_loss=0.25"), ("epoch=3-step=7", "epoch=3-step=7"), (1e-05, "1e-05"), ("1e+05", "1e+05"),
        ("val/acc", "val_acc"), ("../../etc/passwd", "_.._etc_passwd"), ("", "_"), (".", "_"), ("..", "_"),
        (".hidden", "hidden"), ("a\0b\nc", "a_b_c"), ("größe", "gr__e"), ("x" * 200, "x" * 100), (float("nan"), "nan"),
        ("$(rm -rf ~)", "__rm_-rf___"), ("a\\b:c", "a_b_c"),
    ],
)  # fmt: skip
def test_safe_name(text, name):
    assert safe_name(text) == name


@given(st.text(max_size=150))
@settings(max_examples=100, deadline=None)
def test_safe_name_of_anything(text):
    name = safe_name(text)
    assert 1 <= len(name) <= 100
    assert name[0] != "."
    assert Path("folder", name).parent == Path("folder")


def test_inside(tmp_path):
    folder = tmp_path / "run"
    (folder / "sub").mkdir(parents=True)
    assert inside(folder, "a.ckpt") == (folder / "a.ckpt").resolve()
    assert inside(folder, "sub/../a.ckpt") == (folder / "a.ckpt").resolve()
    assert inside(folder, folder / "a.ckpt") == (folder / "a.ckpt").resolve()
    (folder / "link").symlink_to(tmp_path)
    (folder / "loop").symlink_to(folder / "loop")
    (tmp_path / "run2").mkdir()
    for path in ("../a.ckpt", "/etc/passwd", "link/a.ckpt", "../run2/a.ckpt", tmp_path):
        assert f"'{path}' leads out of '{folder.resolve()}' to '" in message(inside, folder, path)
    assert "is not a usable path" in message(inside, folder, "a\0b")


# --- locks -----------------------------------------------------------------------------------------------------------


def test_lock_between_processes_and_after_a_kill(tmp_path):
    folder = tmp_path / "version_0"
    code = f"""
import os
from fabric_template.files.locks import one_writer
lock = one_writer([{str(folder)!r}])
lock.__enter__()
print(os.getpid(), flush=True)
input()
"""
    with python(code) as holder:
        pid = int(holder.stdout.readline())
        assert message(one_writer([folder]).__enter__) == (
            f"'{folder}' is being written by another run (process {pid}): give this one another name=... or "
            "version=..., or stop the other."
        )
        with one_writer([tmp_path / "version_1"]):
            pass
        os.kill(pid, signal.SIGKILL)
        holder.wait()
    with one_writer([folder]):
        message(one_writer([folder]).__enter__)
        message(one_writer([folder]).__enter__)  # a try that fails takes nothing from the holder
    with one_writer([folder]):
        pass


def test_a_forked_worker_does_not_keep_the_lock(tmp_path):
    code = f"""
import os, time
from fabric_template.files.locks import one_writer
lock = one_writer([{str(tmp_path)!r}])
lock.__enter__()
if os.fork() == 0:
    print(os.getppid(), os.getpid(), flush=True)  # by now it has dropped what it must not keep
time.sleep(10_000)
os._exit(0)
"""
    with python(code) as process:
        holder, child = map(int, process.stdout.readline().split())
        os.kill(holder, signal.SIGKILL)
        process.wait()
        try:
            with one_writer([tmp_path]):
                pass
        finally:
            os.kill(child, signal.SIGKILL)


def test_lock_without_permission_or_without_locks(tmp_path, monkeypatch):
    (tmp_path / "file").touch()
    assert f"could not lock '{tmp_path}/file'" in message(one_writer([tmp_path / "file"]).__enter__)
    monkeypatch.setattr(locks, "fcntl", None)
    with pytest.warns(UserWarning, match="cannot be locked"), one_writer([tmp_path]), one_writer([tmp_path]):
        save(STATE, tmp_path / "a.ckpt")


def test_examples_in_the_docstrings(tmp_path, monkeypatch):
    import doctest

    from fabric_template.files import reading

    monkeypatch.chdir(tmp_path)
    results = [doctest.testmod(module) for module in (storage, locks, reading)]
    assert sum(result.failed for result in results) == 0
    assert sum(result.attempted for result in results) > 12


def test_reads_while_another_process_replaces(tmp_path):
    path = save({"w": torch.zeros(100_000)}, tmp_path / "a.ckpt")

    def write():
        for i in range(60):
            AtomicCheckpointIO().save_checkpoint({"w": torch.full((100_000,), float(i))}, path)

    process = multiprocessing.get_context("fork").Process(target=write)
    process.start()
    while process.exitcode is None:
        weights = read_checkpoint(path)["w"]
        assert torch.equal(weights, weights[:1].expand_as(weights))
    assert process.exitcode == 0


def test_bytes_written_are_plain_torch(tmp_path):
    buffer = io.BytesIO()
    torch.save(STATE, buffer)
    assert len(save(STATE, tmp_path / "a.ckpt").read_bytes()) == len(buffer.getvalue())
