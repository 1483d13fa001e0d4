"""Test that a power cut loses no completed save, and that the check finds planted faults."""

import os
import re
import sys

import power
import pytest

from fabric_template import files
from fabric_template.checkpoint import restore, run_folders
from fabric_template.loggers.csv_logger import CSVLogger

OPTIONS = {"max_epochs": 2, "limit_train_batches": 6, "save_every_n_steps": 2}
pytestmark = [
    pytest.mark.filterwarnings("ignore"),
    pytest.mark.skipif(
        sys.version_info < (3, 11), reason="pathlib does not call the replaced functions in Python 3.10"
    ),
]


@pytest.fixture(scope="module")
def recorded(tmp_path_factory):
    return power.record(tmp_path_factory.mktemp("power") / "run", **OPTIONS)


def find_problems(recorded, tmp_path, *kinds):
    """Simulate power cuts of the given kinds, and yield a description of each problem."""
    whole, states = recorded
    for one in states:
        if one.kind in kinds and (problem := power.check(whole, one, tmp_path / "cut", **OPTIONS)):
            yield f"{one.kind}, {one.moment}: {problem}"


def test_a_power_cut_loses_no_saved_checkpoint_or_csv_row(recorded, tmp_path):
    whole, states = recorded
    assert {one.kind for one in states} == set(power.KINDS)
    assert max(one.saved for one in states) == 6
    few = [one for number, one in enumerate(states) if number % 29 == 0 or one.kind == "nothing"]
    assert list(find_problems((whole, few), tmp_path, *power.KINDS)) == []


class WithoutSync:
    """The module os with an fsync() that does nothing."""

    def __getattr__(self, name):
        return getattr(os, name)

    def fsync(self, descriptor):
        pass


def test_the_power_cut_check_fails_if_files_are_not_synced_with_fsync(tmp_path, monkeypatch):
    monkeypatch.setattr(files, "os", WithoutSync())
    recorded = power.record(tmp_path / "run", **OPTIONS)
    assert re.search(
        "was saved, but the disk has step|damaged|empty", next(find_problems(recorded, tmp_path, "nothing", "names"))
    )


def test_the_power_cut_check_fails_if_folders_are_not_synced_with_fsync(tmp_path, monkeypatch):
    for module in (files, run_folders):
        monkeypatch.setattr(module, "sync_folder", lambda folder: None)
    recorded = power.record(tmp_path / "run", **OPTIONS)
    assert "was saved, but the disk has step None" in next(find_problems(recorded, tmp_path, "nothing"))


@pytest.mark.parametrize("mutant", ["random numbers", "CSV rows"])
def test_the_power_cut_check_fails_if_random_numbers_or_csv_rows_are_not_restored(
    recorded, tmp_path, monkeypatch, mutant
):
    if mutant == "CSV rows":
        monkeypatch.setattr(CSVLogger, "rewind", lambda self, *position: [])
    else:
        monkeypatch.setattr(restore, "restore_rng_state", lambda state: None)
    # Skip the disk states from before the first checkpoint, from which a run starts from scratch.
    whole, states = recorded
    next(find_problems((whole, states[len(states) // 2 :]), tmp_path, "killed"))
