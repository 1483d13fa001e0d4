"""Test read_logs on one run, on several runs, and on Lightning's logs."""

import math
import subprocess
import sys

import pandas as pd
import pytest
from lightning.pytorch.loggers import CSVLogger as LightningCSVLogger
from matplotlib import pyplot

from fabric_template import list_runs, plot_logs
from fabric_template.loggers.csv_logger import CSVLogger
from fabric_template.loggers.read_logs import read_logs


def epoch(number, **metrics):
    return {"epoch": number, "step": 10 * (number + 1), **metrics}


@pytest.fixture
def three_runs(tmp_path):
    root = tmp_path / "logs"
    for name, version, loss in (("digits", 10, 1.0), ("digits", 9, 2.0), ("a/b", "final", 3.0)):
        logger = CSVLogger(root, name=name, version=version)
        logger.log_epoch(epoch(0, loss=loss))
        logger.log_metrics({"loss": loss, "epoch": 0}, step=5)
    CSVLogger(root, name="digits", version=10).log_epoch(epoch(1, loss=0.5, acc=0.75))
    return root


def test_read_logs_sorts_runs_by_name_and_version(three_runs):
    expected = pd.DataFrame(
        {
            "name": ["a/b", "digits", "digits", "digits"],
            "version": ["final", 9, 10, 10],
            "epoch": [0, 0, 0, 1],
            "step": [10, 10, 10, 20],
            "loss": [3.0, 2.0, 1.0, 0.5],
            "acc": [math.nan, math.nan, math.nan, 0.75],
        }
    )
    pd.testing.assert_frame_equal(read_logs(three_runs), expected)
    one_run = read_logs(three_runs / "digits")
    assert (set(one_run["name"]), one_run["version"].tolist()) == ({"digits"}, [9, 10, 10])


def test_run_names_that_contain_numbers_are_sorted_numerically(tmp_path):
    names = ["lr_0.1/width_4", "lr_0.1/width_16", "lr_0.1/width_128", "width_4", "width_04b", "width_16"]
    for name in reversed(names):
        CSVLogger(tmp_path, name=name, version=0).log_epoch(epoch(0, val_loss=1.0))
    assert read_logs(tmp_path)["name"].tolist() == names
    assert list_runs(tmp_path)["name"].tolist() == names
    plot_logs(tmp_path)
    [legend] = pyplot.gcf().legends
    assert [text.get_text() for text in legend.get_texts()][:-1] == [f"{name}/version_0" for name in names]
    pyplot.close()


@pytest.mark.parametrize("path", ["digits/version_10", "digits/version_10/metrics.csv"])
@pytest.mark.parametrize("make", [str, lambda path: path], ids=["str", "path"])
def test_read_logs_accepts_the_folder_or_csv_file_of_one_version(three_runs, path, make):
    found = read_logs(make(three_runs / path))
    assert found["version"].tolist() == [10, 10]
    assert found["loss"].tolist() == [1.0, 0.5]


@pytest.mark.parametrize(("path", "losses"), [(".", [3.0, 2.0, 1.0]), ("digits/version_9/metrics.csv", [2.0])])
def test_read_logs_returns_the_rows_of_steps_csv(three_runs, path, losses):
    found = read_logs(three_runs / path, steps=True)
    assert list(found.columns) == ["name", "version", "step", "epoch", "loss"]
    assert found["loss"].tolist() == losses


def test_read_logs_returns_every_kind_of_value_unchanged(tmp_path):
    logger = CSVLogger(tmp_path, name="digits")
    floats = [0.1, 1 / 3, 5e-324, 1.7976931348623157e308, -0.0]
    for index, value in enumerate(floats):
        logger.log_epoch({"epoch": index, "x": value, "inf": math.inf, "flag": True, "note": 'a "b",\nc', "version": 5})
    logger.log_epoch({"epoch": 9, "x": math.nan})
    found = read_logs(tmp_path)
    assert [x.hex() for x in found["x"][:-1]] == [x.hex() for x in floats]
    assert found["inf"][0] == math.inf
    assert found["flag"].tolist() == [True] * 5 + [None]
    assert found["note"].dropna().tolist() == ['a "b",\nc'] * 5
    assert found["version"].tolist() == [0] * 6


def test_read_logs_merges_the_rows_of_each_epoch_in_a_lightning_log(tmp_path):
    logger = LightningCSVLogger(tmp_path, name="lit")
    for i in range(2):
        # Lightning's LearningRateMonitor also logs rows without an epoch.
        logger.log_metrics({"lr-SGD": 0.1 / (i + 1)}, step=10 * i)
        logger.log_metrics({"train_loss": 2.0 - i, "epoch": i}, step=10 * i + 4)
        logger.log_metrics({"train_loss": 1.5 - i, "epoch": i}, step=10 * i + 9)
        logger.log_metrics({"val_loss": 3.0, "epoch": i}, step=10 * i + 9)
    logger.log_metrics({"extra": 7}, step=20)
    logger.finalize("success")
    found = read_logs(tmp_path)
    assert list(found.columns[:4]) == ["name", "version", "epoch", "step"]
    rows = found[["epoch", "step", "lr-SGD", "train_loss", "val_loss"]]
    assert rows.values.tolist() == [[0, 9, 0.1, 1.5, 3.0], [1, 19, 0.05, 0.5, 3.0]]
    CSVLogger(tmp_path, "lit", version=0).log_epoch({"epoch": 2, "step": 29, "val_loss": 0.5})
    assert read_logs(tmp_path)["val_loss"].tolist() == [3.0, 3.0, 0.5]


def test_read_logs_warns_about_an_incomplete_line_and_skips_it(tmp_path):
    CSVLogger(tmp_path).log_epoch(epoch(0, loss=1.0))
    path = tmp_path / "run/version_0/metrics.csv"
    path.write_bytes(path.read_bytes() + b"1,20,0.12")
    with pytest.warns(UserWarning, match=r"metrics\.csv: the last line is incomplete and was left out"):
        assert read_logs(tmp_path)["loss"].tolist() == [1.0]


def test_read_logs_does_not_convert_run_names_to_numbers_or_nan(tmp_path):
    """In a cell, text such as "None" or "na" means a missing value. In a run name, it does not."""
    names = ["12", "None", "na"]
    for name in names:
        CSVLogger(tmp_path, name=name, version="1e3").log_epoch(epoch(0, val_loss=1.0))
    table = read_logs(tmp_path)
    assert (table["name"].tolist(), set(table["version"])) == (names, {"1e3"})
    labels = [line.get_label() for line in plot_logs(table).get_lines()]
    assert [label for label in labels if label != "best"] == [f"{name}/1e3" for name in names]
    pyplot.close()


def test_read_logs_and_list_runs_follow_links_to_folders(tmp_path, three_runs):
    (tmp_path / "moved").mkdir()
    (three_runs / "a").rename(tmp_path / "moved/a")
    (three_runs / "on_scratch").symlink_to(tmp_path / "moved/a")
    # A link to a run that is already listed, or to a parent folder, adds no runs.
    (three_runs / "digits/newest").symlink_to("version_10")
    (three_runs / "digits/up").symlink_to(three_runs)
    names = ["digits", "digits", "on_scratch/b"]
    assert list_runs(three_runs)["name"].tolist() == names
    assert sorted(set(read_logs(three_runs)["name"])) == sorted(set(names))


def test_read_logs_reads_a_metrics_csv_saved_by_a_spreadsheet_program(tmp_path):
    path = tmp_path / "run/version_0/metrics.csv"
    path.parent.mkdir(parents=True)
    path.write_bytes("\ufeffepoch;step;#correct;val_loss\r\n0;5;3;0,25\r\n1;10;4;0,125\r\n".encode())
    table = read_logs(path)
    assert table["val_loss"].tolist() == [0.25, 0.125]
    assert table["#correct"].tolist() == [3, 4]


def test_read_logs_refuses_a_path_without_logs(tmp_path, three_runs):
    missing = three_runs / "digitz"
    with pytest.raises(ValueError, match=r"expected a metrics\.csv.* The path does not exist\."):
        read_logs(missing)
    (tmp_path / "empty").mkdir()
    with pytest.raises(ValueError, match=r"The folder contains no metrics\.csv\."):
        read_logs(tmp_path / "empty")
    with pytest.raises(TypeError, match=r"read_logs\(path\): got a DataFrame, expected a path"):
        read_logs(pd.DataFrame())
    with pytest.raises(TypeError, match=r"list_runs: got a list, expected a folder"):
        list_runs([three_runs])


def test_read_logs_imports_neither_torch_nor_lightning(three_runs):
    code = (
        f"import sys; from fabric_template.loggers.read_logs import read_logs; read_logs({str(three_runs)!r});"
        " print(sorted({'torch', 'lightning'} & set(sys.modules)))"
    )
    assert subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout == "[]\n"


@pytest.mark.parametrize(
    ("epochs", "kept"),
    [
        ([0, 0, 0, 1, 1, 1], [0, 1, 2, 3, 4, 5]),
        ([0, 0, 1, 1, 2], [0, 1, 2, 3, 4]),
        ([0, 1, 1, 2], [0, 2, 3]),
        ([0, 0], [1]),
    ],
)
def test_read_logs_keeps_only_the_newest_rows_of_a_repeated_epoch(tmp_path, epochs, kept):
    losses = [0.5, 0.1, 0.7, 0.6, 0.4, 0.9][: len(epochs)]
    pd.DataFrame({"epoch": epochs, "val_loss": losses}).to_csv(tmp_path / "metrics.csv", index=False)
    found = read_logs(tmp_path)
    assert found["val_loss"].tolist() == [losses[index] for index in kept]
    assert list_runs(tmp_path)["best"].tolist() == [min(losses[index] for index in kept)]
