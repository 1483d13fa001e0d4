"""plot_logs: which lines are drawn, from what, and with which words it refuses."""

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot

from fabric_template.record.logger import CSVLogger, read_logs
from fabric_template.tools.plots import plot_logs


def lines(ax):
    """Label -> (style, colour, points) of every line."""
    return {
        line.get_label(): (line.get_linestyle(), line.get_color(), list(zip(*line.get_data(), strict=True)))
        for line in ax.get_lines()
    }


@pytest.fixture
def history():
    return pd.DataFrame(
        {
            "epoch": [0, 1, 2],
            "step": [10, 20, 30],
            "train_loss": [3.0, 2.0, 1.0],
            "val_loss": [3.5, math.nan, 1.5],
            "val_acc": [0.2, math.nan, 0.8],
            "lr": [0.1, 0.1, 0.1],
            "note": ["a", "b", "c"],
        }
    )


@pytest.fixture
def root(tmp_path):
    for name, version, loss in (("digits", 0, 2.0), ("digits", 1, 1.0)):
        logger = CSVLogger(tmp_path / "logs", name=name, version=version)
        for i in range(2):
            logger.log_epoch({"epoch": i, "step": i * 5, "train_loss": loss / (i + 1), "val_loss": loss})
    return tmp_path / "logs"


def test_losses_left_accuracies_right(history):
    axes = plot_logs(history)
    assert isinstance(axes, np.ndarray)
    left, right = axes
    assert lines(left) == {
        "train_loss": ("--", "C0", [(0, 3.0), (1, 2.0), (2, 1.0)]),
        "val_loss": ("-", "C0", [(0, 3.5), (2, 1.5)]),  # one line over the gap
    }
    assert lines(right) == {"val_acc": ("-", "C0", [(0, 0.2), (2, 0.8)])}
    assert (left.get_xlabel(), left.get_ylabel(), right.get_ylabel()) == ("epoch", "loss", "acc")
    assert [text.get_text() for text in left.get_legend().get_texts()] == ["train_loss", "val_loss"]
    assert {line.get_marker() for line in left.get_lines()} == {"o"}
    left.figure.canvas.draw()


def test_without_accuracies_there_is_one_axes(history):
    ax = plot_logs(history.drop(columns="val_acc"), x="step")
    assert lines(ax)["val_loss"][2] == [(10, 3.5), (30, 1.5)]
    assert ax.get_xlabel() == "step"
    assert ax.figure.axes == [ax]


def test_chosen_metrics(history):
    assert list(lines(plot_logs(history, metrics="lr"))) == ["lr"]
    left, right = plot_logs(history, metrics=["val_acc", "lr", "val_acc"])
    assert (list(lines(left)), list(lines(right))) == (["lr"], ["val_acc"])


def test_into_given_axes_and_no_other_figure(history):
    _, ax = pyplot.subplots()
    before = pyplot.get_fignums()
    assert plot_logs(history, ax=ax) is ax
    assert pyplot.get_fignums() == before
    # loss and accuracy meet in one Axes: a colour each
    assert {label: line[:2] for label, line in lines(ax).items()} == {
        "train_loss": ("--", "C0"),
        "val_loss": ("-", "C0"),
        "val_acc": ("-", "C1"),
    }
    plot_logs({"second": history}, metrics="val_loss", ax=ax)
    assert lines(ax)["second val_loss"][1] == "C2"


def test_runs_are_compared_by_colour(root):
    ax = plot_logs(root)
    assert {label: line[:2] for label, line in lines(ax).items()} == {
        "digits/version_0 train_loss": ("--", "C0"),
        "digits/version_0 val_loss": ("-", "C0"),
        "digits/version_1 train_loss": ("--", "C1"),
        "digits/version_1 val_loss": ("-", "C1"),
    }


def test_one_run_has_short_labels(root):
    assert list(lines(plot_logs(str(root / "digits/version_1")))) == ["train_loss", "val_loss"]
    assert list(lines(plot_logs([root / "digits/version_1"]))) == ["train_loss", "val_loss"]


def test_dicts_and_lists(root, history):
    labels = list(lines(plot_logs({"new": history, "old": root}, metrics="val_loss")))
    assert labels == ["new val_loss", "old/digits/version_0 val_loss", "old/digits/version_1 val_loss"]
    labels = list(lines(plot_logs([history, root / "digits/version_1", history], metrics="val_loss")))
    assert labels == ["run 0 val_loss", "digits/version_1 val_loss", "run 2 val_loss"]


def test_a_column_of_another_run_draws_nothing(tmp_path):
    for name, column in (("a", "val_loss"), ("b", "test_loss")):
        CSVLogger(tmp_path, name=name, version="last").log_epoch({"epoch": 0, column: 1.0})
    drawn = lines(plot_logs(tmp_path))
    assert drawn == {"a/last val_loss": ("-", "C0", [(0, 1.0)]), "b/last test_loss": (":", "C1", [(0, 1.0)])}


def test_lightnings_names():
    names = ["train_loss_step", "train_loss_epoch", "val/loss", "val_acc/dataloader_idx_0", "val_acc/dataloader_idx_1"]
    left, right = plot_logs(pd.DataFrame({"epoch": [0], **{name: [1.0] for name in names}}))
    assert {label: line[:2] for label, line in lines(left).items()} == {
        "train_loss_epoch": ("--", "C0"),
        "val/loss": ("-", "C0"),
    }
    assert [line[1] for line in lines(right).values()] == ["C0", "C1"]


def test_a_column_whose_name_has_two_lines_is_no_metric(history):
    history["weight\nloss"] = 1.0
    plot_logs(history)


def test_numbers_that_are_all_missing_leave_the_axes_empty():
    ax = plot_logs(pd.DataFrame({"epoch": [0], "val_loss": [math.nan]}))
    assert lines(ax) == {}


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"metrics": ["val_los"]},
            r"no numbers to draw for val_los; the columns are epoch, step, train_loss, val_loss, ",
        ),
        ({"metrics": "note"}, r"no numbers to draw for note; the columns are epoch, step"),
        ({"x": "time"}, r"there is no column x='time'; the columns are epoch, .*, note: x='step', for example"),
    ],
)
def test_unknown_columns_are_answered_with_the_known(history, arguments, words):
    with pytest.raises(ValueError, match=words):
        plot_logs(history, **arguments)
    assert pyplot.get_fignums() == []


def test_nothing_to_draw_by_default():
    with pytest.raises(ValueError, match=r"no column ends in loss, acc or accuracy; the columns are epoch, f1: choose"):
        plot_logs(pd.DataFrame({"epoch": [0], "f1": [1.0]}))


def test_no_run_at_all():
    with pytest.raises(ValueError, match=r"there is no column x='epoch'; the columns are none"):
        plot_logs([])


def test_what_cannot_be_read_as_logs(history):
    with pytest.raises(
        TypeError, match=r"takes a path, a DataFrame, or a list or dict of these, not int; plot_logs\('logs'"
    ):
        plot_logs(3)
    with pytest.raises(
        TypeError, match=r"ax=\.\.\.\) takes one Axes, not ndarray; give one of them, e\.g\. ax=axes\[0\]"
    ):
        plot_logs(history, ax=pyplot.subplots(1, 2)[1])


def test_values_per_step_are_drawn_over_steps_and_means_over_epochs():
    """Lightning's names for both; where there is no mean, what there is."""
    both = pd.DataFrame(
        {"epoch": [0, 1], "step": [3, 7], "train_loss_step": [3.0, 2.0], "train_loss_epoch": [4.0, 1.0]}
    )
    assert list(lines(plot_logs(both))) == ["train_loss_epoch"]
    drawn = lines(plot_logs(both, x="step"))
    assert drawn["train_loss_step"] == ("--", "C0", [(3, 3.0), (7, 2.0)])
    assert list(drawn) == ["train_loss_step", "train_loss_epoch"]
    assert list(lines(plot_logs(both.drop(columns="train_loss_epoch")))) == ["train_loss_step"]


def test_what_was_logged_per_step_is_found_by_its_name(tmp_path):
    logger = CSVLogger(tmp_path, name="steps", version=0)
    for step in (1, 2):
        logger.log_metrics({"train_loss_step": 1.0 / step, "train_acc_step": 0.5}, step)
    left, right = plot_logs(read_logs(tmp_path, steps=True), x="step")
    assert lines(left) == {"train_loss_step": ("--", "C0", [(1, 1.0), (2, 0.5)])}
    assert list(lines(right)) == ["train_acc_step"]


def test_time_is_what_has_passed(history):
    """A row has the seconds of its epoch; several runs begin at 0, each."""
    history["time"] = [2.0, 3.0, 5.0]
    ax = plot_logs({"a": history, "b": history}, x="time", metrics="train_loss")
    assert {label: points for label, (_, _, points) in lines(ax).items()} == dict.fromkeys(
        ["a train_loss", "b train_loss"], [(2.0, 3.0), (5.0, 2.0), (10.0, 1.0)]
    )
    assert ax.get_xlabel() == "time in s"


@pytest.mark.parametrize("epochs", [1, 2, 3, 30])
def test_epochs_have_whole_ticks(epochs):
    ax = plot_logs(pd.DataFrame({"epoch": range(epochs), "val_loss": 1.0}))
    ax.figure.canvas.draw()
    low, high = ax.get_xlim()
    shown = [tick for tick in ax.get_xticks() if low <= tick <= high]
    assert shown
    assert all(tick == int(tick) and 0 <= tick < epochs for tick in shown)
