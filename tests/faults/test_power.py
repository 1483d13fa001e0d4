"""A power cut at any moment loses no save that had returned; and each check of this folder fails where it should.

The mutants are faults put in on purpose, one at a time. One that no check notices is a hole in the checks.
"""

import os
import random
import re
from contextlib import suppress

import numpy as np
import power
import pytest
import torch
from fabric_template.exact import randomness
from fabric_template.files import disk
from fabric_template.record.tables import Table
from victim import BEST, difference, end_of, train, without_names

WORDS = {"max_epochs": 2, "limit_train_batches": 6, "save_every_n_steps": 2}
pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # of runs that find damaged files; what they say is asserted elsewhere


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return power.record(tmp_path_factory.mktemp("power") / "run", **WORDS)


def complaints(recorded, tmp_path, *kinds):
    """What is wrong after the cuts of these kinds."""
    whole, states = recorded
    for state in states:
        if state.kind in kinds and (problem := power.check(whole, state, tmp_path / "cut", **WORDS)):
            yield f"{state.kind}, {state.moment}: {problem}"


def test_no_cut_loses_anything(recorded, tmp_path):
    assert {state.kind for state in recorded[1]} == set(power.KINDS)
    assert max(state.saved for state in recorded[1]) == 6
    whole, states = recorded
    few = [state for i, state in enumerate(states) if i % 5 == 0 or state.kind in ("nothing", "names")]
    assert list(complaints((whole, few), tmp_path, *power.KINDS)) == []


# ---- mutants


def test_mutant_nothing_is_synced(tmp_path, monkeypatch):
    monkeypatch.setattr(disk.fs, "fsync", lambda fd: None)
    recorded = power.record(tmp_path / "run", **WORDS)
    assert re.search("was saved, that of step|damaged|empty", next(complaints(recorded, tmp_path, "nothing", "names")))


def test_mutant_files_are_synced_and_folders_are_not(tmp_path, monkeypatch):
    monkeypatch.setattr(disk, "fsync_folder", lambda folder: None)
    monkeypatch.setattr("fabric_template.checkpoint.checkpoint_io.fsync_folder", lambda folder: None)
    recorded = power.record(tmp_path / "run", **WORDS)
    assert "was saved, that of step None is there" in next(complaints(recorded, tmp_path, "nothing"))


def test_mutant_renamed_before_it_is_written(tmp_path, monkeypatch):
    def open_under_the_last_name(path, flags, mode=0o777):
        fd = os.open(path, flags, mode)
        if str(path).endswith(".tmp"):
            target = re.sub(r"\.([\w.]+)\.\d+\.\w{8}\.tmp$", r"\1", str(path))
            with suppress(FileNotFoundError):
                os.unlink(target)
            os.link(path, target)
        return fd

    monkeypatch.setattr(disk.fs, "open", open_under_the_last_name)
    monkeypatch.setattr(disk.fs, "replace", lambda source, target: os.unlink(source))
    recorded = power.record(tmp_path / "run", **WORDS)
    monkeypatch.undo()
    monkeypatch.chdir(tmp_path)
    assert re.search("was saved, that of step|damaged|empty", next(complaints(recorded, tmp_path, "killed")))


@pytest.mark.parametrize(
    ("library", "another"), [("torch", torch.Generator()), ("python", random.Random()), ("numpy", np.random.RandomState())],
    ids=["torch", "python", "numpy"],
)  # fmt: skip
def test_mutant_random_numbers_forgotten(recorded, tmp_path, monkeypatch, library, another):
    monkeypatch.setitem(randomness.LIBRARIES, library, another)
    next(complaints(recorded, tmp_path, "killed"))


def test_mutant_tables_are_not_cut_back(recorded, tmp_path, monkeypatch):
    monkeypatch.setattr(Table, "rewind", lambda self, *position, **words: None)
    assert "csv" in next(complaints(recorded, tmp_path, "killed"))


def test_the_comparison_sees_every_kind_of_difference(tmp_path):
    train(tmp_path / "one", **WORDS)
    whole = end_of(tmp_path / "one")
    assert sorted(whole) == [
        "checkpoints/best.ckpt", "checkpoints/last.ckpt",
        "logs/config.yaml", "logs/hparams.yaml", "logs/metrics.csv", "logs/steps.csv",
    ]  # fmt: skip
    train(tmp_path / "other", **{**WORDS, "gradient_clip_val": 1e-3})
    assert difference(whole, end_of(tmp_path / "other")) is not None
    with open(tmp_path / "one/logs/run/version_0/metrics.csv", "a") as file:
        file.write("7,7\n" * 2)
    assert difference(whole, end_of(tmp_path / "one")) is not None
    (tmp_path / "one/logs/run/version_0/metrics.csv").unlink()
    assert "instead of" in difference(whole, end_of(tmp_path / "one"))
    assert "checkpoints/best.ckpt" not in without_names(whole, BEST)
