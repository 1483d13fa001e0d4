"""plot_logs: which lines are drawn, from what, where they stand, and with which words it refuses."""

import math

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot
from test_pictures import history as long_history

from fabric_template.record.logger import CSVLogger
from fabric_template.record.read_back import read_logs
from fabric_template.tools.plots import COLORS, GREY, ON_BLACK, plot_logs

BLUE, ORANGE, GREEN = COLORS[:3]


def lines(ax):
    """Label -> (colour, points) of every line of a metric."""
    return {
        line.get_label(): (line.get_color(), list(zip(*line.get_data(), strict=True)))
        for line in ax.get_lines()
        if not line.get_label().startswith("_")
    }


def marks(ax, label):
    """The points of every mark of one kind."""
    return [
        tuple(map(float, point))
        for line in ax.get_lines()
        if line.get_label() == label
        for point in zip(*line.get_data(), strict=True)
    ]


def titles(axes):
    return [ax.get_title(loc="left") for ax in np.atleast_1d(axes)]


def legend(axes):
    found = np.atleast_1d(axes)[0].figure.legends[0]
    return found.get_title().get_text(), [text.get_text() for text in found.get_texts()]


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


# ---- what stands where


def test_losses_and_accuracies(history):
    axes = plot_logs(history)
    assert isinstance(axes, np.ndarray)
    left, right = axes
    assert lines(left) == {
        "train_loss": (BLUE, [(0, 3.0), (1, 2.0), (2, 1.0)]),
        "val_loss": (BLUE, [(0, 3.5), (2, 1.5)]),  # one line over the gap
    }
    assert lines(right) == {"val_acc": (BLUE, [(0, 0.2), (2, 0.8)])}
    assert (left.get_xlabel(), titles(axes)) == ("epoch", ["loss", "accuracy"])
    assert legend(axes) == ("", ["train", "validation"])
    assert [left.get_legend(), right.get_legend()] == [None, None]  # it stands outside


def test_train_is_thin_and_light_validation_bold_and_test_dotted(history):
    ax = plot_logs(history.assign(test_loss=1.0), metrics="loss")
    train, val, test = (line for line in ax.get_lines() if not line.get_label().startswith("_"))
    assert (train.get_linewidth(), train.get_alpha()) == (1.0, 0.65)
    assert (val.get_linewidth(), val.get_alpha(), val.get_linestyle()) == (2.2, None, "-")
    assert (test.get_linewidth(), test.get_linestyle()) == (2.2, ":")
    assert train.get_color() == val.get_color() == test.get_color()


def test_without_accuracies_there_is_one_axes(history):
    ax = plot_logs(history.drop(columns="val_acc"), x="step")
    assert lines(ax)["val_loss"][1] == [(10, 3.5), (30, 1.5)]
    assert ax.get_xlabel() == "step"
    assert ax.figure.axes == [ax]


def test_a_panel_for_each_quantity_that_is_asked_for(history):
    assert list(lines(plot_logs(history, metrics="lr"))) == ["lr"]
    axes = plot_logs(history.assign(val_f1=0.5, train_f1=0.4), metrics=["lr", "f1", "val_acc", "loss", "val_acc"])
    assert titles(axes) == ["loss", "accuracy", "f1", "learning rate"]
    assert [list(lines(ax)) for ax in axes] == [["train_loss", "val_loss"], ["val_acc"], ["val_f1", "train_f1"], ["lr"]]
    assert [ax.get_xlabel() for ax in axes] == ["", "", "epoch", "epoch"]
    axes[0].set_xlim(0, 1)
    assert axes[3].get_xlim() == (0, 1)  # shared


@pytest.mark.parametrize(
    ("name", "title"),
    [
        ("accuracy_macro", "accuracy"),
        ("val_acc_top1", "accuracy"),
        ("MulticlassAccuracy", "accuracy"),
        ("acc/val", "accuracy"),
        ("valid.acc5", "accuracy"),
        ("f1", "f1"),
        ("val_f1/dataloader_idx_1", "f1"),
        ("val/accordance", "accordance"),
        ("loss_recon", "loss"),
        ("training_loss_step", "loss"),
        ("lr-Adam/pg1", "learning rate"),
        ("lratio", "lratio"),
    ],
)
def test_names_find_their_panel(name, title):
    assert titles(plot_logs(pd.DataFrame({"epoch": [0, 1], name: [0.5, 0.6]}), metrics=name)) == [title]


def test_without_losses_and_accuracies_all_metrics_are_drawn():
    axes = plot_logs(pd.DataFrame({"epoch": [0], "step": [5], "f1": [1.0], "val_auroc": [0.5], "lr": [0.1]}))
    assert titles(axes) == ["f1", "auroc"]


def test_several_losses_share_a_panel_in_one_run_and_have_their_own_where_runs_are_compared(history):
    history["train_kl_loss"] = 0.5
    ax = plot_logs(history, metrics="loss")
    assert {label: color for label, (color, _) in lines(ax).items()} == {
        "train_loss": BLUE,
        "val_loss": BLUE,
        "train_kl_loss": ORANGE,
    }
    axes = plot_logs({"a": history, "b": history}, metrics="loss")
    assert titles(axes) == ["loss", "kl_loss"]


def test_into_given_axes_and_no_other_figure(history):
    _, ax = pyplot.subplots()
    before = pyplot.get_fignums()
    assert plot_logs(history, ax=ax) is ax
    assert pyplot.get_fignums() == before
    # loss and accuracy meet in one Axes: a colour each
    assert {label: color for label, (color, _) in lines(ax).items()} == {
        "train_loss": BLUE,
        "val_loss": BLUE,
        "val_acc": ORANGE,
    }
    plot_logs({"second": history}, metrics="val_loss", ax=ax)
    assert lines(ax)["second val_loss"][0] == GREEN
    assert [text.get_text() for text in ax.get_legend().get_texts()] == [*lines(ax)]


def test_colours_are_seen_on_black(history):
    with pyplot.style.context("dark_background"):
        assert lines(plot_logs(history)[0])["val_loss"][0] == ON_BLACK[0]


# ---- runs


def test_runs_are_compared_by_colour(root):
    ax = plot_logs(root)
    assert {label: color for label, (color, _) in lines(ax).items()} == {
        "digits/version_0 train_loss": BLUE,
        "digits/version_0 val_loss": BLUE,
        "digits/version_1 train_loss": ORANGE,
        "digits/version_1 val_loss": ORANGE,
    }
    assert legend(ax) == ("digits, thin: train, bold: validation", ["version_0", "version_1"])


def test_one_run_has_short_labels(root):
    for logs in (str(root / "digits/version_1"), [root / "digits/version_1"], root / "digits/version_1/metrics.csv"):
        assert list(lines(plot_logs(logs))) == ["train_loss", "val_loss"]


def test_dicts_and_lists(root, history):
    labels = list(lines(plot_logs({"new": history, "old": root}, metrics="val_loss")))
    assert labels == ["new val_loss", "old/digits/version_0 val_loss", "old/digits/version_1 val_loss"]
    labels = list(lines(plot_logs([history, root / "digits/version_1", history], metrics="val_loss")))
    assert labels == ["run 0 val_loss", "digits/version_1 val_loss", "run 2 val_loss"]


def test_a_column_of_another_run_draws_nothing(tmp_path):
    for name, column in (("a", "val_loss"), ("b", "test_loss")):
        CSVLogger(tmp_path, name=name, version="last").log_epoch({"epoch": 0, column: 1.0})
    assert lines(plot_logs(tmp_path)) == {
        "a/last val_loss": (BLUE, [(0, 1.0)]),
        "b/last test_loss": (ORANGE, [(0, 1.0)]),
    }


def test_of_more_than_twelve_runs_the_best_five_are_named(history):
    runs = {f"r{i:02}": history.assign(val_loss=[3.0, 2.0, float(i)], val_acc=[0.1, 0.2, i / 20]) for i in range(17)}
    axes = plot_logs(runs)
    title, names = legend(axes)
    assert title == "thin: train, bold: validation, named: the best 5 by val_loss"
    assert names == ["r00", "r01", "r02", "r03", "r04", "12 others"]
    grey = [line for line in axes[0].get_lines() if line.get_color() == GREY]
    assert [line.get_label() for line in grey] == [f"_r{i:02}" for i in range(5, 17)]  # what they were validated by
    assert {label.partition(" ")[0] for label in lines(axes[1])} == {"r00", "r01", "r02", "r03", "r04"}
    assert legend(plot_logs(dict(list(runs.items())[:12])))[1] == list(runs)[:12]


@pytest.fixture
def seeded(tmp_path):
    for version, (seed, hidden) in enumerate([(0, 32), (1, 32), (2, 32), (0, 64)]):
        logger = CSVLogger(tmp_path, name="digits", version=version)
        logger.log_hyperparams({"hparams": {"hidden": hidden}, "config": {"seed": seed, "max_epochs": 2}})
        for i in range(2):
            logger.log_epoch({"epoch": i, "val_loss": float(seed - i) + hidden})
    return tmp_path


def test_runs_that_differ_in_their_seed_alone_are_a_mean_with_a_band(seeded):
    ax = plot_logs(seeded)
    assert lines(ax) == {
        "digits hidden=32, mean of 3 val_loss": (BLUE, [(0, 33.0), (1, 32.0)]),
        "digits/version_3 val_loss": (ORANGE, [(0, 64.0), (1, 63.0)]),
    }
    (band,) = ax.collections
    assert (band.get_datalim(ax.transData).ymin, band.get_datalim(ax.transData).ymax) == (31.0, 34.0)
    assert legend(ax) == ("", ["digits hidden=32, mean of 3", "digits/version_3"])


def test_seeds_alone_a_frame_of_them_and_each_by_itself(seeded):
    (seeded / "digits/version_3/metrics.csv").unlink()
    ax = plot_logs(read_logs(seeded))  # a frame knows where it was read
    assert (list(lines(ax)), legend(ax)) == (["val_loss"], ("mean of 3 runs", []))
    assert len(lines(plot_logs(seeded, seeds=False))) == 3
    assert len(lines(plot_logs([seeded / f"digits/version_{i}" for i in range(3)]))) == 3  # asked for one by one


def test_seeds_of_different_length_and_over_time(seeded):
    for version in range(3):
        path = seeded / f"digits/version_{version}/metrics.csv"
        path.write_text("epoch,val_loss,time\n0,1.0,2.0\n" + "1,0.5,4.0\n" * (version > 0))
    ax = plot_logs(seeded / "digits", x="time", metrics="val_loss")
    assert lines(ax)["digits hidden=32, mean of 3 val_loss"][1] == [(2.0, 1.0), (6.0, 0.5)]


# ---- marks


def test_the_best_epoch_is_a_dot():
    frame = pd.DataFrame(
        {"epoch": range(4), "train_loss": 1.0, "val_loss": [3, 1, 2, 3.0], "val_acc": [0.1, 0.3, 0.4, 0.2]}
    )
    losses, accuracies = plot_logs(frame)
    assert marks(losses, "_best") == [(1.0, 1.0)]
    assert marks(accuracies, "_best") == [(2.0, 0.4)]
    assert marks(plot_logs(frame.assign(lr=0.1), metrics="lr"), "_best") == []


def test_no_markers_above_thirty_points():
    def markers(frame):
        return {line.get_marker() for line in plot_logs(frame)[0].get_lines() if line.get_label() == "val_loss"}

    assert (markers(long_history(30)), markers(long_history(31))) == ({"o"}, {"None"})


def test_nan_is_a_red_mark_where_it_begins():
    frame = long_history(6)
    frame.loc[3:, "train_loss"] = math.nan
    frame.loc[4:, "val_loss"] = math.inf
    losses, accuracies = plot_logs(frame)
    assert marks(losses, "_nan") == [(3.0, frame["train_loss"][2]), (4.0, frame["val_loss"][3])]
    assert [text.get_text() for text in losses.texts] == ["NaN"]
    assert marks(accuracies, "_nan") == []


def test_nan_from_the_beginning_and_where_validation_is_rare():
    frame = pd.DataFrame(
        {"epoch": range(6), "train_loss": math.nan, "val_loss": [math.nan, 1.0, math.nan, *[math.nan] * 3]}
    )
    assert marks(plot_logs(frame), "_nan") == [(0.0, 0.5), (3.0, 1.0)]


def test_what_was_not_measured_is_no_nan():
    """Validated every second epoch; or not in the last one, which max_steps has cut short."""
    every_second = pd.DataFrame(
        {"epoch": range(5), "train_loss": 1.0, "val_loss": [math.nan, 1, math.nan, 1, math.nan]}
    )
    assert marks(plot_logs(every_second), "_nan") == []
    cut = pd.DataFrame({"epoch": range(3), "train_loss": 1.0, "val_loss": [1, 1, math.nan]})
    assert marks(plot_logs(cut), "_nan") == []


def test_a_spike_does_not_flatten_the_rest():
    frame = pd.DataFrame({"epoch": range(10), "val_loss": [2.0, 1.5, 1.2, 1.0, 900.0, 0.9, 0.8, 0.7, 0.6, 0.5]})
    ax = plot_logs(frame)
    assert ax.get_ylim() == pytest.approx((0.41, 2.09))
    assert marks(ax, "_spike") == [(4.0, 1.0)]  # at the upper edge
    assert [text.get_text() for text in ax.texts] == ["900"]
    below = plot_logs(frame.assign(val_loss=-frame["val_loss"]))
    assert (below.get_ylim(), marks(below, "_spike")) == (pytest.approx((-2.09, -0.41)), [(4.0, 0.0)])


@pytest.mark.parametrize("epochs", [2, 3, 10, 300])
def test_a_curve_that_comes_down_is_no_spike(epochs):
    at = np.arange(epochs)
    ax = plot_logs(pd.DataFrame({"epoch": at, "val_loss": 0.01 + 5 * np.exp(-at / 3)}))
    assert marks(ax, "_spike") == []
    assert ax.get_ylim()[1] > 5


def test_resumes_are_ticks(root):
    (root / "digits/version_1/.lock").write_text("17\n18\nresumed after step 0 from last.ckpt\nfinished\n")
    ax = plot_logs(root)
    assert marks(ax, "_resumed") == [(0.5, 0.0)]  # between the epochs
    assert marks(plot_logs(root, x="step"), "_resumed") == [(0.0, 0.0)]


# ---- steps, time, ticks


def test_lightnings_names():
    names = ["train_loss_step", "train_loss_epoch", "val/loss", "val_acc/dataloader_idx_0", "val_acc/dataloader_idx_1"]
    left, right = plot_logs(pd.DataFrame({"epoch": [0], **{name: [1.0] for name in names}}))
    assert {label: color for label, (color, _) in lines(left).items()} == {"train_loss_epoch": BLUE, "val/loss": BLUE}
    assert [color for color, _ in lines(right).values()] == [BLUE, ORANGE]


def test_lightnings_file_over_steps_and_over_epochs(tmp_path):
    """Half-empty rows, and the learning rate without an epoch: every step is drawn over steps."""
    folder = tmp_path / "lightning_logs/version_0"
    folder.mkdir(parents=True)
    rows = ["epoch,lr-SGD,step,train_loss_epoch,train_loss_step,val_loss"]
    for epoch in range(2):
        for step in range(5 * epoch, 5 * epoch + 5):
            rows += [f",0.1,{step},,,", f"{epoch},,{step},,{9 - step}.5,"]
        rows += [f"{epoch},,{5 * epoch + 4},,,{2 - epoch}.0", f"{epoch},,{5 * epoch + 4},{7 - epoch}.0,,"]
    (folder / "metrics.csv").write_text("\n".join(rows) + "\n")
    assert lines(plot_logs(folder)) == {
        "train_loss_epoch": (BLUE, [(0, 7.0), (1, 6.0)]),
        "val_loss": (BLUE, [(0, 2.0), (1, 1.0)]),
    }
    drawn = lines(plot_logs(folder, x="step"))
    assert drawn["train_loss_step"] == (BLUE, [(step, 9.5 - step) for step in range(10)])
    assert drawn["val_loss"] == (BLUE, [(4, 2.0), (9, 1.0)])
    assert len(lines(plot_logs(pd.read_csv(folder / "metrics.csv"), metrics="lr-SGD"))["lr-SGD"][1]) == 10
    assert marks(plot_logs(folder), "_nan") == marks(plot_logs(folder, x="step"), "_nan") == []


def test_a_column_whose_name_has_two_lines_is_no_trouble(history):
    history["weight\nloss"] = 1.0
    plot_logs(history)


def test_numbers_that_are_all_missing_leave_the_axes_empty():
    ax = plot_logs(pd.DataFrame({"epoch": [0], "val_loss": [math.nan]}))
    assert lines(ax) == {}


def test_values_per_step_are_drawn_over_steps_and_means_over_epochs():
    """Lightning's names for both; where there is no mean, what there is."""
    both = pd.DataFrame(
        {"epoch": [0, 1], "step": [3, 7], "train_loss_step": [3.0, 2.0], "train_loss_epoch": [4.0, 1.0]}
    )
    assert list(lines(plot_logs(both))) == ["train_loss_epoch"]
    drawn = lines(plot_logs(both, x="step"))
    assert drawn["train_loss_step"] == (BLUE, [(3, 3.0), (7, 2.0)])
    assert list(drawn) == ["train_loss_step", "train_loss_epoch"]
    assert list(lines(plot_logs(both.drop(columns="train_loss_epoch")))) == ["train_loss_step"]


def test_over_steps_a_run_shows_its_steps_and_its_epochs(tmp_path):
    logger = CSVLogger(tmp_path, name="steps", version=0)
    for step in (1, 2):
        logger.log_metrics({"train_loss_step": 1.0 / step, "train_acc_step": 0.5}, step)
    logger.log_epoch({"epoch": 0, "step": 2, "val_loss": 0.7})
    left, right = plot_logs(tmp_path, x="step")
    assert lines(left) == {"val_loss": (BLUE, [(2, 0.7)]), "train_loss_step": (BLUE, [(1, 1.0), (2, 0.5)])}
    assert list(lines(right)) == ["train_acc_step"]
    assert list(lines(plot_logs(read_logs(tmp_path, steps=True), x="step")[0])) == ["train_loss_step"]


def test_many_points_are_smoothed_over_what_was_measured():
    frame = pd.DataFrame({"step": range(2000), "train_loss_step": [1.0, 3.0] * 1000})
    raw, smooth = plot_logs(frame, x="step").get_lines()
    assert (raw.get_label(), raw.get_alpha()) == ("_train_loss_step", 0.25)
    assert smooth.get_ydata()[-1] == pytest.approx(2.0, abs=0.02)
    assert np.ptp(smooth.get_ydata()[1000:]) < 0.05
    (alone,) = plot_logs(frame, x="step", smooth=0).get_lines()
    assert alone.get_ydata().tolist() == frame["train_loss_step"].tolist()
    _, much = plot_logs(frame[:3], x="step", smooth=0.5).get_lines()
    assert much.get_ydata().tolist() == pytest.approx([1.0, 7 / 3, 11 / 7])  # as TensorBoard does it


@pytest.mark.parametrize(
    ("seconds", "label", "last"),
    [(2.0, "seconds of training", 6.0), (100.0, "minutes of training", 5.0), (3000.0, "hours of training", 2.5)],
)
def test_time_is_what_has_passed(history, seconds, label, last):
    """A row has the seconds of its epoch; several runs begin at 0, each."""
    history["time"] = seconds
    ax = plot_logs({"a": history, "b": history}, x="time", metrics="train_loss")
    assert ax.get_xlabel() == label
    assert [points[-1] for _, points in lines(ax).values()] == [(last, 1.0)] * 2


@pytest.mark.parametrize("epochs", [1, 2, 3, 30])
def test_epochs_have_whole_ticks(epochs):
    ax = plot_logs(pd.DataFrame({"epoch": range(epochs), "val_loss": 1.0}))
    ax.figure.canvas.draw()
    low, high = ax.get_xlim()
    shown = [tick for tick in ax.get_xticks() if low <= tick <= high]
    assert shown
    assert all(tick == int(tick) and 0 <= tick < epochs for tick in shown)


def test_names_are_no_formulas_and_odd_numbers_no_trouble():
    frame = pd.DataFrame({"epoch": [0, 1, 2], "val_$loss$_^{": [3.0, 2.0, 1.0], "$f$": [1.0, 2.0, 3.0]})
    axes = plot_logs({"_a$": frame, "b$": frame, "$\\frac{": frame}, metrics=["val_$loss$_^{", "$f$"])
    axes[0].figure.canvas.draw()
    assert legend(axes)[1] == ["_a$", "b$", "$\\frac{"]
    plot_logs(frame, ax=pyplot.subplots()[1]).figure.canvas.draw()
    for values in ([math.inf, 1, 2], [1e300, -1e300, 1e-300], [0, 0, 0], [1e-8] * 3):
        plot_logs(pd.DataFrame({"epoch": [5, 5, 6], "val_loss": values})).figure.canvas.draw()


# ---- what is refused


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (
            {"metrics": ["val_los"]},
            r"no numbers to draw for val_los; the columns are epoch, step, train_loss, val_loss, ",
        ),
        ({"metrics": "note"}, r"no numbers to draw for note; the columns are epoch, step"),
        ({"x": "time"}, r"there is no column x='time'; the columns are epoch, .*, note: x='step', for example"),
        ({"smooth": 1}, r"smooth=1 is no share: expected a number from 0 to less than 1, such as 0\.9"),
    ],
)
def test_unknown_columns_are_answered_with_the_known(history, arguments, words):
    with pytest.raises(ValueError, match=words):
        plot_logs(history, **arguments)
    assert pyplot.get_fignums() == []


def test_nothing_to_draw_by_default():
    with pytest.raises(ValueError, match=r"there is no metric to draw; the columns are epoch, lr: choose"):
        plot_logs(pd.DataFrame({"epoch": [0], "lr": [1.0]}))


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
