"""The CSV logger and read_logs: exact bytes, exact frames, exact words."""

import errno
import math
import os
import pickle
import random
import tempfile
from argparse import Namespace
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
import torch
from fabric_template.files import disk
from fabric_template.record.tables import LogsError
from lightning.fabric.loggers import CSVLogger as FabricCSVLogger
from lightning.fabric.utilities.rank_zero import rank_zero_only
from lightning.pytorch.loggers import CSVLogger as LightningCSVLogger

from fabric_template.loggers.csv_logger import CSVLogger
from fabric_template.loggers.read_logs import read_logs


def files(folder) -> dict[str, bytes]:
    return {p.relative_to(folder).as_posix(): p.read_bytes() for p in Path(folder).rglob("*") if p.is_file()}


def frame(**columns) -> pd.DataFrame:
    return pd.DataFrame(columns)


def epoch(number, **metrics):
    return {"epoch": number, "step": 10 * (number + 1), **metrics}


@pytest.fixture
def logger(tmp_path):
    return CSVLogger(tmp_path / "logs", name="digits")


@pytest.fixture
def metrics_csv(tmp_path):
    return tmp_path / "logs/digits/version_0/metrics.csv"


@pytest.fixture
def steps_csv(tmp_path):
    return tmp_path / "logs/digits/version_0/steps.csv"


# -- rows ------------------------------------------------------------------------------------------------------------


def test_nothing_is_written_before_the_first_row(tmp_path, logger):
    assert (logger.name, logger.root_dir, logger.save_dir) == ("digits", *[str(tmp_path / "logs")] * 2)
    assert logger.log_dir == str(tmp_path / "logs/digits/version_0")
    assert logger.version == 0
    assert logger.experiment is logger
    logger.log_epoch({})
    logger.log_metrics({})
    logger.save()
    logger.sync()
    logger.finalize("success")
    assert logger.position() == {}
    assert files(tmp_path) == {}


def test_defaults():
    logger = CSVLogger()
    assert logger.log_dir == os.path.join("logs", "run", "version_0")
    assert os.listdir() == []


def test_a_row_is_on_disk_when_log_epoch_returns(tmp_path, logger):
    logger.log_epoch({"epoch": 0, "step": 10, "val_loss": 0.5})
    assert files(tmp_path) == {"logs/digits/version_0/metrics.csv": b"epoch,step,val_loss\n0,10,0.5\n"}
    logger.log_epoch({"epoch": 1, "step": 20, "val_loss": 0.25})
    assert files(tmp_path) == {"logs/digits/version_0/metrics.csv": b"epoch,step,val_loss\n0,10,0.5\n1,20,0.25\n"}


def test_epoch_and_step_stand_first(logger, metrics_csv):
    logger.log_epoch({"val_loss": 0.5, "step": 10, "acc": 1.0, "epoch": 0})
    assert metrics_csv.read_bytes() == b"epoch,step,val_loss,acc\n0,10,0.5,1.0\n"


def test_steps_stand_apart_and_step_first(tmp_path, logger):
    logger.log_metrics({"train_loss": torch.tensor(0.5), "epoch": 0}, step=49)
    logger.log_metrics({"train_loss": np.float64(0.25), "epoch": torch.tensor(0)}, step=99)
    expected = b"step,epoch,train_loss\n49,0,0.5\n99,0,0.25\n"
    assert files(tmp_path) == {"logs/digits/version_0/steps.csv": expected}


def test_without_a_step_rows_are_counted(logger, steps_csv):
    for loss in (3, 2, 1):
        logger.log_metrics({"loss": loss})
    logger.log_metrics({"loss": 0, "step": 7})
    assert steps_csv.read_bytes() == b"step,loss\n0,3\n1,2\n2,1\n7,0\n"


def test_cells(logger, metrics_csv):
    row = {"f": 0.1, "i": 3, "b": True, "none": None, "nan": math.nan, "inf": -math.inf, "text": 'ünï, "x"\ny'}
    logger.log_epoch(row)
    assert metrics_csv.read_bytes().decode() == ('f,i,b,none,nan,inf,text\n0.1,3,True,,nan,-inf,"ünï, ""x""\\ny"\n')


def test_a_missing_column_is_an_empty_cell_and_a_new_one_goes_to_the_end(logger, metrics_csv):
    logger.log_epoch(epoch(0, train_loss=1.0, val_loss=2.0))
    logger.log_epoch(epoch(1, train_loss=0.5))
    logger.log_epoch(epoch(2, lr=0.1, train_loss=0.25))
    assert metrics_csv.read_bytes() == (
        b"epoch,step,train_loss,val_loss,lr\n0,10,1.0,2.0,\n1,20,0.5,,\n2,30,0.25,,0.1\n"
    )


def test_rows_are_appended_and_only_a_new_column_replaces_the_file(logger, metrics_csv):
    logger.log_epoch(epoch(0, loss=1.0))
    with open(metrics_csv, "rb") as reader:  # held open, so that the system cannot hand its inode out again
        first = metrics_csv.stat().st_ino
        for i in range(1, 5):
            logger.log_epoch(epoch(i, loss=1.0))
        assert metrics_csv.stat().st_ino == first
        logger.log_epoch(epoch(5, loss=1.0, acc=0.5))
        assert metrics_csv.stat().st_ino != first
        assert len(reader.read().splitlines()) == 6  # who had it open still sees a whole file
    assert os.listdir(metrics_csv.parent) == ["metrics.csv"]  # and no temporary one is left


@pytest.mark.parametrize(
    ("text", "cell"),
    [
        ("=1+1", "'=1+1"),
        ("+cmd", "'+cmd"),
        ("-cmd|' /C calc'!A0", "'-cmd|' /C calc'!A0"),
        ("@SUM(A1)", "'@SUM(A1)"),
        ("\tx", "'\tx"),
        ("\rx", "'\\rx"),
        ("-1.5e-3", "-1.5e-3"),
        ("+7", "+7"),
        ("-inf", "-inf"),
        ("a=b", "a=b"),
    ],
)
def test_what_a_spreadsheet_would_run_is_neutralised(logger, metrics_csv, text, cell):
    logger.log_epoch({"note": text, "n": -1.5})
    assert metrics_csv.read_bytes() == f"note,n\n{cell},-1.5\n".encode()


def test_headers_are_neutralised_and_found_again(logger, metrics_csv):
    logger.log_epoch({"epoch": 0, "=1+1": 1})
    logger.log_epoch({"epoch": 1, "=1+1": 2})
    assert metrics_csv.read_bytes() == b"epoch,'=1+1\n0,1\n1,2\n"


def test_floats_come_back_to_the_last_bit(tmp_path, logger):
    rng = random.Random(0)
    floats = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0, float(torch.tensor(0.1))]
    floats += [rng.uniform(-1, 1) * 10 ** rng.randint(-300, 300) for _ in range(200)]
    for i, value in enumerate(floats):
        logger.log_epoch(epoch(i, x=value))
    assert [x.hex() for x in read_logs(tmp_path / "logs")["x"]] == [x.hex() for x in floats]


def test_more_than_one_number_is_refused_by_name(tmp_path, logger):
    with pytest.raises(
        ValueError, match=r"cannot log 'acc': it has shape \(2,\), a cell holds one number; log acc\.me"
    ):
        logger.log_epoch({"acc": torch.zeros(2)})
    assert files(tmp_path) == {}


def test_other_ranks_write_nothing(tmp_path, logger, monkeypatch):
    monkeypatch.setattr(rank_zero_only, "rank", 1)
    logger.check_writable()
    logger.log_epoch(epoch(0))
    logger.log_metrics({"x": 1})
    logger.log_hyperparams({"x": 1})
    logger.rewind(None)
    assert logger.claim() is None
    assert logger.claim(3) == 3
    assert logger.log_dir.endswith("version_3")
    assert logger.position() == {}
    assert files(tmp_path) == {}
    assert not (tmp_path / "logs").exists()


# -- opened again ----------------------------------------------------------------------------------------------------


def test_an_existing_version_is_continued(tmp_path, logger, metrics_csv):
    logger.log_epoch(epoch(0, loss=1.0))
    logger.finalize("success")
    logger.log_epoch(epoch(1, loss=0.5))
    CSVLogger(tmp_path / "logs", name="digits", version=0).log_epoch(epoch(2, loss=0.25))
    logger.log_epoch(epoch(3, loss=0.125))
    assert metrics_csv.read_bytes() == b"epoch,step,loss\n0,10,1.0\n1,20,0.5\n2,30,0.25\n3,40,0.125\n"


@pytest.mark.parametrize("tail", [b"2,3", b"2,30,0.1", b"2,30\n", b"\0\0\0\0\0", b"2,30,\xc3"])
def test_a_torn_last_line_is_cut_off(tmp_path, logger, metrics_csv, tail):
    logger.log_epoch(epoch(0, loss=1.0))
    whole = metrics_csv.read_bytes()
    metrics_csv.write_bytes(whole + tail)
    again = CSVLogger(tmp_path / "logs", name="digits", version=0)
    assert again.position()["metrics.csv"]["rows"] == 1
    again.log_epoch(epoch(1, loss=0.5))
    again.log_epoch(epoch(2, loss=0.25))
    assert metrics_csv.read_bytes() == whole + b"1,20,0.5\n2,30,0.25\n"


def test_a_torn_header_counts_as_no_file(logger, metrics_csv):
    metrics_csv.parent.mkdir(parents=True)
    metrics_csv.write_bytes(b"epoch,st")
    logger.claim(0)
    logger.log_epoch(epoch(0))
    assert metrics_csv.read_bytes() == b"epoch,step\n0,10\n"


def full(written):
    """A write that comes to the disk's end after so many bytes."""
    left = [written]

    def write(fd, data):
        if not left[0]:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        size = os.write(fd, memoryview(data)[: left[0]])
        left[0] -= size
        return size

    return write


@pytest.mark.parametrize("written", [0, 3, 4])
def test_rows_that_did_not_fit_on_the_disk_are_kept_and_written_whole(logger, metrics_csv, monkeypatch, written):
    logger.log_epoch(epoch(0))
    with monkeypatch.context() as patch:
        patch.setattr(disk.fs, "write", full(written))
        for i in (1, 2):
            with pytest.raises(
                ValueError, match=r"cannot write logs to '.*metrics\.csv': No space left on device; choose a folder"
            ):
                logger.log_epoch(epoch(i))
        place = logger.position()["metrics.csv"]
        with pytest.raises(LogsError):
            logger.finalize("success")
    assert place == {
        "rows": 1, "columns": ["epoch", "step"],
        "waiting": [{"epoch": "1", "step": "20"}, {"epoch": "2", "step": "30"}],
    }  # fmt: skip
    if written:
        assert metrics_csv.read_bytes()[:18].startswith(b"epoch,step\n0,10\n1,")
    logger.log_epoch(epoch(3))
    assert metrics_csv.read_bytes() == b"epoch,step\n0,10\n1,20\n2,30\n3,40\n"
    assert files(metrics_csv.parent) == {"metrics.csv": metrics_csv.read_bytes()}


def test_a_new_column_that_did_not_fit(logger, metrics_csv, monkeypatch):
    logger.log_epoch(epoch(0))
    with monkeypatch.context() as patch:
        patch.setattr(disk.fs, "fsync", lambda fd: full(0)(fd, b""))
        with pytest.raises(LogsError):
            logger.log_epoch(epoch(1, val_loss=0.5))
        assert files(metrics_csv.parent) == {"metrics.csv": b"epoch,step\n0,10\n"}
    logger.sync()
    assert metrics_csv.read_bytes() == b"epoch,step,val_loss\n0,10,\n1,20,0.5\n"


def test_rows_that_waited_come_back_with_the_position(tmp_path, logger, metrics_csv, monkeypatch):
    """A checkpoint taken while the disk refused rows: killed then, the rows are written at resume."""
    logger.log_epoch(epoch(0))
    with monkeypatch.context() as patch:
        patch.setattr(disk.fs, "write", full(3))
        with pytest.raises(LogsError):
            logger.log_epoch(epoch(1))
        place = logger.position()
    (metrics_csv.parent / ".metrics.csv.7.0123abcd.tmp").write_text("left by a kill")
    again = CSVLogger(tmp_path / "logs", name="digits", version=0)
    again.rewind(place)
    assert files(metrics_csv.parent) == {"metrics.csv": b"epoch,step\n0,10\n1,20\n"}


def test_it_survives_a_removed_folder_and_a_change_of_folder(tmp_path, monkeypatch):
    (tmp_path / "elsewhere").mkdir()
    logger = CSVLogger("logs")
    logger.log_epoch(epoch(0))
    monkeypatch.chdir("elsewhere")
    logger.log_epoch(epoch(1))
    path = tmp_path / "logs/run/version_0/metrics.csv"
    assert files(tmp_path) == {"logs/run/version_0/metrics.csv": b"epoch,step\n0,10\n1,20\n"}
    path.unlink()
    path.parent.rmdir()
    logger.log_epoch(epoch(2))
    assert files(tmp_path) == {"logs/run/version_0/metrics.csv": b"epoch,step\n2,30\n"}


def test_it_pickles_before_and_while_it_is_used(logger, metrics_csv):
    logger.claim()
    pickle.loads(pickle.dumps(logger)).log_epoch(epoch(0))
    logger.log_epoch(epoch(1))
    pickle.loads(pickle.dumps(logger)).log_epoch(epoch(2))
    logger.log_epoch(epoch(3))
    assert metrics_csv.read_bytes() == b"epoch,step\n0,10\n1,20\n2,30\n3,40\n"


# -- rewind ----------------------------------------------------------------------------------------------------------


def log_everything(logger, epochs, positions=None):
    for i in epochs:
        logger.log_metrics({"epoch": i, "train_loss": 1 / (i + 1)}, step=10 * i + 4)
        if i >= 2:
            logger.log_metrics({"epoch": i, "grad_norm": i / 3}, step=10 * i + 9)
        # a column that comes late, and a cell that a spreadsheet would run
        logger.log_epoch(epoch(i, val_loss=1 / (i + 3), **({"note": "=late", "lr": 0.1} if i >= 1 else {})))
        if positions is not None:
            positions.append(logger.position())


@pytest.mark.parametrize("saved_after", [0, 1, 2, 3])
@pytest.mark.parametrize("same_logger", [True, False])
def test_rewound_and_continued_is_byte_for_byte_the_uninterrupted_run(tmp_path, saved_after, same_logger):
    whole, broken = CSVLogger(tmp_path / "whole"), CSVLogger(tmp_path / "broken")
    log_everything(whole, range(5))
    log_everything(broken, range(4), positions := [])
    if not same_logger:
        broken = CSVLogger(tmp_path / "broken", version=0)
    broken.rewind(positions[saved_after])
    assert broken.position() == positions[saved_after]
    log_everything(broken, range(saved_after + 1, 5))
    assert files(tmp_path / "broken") == files(tmp_path / "whole")


def test_the_position_is_plain_and_loads_with_weights_only(tmp_path, logger):
    log_everything(logger, range(2))
    torch.save(logger.position(), tmp_path / "position.pt")
    assert torch.load(tmp_path / "position.pt", weights_only=True) == {
        "metrics.csv": {"rows": 2, "columns": ["epoch", "step", "val_loss", "note", "lr"]},
        "steps.csv": {"rows": 2, "columns": ["step", "epoch", "train_loss"]},
    }


def test_rewind_takes_a_file_away_that_was_not_there_yet(tmp_path, logger):
    logger.log_epoch(epoch(0))
    position = logger.position()
    logger.log_metrics({"loss": 1.0}, step=0)
    logger.rewind(position)
    assert files(tmp_path) == {"logs/digits/version_0/metrics.csv": b"epoch,step\n0,10\n"}
    logger.rewind(None)
    assert files(tmp_path) == {}
    logger.log_epoch(epoch(0))
    assert files(tmp_path) == {"logs/digits/version_0/metrics.csv": b"epoch,step\n0,10\n"}


def test_rewind_to_where_it_stands_touches_nothing(logger, metrics_csv):
    logger.log_epoch(epoch(0, loss=1.0))
    before = metrics_csv.stat()
    logger.rewind(logger.position())
    after = metrics_csv.stat()
    assert (after.st_ino, after.st_mtime_ns) == (before.st_ino, before.st_mtime_ns)


def test_rewind_drops_a_torn_line(logger, metrics_csv):
    logger.log_epoch(epoch(0))
    position, whole = logger.position(), metrics_csv.read_bytes()
    metrics_csv.write_bytes(whole + b"1,2")
    logger.rewind(position)
    assert metrics_csv.read_bytes() == whole


@pytest.mark.parametrize(("left", "rows"), [(None, 0), (b"epoch,step\n0,10\n", 1)])
def test_rewind_past_the_end_warns_and_goes_on(logger, metrics_csv, left, rows):
    for i in range(3):
        logger.log_epoch(epoch(i))
    position = logger.position()
    metrics_csv.unlink()
    if left:
        metrics_csv.write_bytes(left)
    words = rf"metrics\.csv has {rows} rows, the checkpoint was saved after 3: the earlier rows are gone, the log goes"
    with pytest.warns(UserWarning, match=words) as caught:
        logger.rewind(position)
    assert caught[0].filename == __file__
    logger.log_epoch(epoch(3))
    assert metrics_csv.read_bytes() == (left or b"epoch,step\n") + b"3,40\n"


# -- versions and folders --------------------------------------------------------------------------------------------


def test_versions_count_on(tmp_path):
    (tmp_path / "run/version_7").mkdir(parents=True)
    (tmp_path / "run/version_8").write_text("a file in the way")
    assert CSVLogger(tmp_path).version == 8  # a look, and from now on the answer
    logger = CSVLogger(tmp_path)
    assert [logger.claim(), logger.claim(), logger.version] == [9, 9, 9]
    assert CSVLogger(tmp_path, version="best").claim() == "best"
    assert CSVLogger(tmp_path, name=None).claim() == 0
    folders = sorted(p.relative_to(tmp_path).as_posix() for p in tmp_path.rglob("*") if p.is_dir())
    assert folders == ["run", "run/best", "run/version_7", "run/version_9", "version_0"]


def test_runs_that_start_together_get_numbers_of_their_own(tmp_path):
    loggers = [CSVLogger(tmp_path) for _ in range(32)]
    with ThreadPoolExecutor(8) as pool:
        assert sorted(pool.map(CSVLogger.claim, loggers)) == list(range(32))


def test_a_version_taken_between_look_and_claim_is_not_shared(tmp_path, monkeypatch):
    CSVLogger(tmp_path).claim()
    late = CSVLogger(tmp_path)
    monkeypatch.setattr(os, "listdir", lambda folder: [])  # what it saw before the other one came
    assert late.claim() == 1


def test_check_writable_makes_the_folder_and_leaves_it_empty(tmp_path, logger):
    logger.check_writable()
    assert (tmp_path / "logs/digits/version_0").is_dir()
    assert files(tmp_path) == {}


@pytest.mark.skipif(not hasattr(os, "O_TMPFILE"), reason="a file without a name is Linux's")
def test_a_kill_while_it_is_tried_leaves_no_file(tmp_path, logger, monkeypatch):
    seen, real = [], tempfile.TemporaryFile

    def opened(*args, **words):
        file = real(*args, **words)
        seen.append(files(tmp_path))
        return file

    monkeypatch.setattr(tempfile, "TemporaryFile", opened)
    logger.check_writable()
    assert seen == [{}]


@pytest.mark.parametrize("call", ["check_writable", "claim", "log_epoch", "log_metrics", "log_hyperparams"])
def test_a_folder_that_cannot_be_written_is_one_line(tmp_path, call):
    (tmp_path / "logs").write_text("I am a file")
    logger = CSVLogger(tmp_path / "logs")
    with pytest.raises(ValueError, match="cannot write logs to") as error:
        getattr(logger, call)(*([{"x": 1}] if call.startswith("log") else []))
    assert str(error.value) == (
        f"cannot write logs to '{tmp_path}/logs/run': Not a directory; choose a folder that can be written, "
        "e.g. CSVLogger(root_dir='/tmp/logs'), or logger=False to log nothing"
    )


def test_check_writable_tries_the_files_too(logger, metrics_csv):
    metrics_csv.mkdir(parents=True)
    logger.claim(0)
    with pytest.raises(ValueError, match=r"cannot write logs to '.*/version_0': Is a directory; choose a folder"):
        logger.check_writable()


def test_remote_folders_are_refused():
    with pytest.raises(
        ValueError, match=r"root_dir='s3://b/logs'\): logs are kept in a local folder.*give a path such"
    ):
        CSVLogger("s3://b/logs")


# -- hparams ---------------------------------------------------------------------------------------------------------


def test_hyperparams(tmp_path, logger):
    class Thing:
        pass

    logger.log_hyperparams(
        {"lr": np.float64(0.1), "z": None, "a": (1, True), "n": torch.tensor(2), "ü": "ä"},
        Namespace(path=Path("x/y"), dtype=torch.float32, nested={"s": {3}, 1: [Thing()]}),
    )
    logger.log_hyperparams({"lr": 0.2, "later": "=x"})
    assert files(tmp_path)["logs/digits/version_0/hparams.yaml"].decode() == (
        "lr: 0.2\nz: null\na:\n- 1\n- true\nn: 2\nü: ä\npath: x/y\ndtype: torch.float32\n"
        "nested:\n  s:\n  - 3\n  1:\n  - <test_logs.test_hyperparams.<locals>.Thing object>\nlater: =x\n"
    ).replace("test_logs.", f"{__name__}.")
    assert list(files(tmp_path)) == ["logs/digits/version_0/hparams.yaml"]


def test_hyperparams_without_names_are_refused(tmp_path, logger):
    with pytest.raises(
        TypeError, match=r"takes a dict or an argparse\.Namespace, not float: give it a name, e\.g\. log"
    ):
        logger.log_hyperparams({}, 0.5)
    assert files(tmp_path) == {}


# -- read_logs -------------------------------------------------------------------------------------------------------


@pytest.fixture
def three_runs(tmp_path):
    root = tmp_path / "logs"
    for name, version, loss in (("digits", 10, 1.0), ("digits", 9, 2.0), ("a/b", "final", 3.0)):
        logger = CSVLogger(root, name=name, version=version)
        logger.log_epoch(epoch(0, loss=loss))
        logger.log_metrics({"loss": loss, "epoch": 0}, step=5)
    logger = CSVLogger(root, name="digits", version=10)
    logger.log_epoch(epoch(1, loss=0.5, acc=0.75))
    return root


def test_read_all_runs(three_runs):
    expected = frame(
        name=["a/b", "digits", "digits", "digits"],
        version=["final", 9, 10, 10],
        epoch=[0, 0, 0, 1],
        step=[10, 10, 10, 20],
        loss=[3.0, 2.0, 1.0, 0.5],
        acc=[math.nan, math.nan, math.nan, 0.75],
    )
    pd.testing.assert_frame_equal(read_logs(three_runs), expected)


@pytest.mark.parametrize("path", ["digits/version_10", "digits/version_10/metrics.csv"])
@pytest.mark.parametrize("kind", [str, Path])
def test_read_one_version(three_runs, path, kind):
    expected = frame(
        name=["digits"] * 2, version=[10, 10], epoch=[0, 1], step=[10, 20], loss=[1.0, 0.5], acc=[math.nan, 0.75]
    )
    pd.testing.assert_frame_equal(read_logs(kind(three_runs / path)), expected)


def test_read_one_run(three_runs):
    got = read_logs(three_runs / "digits")
    assert list(got["version"]) == [9, 10, 10]
    assert list(got["name"]) == ["digits"] * 3
    assert got["version"].dtype == "int64"


@pytest.mark.parametrize("path", [".", "digits/version_9/metrics.csv", "digits/version_9/steps.csv"])
def test_read_steps(three_runs, path):
    got = read_logs(three_runs / path, steps=True)
    rows = frame(name=["a/b", "digits", "digits"], version=["final", 9, 10], step=5, epoch=0, loss=[3.0, 2.0, 1.0])
    if path != ".":
        rows = frame(name=["digits"], version=[9], step=[5], epoch=[0], loss=[2.0])
        pd.testing.assert_frame_equal(read_logs((three_runs / path).with_name("steps.csv")), rows)
    pd.testing.assert_frame_equal(got, rows)


def test_a_step_logged_twice_stays_two_rows(tmp_path, logger):
    for loss in (1, 2):
        logger.log_metrics({"loss": loss, "epoch": 0}, step=5)
    assert list(read_logs(tmp_path / "logs", steps=True)["loss"]) == [1, 2]


def test_read_cells_of_every_kind(tmp_path, logger):
    logger.log_epoch({"epoch": 0, "x": math.nan, "inf": math.inf, "flag": True, "note": "NA", "version": 5})
    logger.log_epoch({"epoch": 1, "x": 1, "inf": 2.5})
    expected = frame(name="digits", version=0, epoch=[0, 1], x=[math.nan, 1.0], inf=[math.inf, 2.5])
    expected["flag"] = pd.Series([True, None], dtype=object)
    expected["note"] = ["NA", None]
    pd.testing.assert_frame_equal(read_logs(tmp_path / "logs"), expected)


def test_read_lightnings_own_file(tmp_path):
    logger = LightningCSVLogger(tmp_path, name="lit")
    for i in range(2):
        logger.log_metrics({"lr-SGD": 0.1 / (i + 1)}, step=10 * i)  # LearningRateMonitor: no epoch
        logger.log_metrics({"train_loss": 2.0 - i, "epoch": i}, step=10 * i + 4)
        logger.log_metrics({"train_loss": 1.5 - i, "epoch": i}, step=10 * i + 9)
        logger.log_metrics({"val_loss": math.nan if i else 3.0, "epoch": i}, step=10 * i + 9)
    logger.log_metrics({"extra": 7}, step=20)
    logger.finalize("success")
    expected = frame(
        name=["lit"] * 2,
        version=[0, 0],
        epoch=[0, 1],
        step=[9, 20],
        extra=[math.nan, 7.0],
        **{"lr-SGD": [0.1, 0.05]},
        train_loss=[1.5, 0.5],
        val_loss=[3.0, math.nan],
    )
    got = read_logs(tmp_path)
    pd.testing.assert_frame_equal(got, expected, check_like=True)
    assert list(got.columns[:4]) == ["name", "version", "epoch", "step"]


def test_read_fabrics_own_file_joins_by_step(tmp_path):
    logger = FabricCSVLogger(tmp_path, name="fab")
    for step in (0, 1):
        logger.log_metrics({"train_loss": 1.0 + step}, step=step)
        logger.log_metrics({"val_loss": 2.0 + step}, step=step)
    logger.finalize("success")
    expected = frame(name=["fab"] * 2, version=0, step=[0, 1], train_loss=[1.0, 2.0], val_loss=[2.0, 3.0])
    pd.testing.assert_frame_equal(read_logs(tmp_path), expected)


def test_lightnings_file_can_be_continued(tmp_path):
    logger = LightningCSVLogger(tmp_path, name="run")
    logger.log_metrics({"epoch": 0, "val_loss": 1.0}, step=9)
    logger.finalize("success")
    CSVLogger(tmp_path, version=0).log_epoch({"epoch": 1, "step": 19, "val_loss": 0.5})
    expected = frame(name="run", version=0, epoch=[0, 1], step=[9, 19], val_loss=[1.0, 0.5])
    pd.testing.assert_frame_equal(read_logs(tmp_path), expected)


def test_an_unfinished_line_is_left_out_with_a_warning(tmp_path, logger, metrics_csv):
    logger.log_epoch(epoch(0, loss=1.0))
    metrics_csv.write_bytes(metrics_csv.read_bytes() + b"1,20,0.12")
    with pytest.warns(UserWarning, match=r"metrics\.csv: the last line is not finished and was left out"):
        assert list(read_logs(tmp_path / "logs")["loss"]) == [1.0]


def test_a_path_that_is_not_there(three_runs):
    with pytest.raises(ValueError, match="does not exist") as error:
        read_logs(three_runs / "digitz/version_1")
    assert str(error.value) == (
        f"read_logs: '{three_runs}/digitz/version_1' does not exist ('{three_runs}' holds a, digits): "
        "give a metrics.csv, a version's folder, a run's folder or the root of all logs, e.g. read_logs('logs')"
    )


def test_a_folder_without_logs(tmp_path):
    with pytest.raises(
        ValueError, match=r"there is no metrics\.csv in '.*' \('.*' holds nothing\): give a metrics\.csv"
    ):
        read_logs(tmp_path)


def test_no_steps_were_logged(tmp_path, logger):
    logger.log_epoch(epoch(0))
    words = (
        r"there is no steps\.csv in '.*' \('.*' holds digits\): nothing was logged per step; read_logs\(path\) reads"
    )
    with pytest.raises(ValueError, match=words):
        read_logs(tmp_path / "logs", steps=True)
