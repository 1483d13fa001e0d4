"""Test how CSVLogger writes rows, adds columns, returns to a saved position, and handles a full disk."""

import errno
import math
import os
import pickle
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest
import torch

from fabric_template.files import claim_version
from fabric_template.loggers import csv_logger
from fabric_template.loggers.csv_logger import CSVLogger
from fabric_template.loggers.read_logs import read_table


def files(folder):
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def epoch(number, **metrics):
    return {"epoch": number, "step": 10 * (number + 1), **metrics}


@pytest.fixture
def logger(tmp_path):
    return CSVLogger(tmp_path / "logs", name="digits")


@pytest.fixture
def metrics_csv(tmp_path):
    return tmp_path / "logs/digits/version_0/metrics.csv"


def test_the_csv_logger_writes_each_row_immediately(tmp_path, logger):
    logger.log_epoch({"epoch": 0, "step": 10, "val_loss": 0.5})
    assert files(tmp_path) == {"logs/digits/version_0/metrics.csv": b"epoch,step,val_loss\n0,10,0.5\n"}
    logger.log_epoch({"epoch": 1, "step": 20, "val_loss": 0.25})
    assert files(tmp_path) == {"logs/digits/version_0/metrics.csv": b"epoch,step,val_loss\n0,10,0.5\n1,20,0.25\n"}


def test_log_metrics_writes_step_values_to_steps_csv(tmp_path, logger):
    logger.log_metrics({"train_loss": torch.tensor(0.5), "epoch": 0}, step=49)
    logger.log_metrics({"train_loss": np.float64(0.25), "epoch": torch.tensor(0)}, step=99)
    logger.log_metrics({"train_loss": 1})
    logger.log_metrics({"train_loss": 2, "step": 7})
    expected = b"step,train_loss,epoch\n49,0.5,0\n99,0.25,0\n2,1,\n7,2,\n"
    assert files(tmp_path) == {"logs/digits/version_0/steps.csv": expected}


def test_metrics_csv_can_contain_numbers_booleans_text_and_empty_cells(logger, metrics_csv):
    row = {"f": 0.1, "i": 3, "b": True, "none": None, "nan": math.nan, "inf": -math.inf, "text": 'ünï, "x"'}
    logger.log_epoch(row)
    assert metrics_csv.read_text("utf-8") == 'f,i,b,none,nan,inf,text\n0.1,3,True,,nan,-inf,"ünï, ""x"""\n'
    with pytest.raises(ValueError, match=r"log 'acc': got a tensor of shape \(2,\), expected one number"):
        logger.log_epoch({"acc": torch.zeros(2)})


def test_the_csv_file_is_rewritten_only_when_a_column_is_added(logger, metrics_csv):
    logger.log_epoch(epoch(0, train_loss=1.0, val_loss=2.0))
    # Keep the file open, so that a new file cannot get the same inode.
    with metrics_csv.open("rb") as reader:
        inode = metrics_csv.stat().st_ino
        logger.log_epoch(epoch(1, train_loss=0.5))
        assert metrics_csv.stat().st_ino == inode
        logger.log_epoch(epoch(2, lr=0.1, train_loss=0.25))
        assert metrics_csv.stat().st_ino != inode
        assert len(reader.read().splitlines()) == 3
    expected = b"epoch,step,train_loss,val_loss,lr\n0,10,1.0,2.0,\n1,20,0.5,,\n2,30,0.25,,0.1\n"
    assert files(metrics_csv.parent) == {"metrics.csv": expected}


def test_the_csv_logger_appends_rows_to_the_files_of_an_existing_version(tmp_path, logger, metrics_csv):
    logger.log_epoch(epoch(0, loss=1.0))
    logger.finalize("success")
    logger.log_epoch(epoch(1, loss=0.5))
    # A second logger writes to the same file between two rows of the first logger.
    CSVLogger(tmp_path / "logs", name="digits", version=0).log_epoch(epoch(2, loss=0.25))
    logger.log_epoch(epoch(3, loss=0.125))
    pickle.loads(pickle.dumps(logger)).log_epoch(epoch(4, acc=1))
    logger.log_epoch(epoch(5))
    assert metrics_csv.read_bytes() == (
        b"epoch,step,loss,acc\n0,10,1.0,\n1,20,0.5,\n2,30,0.25,\n3,40,0.125,\n4,50,,1\n5,60,,\n"
    )
    metrics_csv.unlink()
    metrics_csv.parent.rmdir()
    logger.log_epoch(epoch(6))
    assert metrics_csv.read_bytes() == b"epoch,step\n6,70\n"


@pytest.mark.parametrize("tail", [b"2,3", b"2,30,0.1", b"2,30\n", b"\0\0\0\0\0", b"2,30,\xc3"])
def test_a_new_csv_logger_removes_an_incomplete_last_line(tmp_path, logger, metrics_csv, tail):
    logger.log_epoch(epoch(0, loss=1.0))
    complete = metrics_csv.read_bytes()
    metrics_csv.write_bytes(complete + tail)
    other = CSVLogger(tmp_path / "logs", name="digits", version=0)
    other.log_epoch(epoch(1, loss=0.5))
    assert metrics_csv.read_bytes() == complete + b"1,20,0.5\n"


def test_the_csv_logger_writes_rows_later_if_the_disk_was_full(tmp_path, logger, metrics_csv, monkeypatch):
    logger.log_epoch(epoch(0))

    def refuse(path, text):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with monkeypatch.context() as patch:
        patch.setattr(csv_logger, "to_lines", refuse)
        patch.setattr(csv_logger, "write_file", refuse)
        with pytest.warns(UserWarning, match=r"metrics\.csv: rows could not be written: No space left on device"):
            logger.log_epoch(epoch(1))
        logger.log_epoch(epoch(2, loss=0.5))
        logger.finalize("success")
    assert metrics_csv.read_bytes() == b"epoch,step\n0,10\n"
    logger.sync()
    assert metrics_csv.read_bytes() == b"epoch,step,loss\n0,10,\n1,20,\n2,30,0.5\n"


def log_everything(logger, epochs, saved, rows=()):
    """Log epochs. After each epoch, append (position of the logger, rows) to ``saved``."""
    rows = list(rows)
    for i in epochs:
        logger.log_metrics({"epoch": i, "train_loss": 1 / (i + 1)}, step=10 * i + 4)
        if i >= 2:
            logger.log_metrics({"epoch": i, "grad_norm": i / 3}, step=10 * i + 9)
        rows.append(epoch(i, val_loss=1 / (i + 3), **({"note": "late, one", "lr": 0.1} if i >= 1 else {})))
        logger.log_epoch(rows[-1])
        saved.append((logger.position(), list(rows)))


@pytest.mark.parametrize("saved_after", [0, 1, 2, 3])
@pytest.mark.parametrize("same_logger", [True, False])
@pytest.mark.parametrize("tail", [b"", b"2,30,0.1"])
def test_rewinding_a_csv_logger_and_logging_again_gives_the_same_files(tmp_path, saved_after, same_logger, tail):
    complete, broken, saved = CSVLogger(tmp_path / "complete"), CSVLogger(tmp_path / "broken"), []
    log_everything(complete, range(5), [])
    log_everything(broken, range(4), saved)
    torch.save(saved, tmp_path / "saved.pt")
    position, rows = torch.load(tmp_path / "saved.pt", weights_only=True)[saved_after]
    for path in tmp_path.rglob("broken/*/*/*.csv"):
        path.write_bytes(path.read_bytes() + tail)
    if not same_logger:
        broken = CSVLogger(tmp_path / "broken", version=0)
    broken.rewind(position)
    assert broken.position() == position
    log_everything(broken, range(saved_after + 1, 5), [], rows)
    assert files(tmp_path / "broken") == files(tmp_path / "complete")
    broken.rewind({})
    assert files(tmp_path / "broken") == {}


CELLS = ["1", "", "0.5", 'a "quoted" cell', "a,b", "two\nlines", '"', '""', "\n\n", " x ", "ü", "'", ";", "x" * 200_000]
CELLS += ["\r", "carriage\rreturn", "at the end\r", "\r\nboth\r\n"]


def test_read_table_returns_every_column_name_and_cell_unchanged(metrics_csv, logger):
    names = [cell for cell in CELLS if cell]
    for shift in range(len(CELLS)):
        logger.log_epoch({name: CELLS[(shift + i) % len(CELLS)] for i, name in enumerate(names)})
    found = read_table(metrics_csv)
    assert (found.columns, found.is_complete, found.damaged) == (names, True, [])
    expected = [[CELLS[(shift + i) % len(CELLS)] for i in range(len(names))] for shift in range(len(CELLS))]
    assert [list(row.values()) for row in found.rows] == expected


def lines_of(count):
    return ["epoch,step,loss,note", *(f"{i},{10 * i},{0.5**i},n{i}" for i in range(count))]


# Map each case to (a damaged line, the cells that read_table returns for it).
LINES = {
    "quote at the start": ('"3,30,0.125,n3', ["3", "30", "0.125", "n3"]),
    "quote at the end": ('3,30,0.125,n3"', ["3", "30", "0.125", "n3"]),
    "quote inside": ('3,30,0.1"25,n3', ["3", "30", '0.1"25', "n3"]),
    "two quotes": ('3,"30,0.125",n3', ["3", "30", "0.125", "n3"]),
    "three quotes": ('"3","30,0.125,n3', ["3", "30", "0.125", "n3"]),
    "long line": ('"' + "9" * 140_000 + ",30,0.125,n3", ["9" * 140_000, "30", "0.125", "n3"]),
    "missing cell": ("3,30,0.125", ["3", "30", "0.125"]),
    "extra cells": ("3,30,0.125,n3,5,6", ["3", "30", "0.125", "n3"]),
    "zero bytes": ("3,3\0\0\0000,0.125,n3", ["3", "30", "0.125", "n3"]),
    "text": ("look here!", ["look here!"]),
}


@pytest.mark.parametrize("name", LINES)
@pytest.mark.parametrize("end", ["\n", "\r\n"])
@pytest.mark.parametrize("start", ["", "\ufeff"])
def test_a_damaged_line_does_not_prevent_reading_the_other_lines(tmp_path, name, end, start):
    text, cells = LINES[name]
    lines = lines_of(8)
    lines[4] = text
    path = tmp_path / "steps.csv"
    path.write_bytes((start + "".join(line + end for line in lines)).encode())
    found = read_table(path)
    assert found.columns == ["epoch", "step", "loss", "note"]
    assert list(found.rows[3].values()) == cells
    assert [list(row.values()) for i, row in enumerate(found.rows) if i != 3] == [
        line.split(",") for i, line in enumerate(lines[1:]) if i != 3
    ]
    assert found.is_complete
    assert found.damaged == ([] if name == "zero bytes" else [5])


def test_read_table_ignores_a_stray_quote_in_the_header(tmp_path):
    path = tmp_path / "steps.csv"
    path.write_text("\n".join(['"epoch,step,loss,note', *lines_of(3)[1:], ""]))
    found = read_table(path)
    assert (found.columns, len(found.rows), found.damaged) == (["epoch", "step", "loss", "note"], 3, [1])


def test_the_csv_logger_backs_up_a_csv_file_that_another_program_changed(logger, metrics_csv):
    logger.log_epoch(epoch(0, loss=1.0))
    content = metrics_csv.read_bytes() + b'"1,20,0.5\n'
    metrics_csv.write_bytes(content)
    logger.log_epoch(epoch(2, loss=0.25))
    content += b"2,30,0.25\n"
    assert metrics_csv.read_bytes() == content
    with pytest.warns(UserWarning, match=r"metrics\.csv: another program changed this file in lines 3"):
        logger.log_epoch(epoch(3, acc=0.5))
    assert metrics_csv.with_name("metrics.csv.changed").read_bytes() == content
    assert metrics_csv.read_bytes() == b"epoch,step,loss,acc\n0,10,1.0,\n1,20,0.5,\n2,30,0.25,\n3,40,,0.5\n"


def test_the_csv_logger_writes_missed_rows_when_metrics_csv_is_writable_again(tmp_path, metrics_csv):
    logger = CSVLogger(tmp_path / "logs", name="digits", version=0)
    metrics_csv.mkdir(parents=True)
    with pytest.warns(UserWarning, match=r"metrics\.csv: rows could not be written: Is a directory"):
        logger.log_epoch(epoch(0))
    logger.log_epoch(epoch(1))
    rows = [{"epoch": "0", "step": "10"}, {"epoch": "1", "step": "20"}]
    expected = {"rows": 2, "columns": ["epoch", "step"], "last": rows[1], "waiting": rows, "last_written": None}
    assert logger.position()["metrics.csv"] == expected
    metrics_csv.rmdir()
    logger.log_epoch(epoch(2))
    assert metrics_csv.read_bytes() == b"epoch,step\n0,10\n1,20\n2,30\n"


def test_a_new_csv_logger_takes_the_next_free_version(tmp_path):
    (tmp_path / "run/version_7").mkdir(parents=True)
    (tmp_path / "run/version_8").write_text("a file in the way")
    logger = CSVLogger(tmp_path)
    assert [logger.version, logger.version, CSVLogger(tmp_path).version] == [9, 9, 10]
    assert CSVLogger(tmp_path, version="best").log_dir == str(tmp_path / "run/best")
    with ThreadPoolExecutor(8) as pool:
        found = pool.map(lambda _: claim_version(tmp_path / "at_once"), range(32))
        assert sorted(found) == list(range(32))


def test_hparams_yaml_can_contain_values_of_any_type(tmp_path, logger):
    class Thing:
        def __str__(self):
            return "a Thing"

    logger.log_hyperparams(
        {"lr": np.float64(0.1), "z": None, "a": (1, True), "n": torch.tensor(2), "ü": "ä"},
        Namespace(path=Path("x/y"), dtype=torch.float32, nested={"s": {3}, 1: [Thing()]}),
    )
    logger.log_hyperparams({"lr": 0.2, "later": "=x"})
    assert files(tmp_path)["logs/digits/version_0/hparams.yaml"].decode() == (
        "lr: 0.2\nz: null\na:\n- 1\n- true\nn: 2\nü: ä\npath: x/y\ndtype: torch.float32\n"
        "nested:\n  s:\n  - 3\n  1:\n  - a Thing\nlater: =x\n"
    )
