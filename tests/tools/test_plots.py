"""Test plot_logs and `fabric-template plot`."""

import math
from pathlib import Path

import numpy as np
import pandas as pd
import pytest
from matplotlib import pyplot

from fabric_template import CSVLogger, read_logs
from fabric_template.tools.cli import main
from fabric_template.tools.plots import PALETTE, plot_logs

HISTORY = pd.DataFrame(
    {
        "epoch": [0, 1, 2],
        "step": [10, 20, 30],
        "train_loss": [3.0, 2.0, 1.0],
        "val_loss": [3.5, math.nan, 1.5],
        "val_acc": [0.2, 0.9, 0.8],
        "lr": [0.1, 0.1, 0.1],
        "time": [2.0, 2.0, 2.0],
        "note": ["a", "b", "c"],
    }
)


@pytest.fixture(autouse=True)
def close_figures():
    yield
    pyplot.close("all")


def write_run(name, version, losses, seed=0, **options):
    logger = CSVLogger("logs", name=name, version=version)
    logger.log_hyperparams({"hparams": options, "config": {"seed": seed}})
    for epoch, loss in enumerate(losses):
        row = {"epoch": epoch, "step": 10 * (epoch + 1), "train_loss": loss + 1, "val_loss": loss}
        logger.log_epoch({**row, "time": 2.0 + seed})
    return logger


def lines(ax, label=None):
    """Return (label, color, points) of each line in an Axes, or only the points of lines with the given label."""
    found = [(line.get_label(), line.get_color(), line.get_xydata().tolist()) for line in ax.get_lines()]
    return [points for name, _, points in found if name == label] if label else found


def legend(ax):
    (found,) = ax.figure.legends
    return found.get_title().get_text(), [text.get_text() for text in found.get_texts()]


def test_plot_logs_draws_a_panel_for_each_metric_and_marks_the_best_value():
    losses, accuracies = plot_logs(HISTORY)
    assert lines(losses) == [
        ("train", PALETTE[0], [[0, 3], [1, 2], [2, 1]]),
        ("validation", PALETTE[0], [[0, 3.5], [2, 1.5]]),
        ("best", PALETTE[0], [[2, 1.5]]),
    ]
    assert lines(accuracies, "best") == [[[1, 0.9]]]
    assert [ax.get_ylabel() for ax in (losses, accuracies)] == ["loss", "acc"]
    assert losses.get_xlabel() == "epoch"
    assert legend(losses) == ("", ["train", "validation", "best"])
    train, val, _ = losses.get_lines()
    assert train.get_linewidth() < val.get_linewidth()


@pytest.mark.parametrize(
    ("metrics", "labels"),
    [
        ("lr", ["lr"]),
        (["lr", "f1", "accuracy", "loss"], ["loss", "acc", "f1", "lr"]),
        (["val_acc", "val_acc"], ["acc"]),
    ],
)
def test_plot_logs_accepts_metric_names_with_or_without_the_prefix_val(metrics, labels):
    axes = np.ravel(plot_logs(HISTORY.assign(val_f1=0.5, train_f1=0.4), metrics=metrics))
    assert [ax.get_ylabel() for ax in axes] == labels
    axes[0].figure.canvas.draw()


@pytest.mark.parametrize(("metric", "best"), [("val_mse", [[1, 1]]), ("val_f1", [[0, 3]]), ("val_gap", None)])
def test_plot_logs_marks_best_values_only_for_metrics_with_a_known_direction(metric, best):
    ax = plot_logs(pd.DataFrame({"epoch": [0, 1, 2], metric: [3.0, 1.0, 2.0]}), metrics=metric)
    assert lines(ax, "best") == ([best] if best else [])
    assert ("best" in legend(ax)[1]) == bool(best)


def test_plot_logs_draws_runs_in_different_colors_and_sorts_them_by_version_number():
    for version in (10, 2):
        write_run("digits", version, [2.0, 1.0])
    ax = plot_logs("logs")
    expected = ["digits/version_2", "digits/version_10"]
    assert [(label, color) for label, color, _ in lines(ax) if label != "best"] == [
        (label, color) for label, color in zip(expected, PALETTE, strict=False) for _ in range(2)
    ]
    title, labels = legend(ax)
    assert title == "thin: train, bold: validation"
    assert [label for label in labels if label != "best"] == expected


def test_eighteen_runs_differ_in_color_or_dash_pattern():
    ax = plot_logs([HISTORY] * 18, metrics="val_loss")
    runs = [line for line in ax.get_lines() if line.get_label() != "best"]
    assert len({(line.get_color(), line.get_linestyle()) for line in runs}) == 18


def test_plot_logs_adds_a_label_for_each_run_in_a_list_or_dict():
    write_run("digits", 0, [1.0])
    path = Path("logs/digits/version_0")
    for logs, labels in (
        ([HISTORY, path], ["run 0", "digits/version_0"]),
        ({"new": HISTORY, "old": path / "metrics.csv"}, ["new", "old"]),
        ({"_a": HISTORY, "b$": read_logs(path)}, [" _a", "b$"]),
        ({"best": HISTORY, "last": HISTORY}, [" best", "last"]),
        ([path, path / "metrics.csv"], ["digits/version_0 (1)", "digits/version_0 (2)"]),
    ):
        ax = plot_logs(logs, metrics="val_loss")
        assert [label for label, *_ in lines(ax) if label != "best"] == labels
        assert legend(ax)[1] == [*labels, "best"]
        ax.figure.canvas.draw()


@pytest.mark.parametrize("x", ["epoch", "step", "time"])
def test_plot_logs_draws_the_mean_and_range_of_runs_that_differ_only_in_the_seed(x):
    for version, (seed, hidden) in enumerate([(0, 32), (1, 32), (2, 32), (0, 64)]):
        write_run("digits", version, [float(seed), seed - 2.0], seed=seed, hidden=hidden)
    ax = plot_logs("logs", x=x, metrics="val_loss")
    places = {"epoch": [0, 1], "step": [10, 20], "time": [3, 6]}[x]
    assert lines(ax, "digits hidden=32, mean of 3") == [[[places[0], 1], [places[1], -1]]]
    assert len(lines(ax, "digits/version_3")) == 1
    band = ax.collections[0].get_datalim(ax.transData)
    assert (band.ymin, band.ymax) == (-2, 2)
    assert len(lines(plot_logs("logs", seeds=False, metrics="val_loss"), "best")) == 4


def test_the_mean_of_runs_combines_only_rows_of_the_same_epoch():
    write_run("digits", 0, [4.0, 3.0, 2.0])
    file = Path(write_run("digits", 1, [6.0, 5.0, 4.0], seed=1).log_dir, "metrics.csv")
    header, _, *rows = file.read_text().splitlines(keepends=True)
    file.write_text("".join([header, *rows]))
    ax = plot_logs("logs", metrics="val_loss")
    assert lines(ax, "validation") == [[[0, 4], [1, 4], [2, 3]]]


def test_a_plot_against_steps_shows_the_values_in_steps_csv():
    logger = write_run("digits", 0, [0.5])
    for step in (5, 10):
        logger.log_metrics({"train_loss": 1.0 / step, "val_other_loss": 1.0}, step)
    loss, _ = plot_logs("logs", x="step")
    assert lines(loss, "train") == [[[5, 0.2], [10, 0.1]]]
    assert lines(loss, "validation") == [[[10, 0.5]]]


def test_the_x_axis_of_a_step_based_run_shows_steps():
    """Batch losses are pale, their average is a line, and validations are connected points."""
    logger = CSVLogger("logs", name="steps", version=0)
    for step in range(1, 101):
        logger.log_metrics({"train_loss": float(step % 2), "lr": 0.1}, step)
    for step in (30, 60, 100):
        logger.log_epoch({"epoch": 0, "step": step, "train_loss": 0.5, "val_loss": 1.0 / step, "lr": 0.1})
    ax = plot_logs("logs")
    assert ax.get_xlabel() == "step"
    raw, average, validation, _ = ax.get_lines()
    assert len(raw.get_xdata()) == len(average.get_xdata()) == 100
    assert raw.get_alpha() < average.get_alpha()
    assert np.ptp(average.get_ydata()[50:]) < 0.2 < np.ptp(raw.get_ydata())
    assert (validation.get_xdata().tolist(), validation.get_marker()) == ([30, 60, 100], ".")


def test_long_noisy_curves_get_a_moving_average():
    frame = pd.DataFrame({"step": range(2000), "train_loss": [1.0, 3.0] * 1000})
    raw, smooth = plot_logs(frame, x="step").get_lines()
    assert np.ptp(raw.get_ydata()) == 2
    assert np.ptp(smooth.get_ydata()[1000:]) < 0.1
    assert len(plot_logs(frame, x="step", smooth=0).get_lines()) == 1
    assert len(plot_logs(frame.rename(columns={"train_loss": "val_loss"}), x="step").get_lines()) == 2
    _, half = plot_logs(frame[:3], x="step", smooth=0.5).get_lines()
    # TensorBoard's smoothing gives the same values.
    assert half.get_ydata() == pytest.approx([1.0, 7 / 3, 11 / 7])


@pytest.mark.parametrize(
    ("losses", "expected"),
    [
        ([0.9, 0.6, 0.4], ["0.4", "0.5", "0.6", "0.7", "0.8", "0.9"]),
        ([5.0, 0.1, 0.005], ["0.005", "0.01", "0.02", "0.05", "0.1", "0.2", "0.5", "1", "2", "5"]),
    ],
)
def test_tick_labels_of_a_log_scale_are_plain_numbers(losses, expected):
    ax = plot_logs(pd.DataFrame({"epoch": [0, 1, 2], "val_loss": losses}), log=True)
    ax.figure.canvas.draw()
    low, high = ax.get_ylim()
    labels = [tick.label1.get_text() for tick in ax.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert labels == expected
    assert not any(text.get_text() for text in ax.get_yticklabels(minor=True))


@pytest.mark.parametrize("num_epochs", [60, 10_000])
def test_epoch_means_are_drawn_without_smoothing(num_epochs):
    epochs = np.arange(num_epochs)
    loss = 10.0 * np.exp(-epochs / 3) + 1e-3
    frame = pd.DataFrame({"epoch": epochs, "step": 10 * epochs, "train_loss": loss, "val_loss": loss})
    for x in ("epoch", "step"):
        train, validation, _ = plot_logs(frame, x=x).get_lines()
        assert train.get_ydata().tolist() == validation.get_ydata().tolist() == loss.tolist()


def test_the_moving_average_stays_close_to_a_steeply_falling_loss():
    steps = np.arange(10_000)
    loss = 100 / (1 + steps)
    _, average = plot_logs(pd.DataFrame({"step": steps, "train_loss": loss})).get_lines()
    ratios = average.get_ydata() / loss
    assert ratios[0] == 1
    assert ratios.min() > 0.999
    assert ratios.max() < 1.25


def test_plot_logs_omits_a_run_without_csv_rows():
    logger = write_run("digits", 0, [2.0, 1.0])
    logger.log_metrics({"train_loss": 3.0}, 5)
    CSVLogger("logs", name="digits", version=1).log_hyperparams({"config": {"seed": 1}})
    Path("logs/digits/version_2").mkdir()
    Path("logs/digits/version_2/metrics.csv").write_text("epoch,step,train_loss\n")
    ax = plot_logs("logs")
    assert [label for label, *_ in lines(ax)] == ["train", "validation", "best"]
    with pytest.raises(ValueError, match="plot_logs: got logs without numbers"):
        plot_logs("logs/digits/version_2")


def test_only_the_best_eight_of_75_runs_are_drawn_in_color():
    runs = {f"width {i} of the sweep": HISTORY.assign(val_loss=HISTORY["val_loss"] + 75 - i) for i in range(75)}
    ax = plot_logs(runs, metrics="loss")
    best = [f"width {i} of the sweep" for i in range(67, 75)]
    assert legend(ax)[1] == [*best, "67 other runs", "best"]
    assert ax.figure.get_figheight() < 6
    assert len([line for line in ax.get_lines() if line.get_label() == "67 other runs"]) == 2 * 67


@pytest.mark.parametrize(("count", "note"), [(18, ""), (20, "18 of 20 metrics, choose others with metrics=")])
def test_a_figure_with_18_panels_fits_on_a_screen(count, note):
    history = HISTORY[["epoch"]].assign(**{f"val_m{i}": 1.0 * i for i in range(count)})
    axes = plot_logs(history)
    assert (len(axes), axes[0].figure.get_figheight() * 120 < 1400) == (18, True)
    assert legend(axes[0])[0] == note
    assert len(plot_logs(history, metrics=[*history])) == count + 1


def test_a_long_metric_name_fits_beside_its_panel():
    name = "info/learner/default_policy/learner_stats/total_loss"
    ax = plot_logs(pd.DataFrame({"epoch": [0, 1], name: [2.0, 1.0]}))
    ax.figure.canvas.draw()
    assert ax.get_ylabel().endswith("/learner_stats/total_loss")
    label = ax.yaxis.label.get_window_extent()
    assert (label.y0 >= 0, label.y1 <= ax.figure.bbox.height) == (True, True)


@pytest.mark.parametrize("decades", [2, 5, 9, 14])
def test_a_log_scale_has_3_to_12_tick_labels(decades):
    ax = plot_logs(pd.DataFrame({"epoch": [0, 1], "val_loss": [10.0**-decades, 1.0]}), log=True)
    ax.figure.canvas.draw()
    low, high = ax.get_ylim()
    labels = [tick.label1.get_text() for tick in ax.yaxis.get_major_ticks() if low <= tick.get_loc() <= high]
    assert 3 <= len([label for label in labels if label]) <= 12


@pytest.mark.parametrize(
    ("places", "values", "x_label", "y_label"),
    [
        ([0, 150_000], [1.0, 2.0], "100k", "1.2"),
        ([0, 2 * 10**10], [1.0, 2.0], "10G", "1.2"),
        ([0.25, 0.5, 0.75, 1.0], [4.0, 3.0, 2.0, 1.0], "0.4", "1.5"),
        ([0, 1], [1000.0, 1000.0002], "1", "1000.000100"),
    ],
)
def test_tick_labels_of_large_values_and_of_almost_equal_values_are_readable(places, values, x_label, y_label):
    axis = "epoch" if places[-1] == 1 else "step"
    ax = plot_logs(pd.DataFrame({axis: places, "val_loss": values}))
    ax.figure.canvas.draw()
    labels = [[text.get_text() for text in axis.get_ticklabels()] for axis in (ax.xaxis, ax.yaxis)]
    assert x_label in labels[0]
    assert y_label in labels[1]


def test_a_panel_with_negative_values_has_no_log_scale():
    axes = plot_logs(pd.DataFrame({"epoch": [0, 1], "val_loss": [1.0, -1.0], "val_acc": [0.1, 0.2]}), log=True)
    assert [ax.get_yscale() for ax in axes] == ["linear", "log"]


def test_plot_logs_draws_two_validation_columns_in_one_panel_in_different_colors():
    columns = {"train_loss": [3, 2], "val_loss/dataloader_idx_0": [3, 2], "val_loss/dataloader_idx_1": [4, 3]}
    ax = plot_logs(pd.DataFrame({"epoch": [0, 1], **columns}))
    drawn = {label: color for label, color, _ in lines(ax) if label != "best"}
    assert list(drawn) == ["train", "val_loss/dataloader_idx_0", "val_loss/dataloader_idx_1"]
    assert len(set(drawn.values())) == 2


def test_long_run_names_fit_in_the_figure():
    label = "width=128, dropout=0.1, optimizer=adamw, schedule=cosine, warmup=500, batch_size=32, seed="
    ax = plot_logs({f"{label}{seed}": HISTORY for seed in range(3)}, metrics="loss")
    ax.figure.canvas.draw()
    box, figure = ax.figure.legends[0].get_window_extent(), ax.figure.bbox
    assert (box.x0 >= 0, box.x1 <= figure.width, box.y0 >= 0) == (True, True, True)
    assert ax.get_window_extent().height > 0.3 * figure.height


def test_plot_logs_draws_on_the_given_axes():
    _, ax = pyplot.subplots()
    assert plot_logs(HISTORY, ax=ax) is ax
    plot_logs({"second": HISTORY, "third": HISTORY}, metrics="val_loss", ax=ax)
    drawn = {label: color for label, color, _ in lines(ax) if label != "best"}
    assert list(drawn) == ["train_loss", "val_loss", "val_acc", "second val_loss", "third val_loss"]
    assert len(set(drawn.values())) == 5
    assert len(pyplot.get_fignums()) == 1
    plot_logs({"_a$x_$": HISTORY, "b": HISTORY}, metrics="val_loss", ax=ax)
    ax.plot([0, 1], label="$\\alpha$")
    texts = [text.get_text() for text in ax.legend_.get_texts()]
    assert " _a$x_$ val_loss" in texts
    ax.figure.canvas.draw()


def test_plot_logs_sets_a_log_scale_on_the_given_axes():
    _, ax = pyplot.subplots()
    assert plot_logs(HISTORY, ax=ax, log=True).get_yscale() == "log"


def test_plot_logs_does_not_add_up_a_cumulative_time_column():
    table = pd.DataFrame({"epoch": [1, 2, 3], "time": [10.0, 20.0, 31.0], "val_loss": [3.0, 2.0, 1.0]})
    for path, places in (("results.csv", [10, 20, 31]), ("metrics.csv", [10, 30, 61])):
        table.to_csv(path, index=False)
        assert plot_logs(path, x="time").get_lines()[0].get_xdata().tolist() == places


def test_plot_logs_adds_up_the_durations_in_a_column_with_an_upper_case_name():
    ax = plot_logs(HISTORY.rename(columns={"time": "Time"}), x="time")
    assert ax[0].get_lines()[0].get_xdata().tolist() == [2, 4, 6]


def test_plot_logs_draws_a_dataframe_with_equal_column_names_or_a_missing_run_name():
    table = pd.DataFrame([[0, 3, 5, 1], [1, 2, 4, 1]], columns=["epoch", "loss", "loss", "epoch"])
    assert lines(plot_logs(table)[0], "train") == [[[0, 3], [1, 2]]]
    assert lines(plot_logs(table, metrics="loss.1"), "train") == [[[0, 5], [1, 4]]]
    table = pd.concat([HISTORY.assign(name="a", version=0), HISTORY])
    assert legend(plot_logs(table, metrics="val_loss"))[1] == ["a/0.0", "nan/nan", "best"]


def test_plot_logs_draws_infinite_values_and_unusual_column_names():
    plot_logs(pd.DataFrame({"epoch": [5, 5, 6], "val_$loss\n": [math.inf, 1, 2]})).figure.canvas.draw()


@pytest.mark.parametrize(
    ("logs", "options", "error", "message"),
    [
        (
            HISTORY,
            {"metrics": "val_los"},
            ValueError,
            "metrics: got 'val_los', expected one of the numeric columns epoch",
        ),
        (HISTORY, {"x": "hour"}, ValueError, "x: got 'hour', expected one of the numeric columns epoch, step"),
        (HISTORY, {"x": "note"}, ValueError, "x: got 'note', expected one of the numeric columns epoch, step"),
        (HISTORY, {"x": 3}, ValueError, "x: got 3, expected one of the numeric columns epoch, step"),
        (HISTORY, {"metrics": 5}, ValueError, "metrics: got 5, expected one of the numeric columns epoch"),
        (HISTORY, {"smooth": 1}, ValueError, "smooth: got 1, expected a number >= 0 and < 1"),
        (HISTORY, {"smooth": "0.9"}, ValueError, "smooth: got '0.9', expected a number >= 0 and < 1"),
        (HISTORY, {"ax": "left"}, TypeError, "ax: got 'left', expected Axes"),
        (
            pd.DataFrame({"epoch": [0], "val_x": pd.to_timedelta([1], unit="s"), "val_y": [1j]}),
            {},
            ValueError,
            "metrics: got no metric to draw",
        ),
        (HISTORY[["epoch", "lr"]], {}, ValueError, "metrics: got no metric to draw, .* Write metrics=.'lr'."),
        (HISTORY[["epoch", "note"]], {}, ValueError, "got no metric to draw, .* Only numbers are drawn"),
        ("no.csv", {}, ValueError, "plot_logs: got 'no.csv', expected a folder or a CSV file"),
        (3, {}, TypeError, "plot_logs: got 3, expected a path or a DataFrame"),
        ("nowhere", {}, ValueError, "got 'nowhere', expected a folder"),
        (".", {}, ValueError, "got '.', expected a folder with a metrics.csv"),
    ],
)
def test_plot_logs_refuses_invalid_arguments(logs, options, error, message):
    with pytest.raises(error, match=message):
        plot_logs(logs, **options)
    assert pyplot.get_fignums() == []


def test_the_plot_command_writes_a_picture(capsys):
    write_run("a", 0, [1.0])
    write_run("b", 0, [1.0])
    assert main(["plot"]) == 0
    assert main(["plot", "logs/a/version_0/metrics.csv", "logs/b", "--metrics", "loss", "--out", "x.png"]) == 0
    assert capsys.readouterr().out.split() == ["picture", "logs/history.png", "picture", "x.png"]
    for path in ("logs/history.png", "x.png"):
        assert Path(path).read_bytes().startswith(b"\x89PNG")
    assert main(["plot", "--out", "no/x.png"]) == 2
    assert "out: got 'no/x.png', expected a .png, .pdf or .svg" in capsys.readouterr().err
