"""Test unusable folders, symlinks in place of files, and names with special characters."""

import os
import re

import pytest
from modules import make_loader
from runs import Plain, fit, tree

from fabric_template.checkpoint.distributed import remove_checkpoint
from fabric_template.errors import ConfigurationError
from fabric_template.files import claim_version, next_version, replaced_file


def link(path):
    path.symlink_to("/no/such/disk")


def loop_of_links(path):
    path.symlink_to(path.name)


def file(path):
    path.write_text("mine")


@pytest.mark.parametrize("version", [None, 0, "best"])
@pytest.mark.parametrize("place", ["logs", "logs/run", "checkpoints", "checkpoints/run"])
@pytest.mark.parametrize("make", [link, loop_of_links, file])
def test_a_broken_link_or_a_file_in_place_of_a_folder_is_refused(tmp_path, make, place, version):
    path = tmp_path / place
    path.parent.mkdir(exist_ok=True)
    make(path)
    with pytest.raises(ConfigurationError, match=r"default_root_dir: got .*expected a writable folder") as caught:
        fit(tmp_path, Plain, make_loader, max_epochs=1, version=version)
    if make is link:
        assert f"'{path}' is a link to '/no/such/disk', which does not exist." in str(caught.value)
    assert not list(tmp_path.rglob("*.ckpt"))


@pytest.mark.parametrize("make", [link, file])
def test_a_new_run_skips_a_version_number_used_by_a_link_or_a_file(tmp_path, make):
    folder = tmp_path / "logs/run"
    folder.mkdir(parents=True)
    make(folder / "version_4")
    loop, _, _ = fit(tmp_path, Plain, make_loader, max_epochs=1)
    assert loop.checkpoint_dir.name == "version_5"


def test_next_version_ignores_folders_whose_names_contain_no_version_number(tmp_path):
    for name in ("version_3", "version_²", "version_٣٤", "version_12b", "version_-7", "Version_9", "version_"):
        (tmp_path / name).mkdir()
    assert next_version(tmp_path, tmp_path / "missing") == 4
    assert claim_version(tmp_path) == 4
    # "version_²" must count as a name without a number, because int() refuses the digit "²".
    fit(tmp_path, Plain, make_loader, max_epochs=1, version="version_²")
    assert fit(tmp_path, Plain, make_loader, max_epochs=2, resume="last")[0].current_epoch == 2


def test_writing_a_temporary_file_does_not_follow_a_symlink(tmp_path):
    victim, target = tmp_path / "victim", tmp_path / "last.ckpt"
    victim.write_bytes(b"mine")
    temporary = tmp_path / f".last.ckpt.{os.getpid()}.tmp"
    temporary.symlink_to(victim)
    with replaced_file(target) as opened:
        opened.write(b"new")
    assert (victim.read_bytes(), target.read_bytes()) == (b"mine", b"new")
    assert not os.path.lexists(temporary)


def test_writing_a_lock_file_does_not_follow_a_symlink(tmp_path):
    victim, folder = tmp_path / "victim", tmp_path / "checkpoints/run/version_0"
    victim.write_bytes(b"mine")
    folder.mkdir(parents=True)
    (folder / ".lock").symlink_to(victim)
    with pytest.warns(UserWarning, match="cannot be locked"):
        fit(tmp_path, Plain, make_loader, max_epochs=1, version=0)
    assert victim.read_bytes() == b"mine"


@pytest.mark.parametrize("name", ["model[1].ckpt", "a*.ckpt", "what?.ckpt", "[!x].ckpt"])
def test_removing_a_checkpoint_removes_only_its_own_shards(tmp_path, name):
    """As a glob pattern, the checkpoint's name would match the folders of other checkpoints."""
    others = ["model1.ckpt.step=5", "abc.ckpt.step=5", "whats.ckpt.step=5", "y.ckpt.step=5"]
    for folder in (*others, f"{name}.step=5"):
        (tmp_path / folder).mkdir()
        (tmp_path / folder / "0.distcp").write_text("shard")
    (tmp_path / name).write_text("checkpoint")
    remove_checkpoint(tmp_path / name)
    assert tree(tmp_path) == sorted(f"{folder}/0.distcp" for folder in others)


class Odd(Plain):
    """A model that returns a metric whose name contains glob characters, path separators and quotes."""

    def validation_step(self, batch, batch_idx):
        loss, _ = super().validation_step(batch, batch_idx)
        return {'[a]*/..\\"%,ü\nx': loss}


@pytest.mark.parametrize("name", ["[1]", "a[b]c", "%s {0}", "ü ñ 漢字", "-x", "run.ckpt", "..."])
def test_a_run_whose_name_has_special_characters_resumes_exactly(tmp_path, name):
    monitor = 'val_[a]*/..\\"%,ü\nx'
    options = {"name": name, "version": f"{name}-0", "monitor": monitor, "mode": "min", "save_top_k": 2}
    root = tmp_path / "[x] *" / name
    whole = fit(root / "whole", Odd, make_loader, make_loader, max_epochs=2, **options)
    fit(root / "cut", Odd, make_loader, make_loader, max_epochs=1, **options)
    options["version"] = None
    loop, _, rows = fit(root / "cut", Odd, make_loader, make_loader, max_epochs=2, resume="last", **options)
    assert loop.checkpoint_dir.name == f"{name}-0"
    assert tree(root / "cut") == tree(root / "whole")
    assert rows.drop(columns=["time", "waiting"]).equals(whole[2].drop(columns=["time", "waiting"]))
    best = loop.checkpoint_path("best")
    assert best.parent == loop.checkpoint_dir
    assert re.fullmatch(r"epoch=\d-step=\d+-[\w.=+-]+\.ckpt", best.name)
