"""Pictures of every size of logs: nothing overlaps, and the axes have most of the room, as the renderer measures them."""

import numpy as np
import pandas as pd
import pytest
from matplotlib.transforms import Bbox

from fabric_template.record.logger import CSVLogger
from fabric_template.tools.plots import plot_logs


def history(epochs=10, seed=0, **more):
    """A history as a fit leaves it: curves that come down and get better, with some noise."""
    draw = np.random.default_rng(seed)
    at = np.arange(epochs)
    noise = draw.normal(0, 0.02, (4, epochs))
    columns = {
        "epoch": at,
        "step": 20 * (at + 1),
        "train_loss": 2.2 * np.exp(-at / (2 + seed % 5)) + 0.1 + np.abs(noise[0]),
        "val_loss": 2.1 * np.exp(-at / (2 + seed % 5)) + 0.2 + np.abs(noise[1]),
        "train_acc": 1 - 0.9 * np.exp(-at / (3 + seed % 4)) - np.abs(noise[2]),
        "val_acc": 0.97 - 0.87 * np.exp(-at / (3 + seed % 4)) - np.abs(noise[3]),
        "lr": 0.1 * 0.5 * (1 + np.cos(np.pi * at / epochs)),
        "time": 30 + 5 * draw.random(epochs),
    }
    return pd.DataFrame({**columns, **more})


def steps(count=10_000):
    at = np.arange(1, count + 1)
    noise = np.random.default_rng(0).normal(0, 0.3, count)
    return pd.DataFrame(
        {"step": at, "epoch": at // 500, "train_loss_step": 2 * np.exp(-at / 2000) + 0.3 + np.abs(noise) * 0.5}
    )


def spiked():
    frame = history(40)
    frame.loc[17, "train_loss"], frame.loc[18, "val_loss"] = 4e3, 950.0
    return frame


def broken():
    frame = history(20)
    frame.loc[13:, ["train_loss", "val_loss"]] = np.nan
    return frame


def ten_metrics():
    draw = np.random.default_rng(0)
    names = ["f1", "auroc", "precision", "recall", "mse", "perplexity", "iou", "dice"]
    return history(15, **{f"val_{name}": np.sort(draw.random(15)) for name in names})


def runs(count, epochs=10, name="digits/version_{}"):
    return {name.format(i): history(epochs, seed=i) for i in range(count)}


def folder_with_everything(root):
    """Three seeds of one configuration beside two of another, of which one was resumed."""
    for version in range(5):
        wide = version > 2
        logger = CSVLogger(root, name="wide" if wide else "digits", version=version)
        logger.log_hyperparams({"hparams": {"hidden": 64 + wide}, "config": {"seed": version, "max_epochs": 12}})
        for row in history(12, seed=version).to_dict("records"):
            logger.log_epoch({**row, "epoch": int(row["epoch"]), "step": int(row["step"])})
    lines = "17\nresumed after step 100 from last.ckpt\n19\nresumed after step 180 from last.ckpt\nfinished\n"
    (root / "wide/version_3/.lock").write_text(lines)
    return root


NAMES = ["f1", "auroc", "precision", "recall", "mse", "perplexity", "iou", "dice", "loss", "lr"]
CASES = {
    "1 run": lambda root: plot_logs(history()),
    "1 run, losses only": lambda root: plot_logs(history().drop(columns=["train_acc", "val_acc"])),
    "5 runs": lambda root: plot_logs(runs(5)),
    "12 runs": lambda root: plot_logs(runs(12)),
    "40 runs": lambda root: plot_logs(runs(40)),
    "12 runs, one panel, long names": lambda root: plot_logs(
        runs(12, name="experiments/wide-and-deep/version_{}"), metrics="val_loss"
    ),
    "1 epoch": lambda root: plot_logs(history(1)),
    "5 runs of 1 epoch": lambda root: plot_logs(runs(5, epochs=1)),
    "300 epochs": lambda root: plot_logs(history(300)),
    "10,000 steps": lambda root: plot_logs(steps(), x="step"),
    "10,000 steps, not smoothed": lambda root: plot_logs(steps(), x="step", smooth=0),
    "NaN": lambda root: plot_logs(broken()),
    "NaN among 5": lambda root: plot_logs({**runs(4, epochs=20), "broken": broken()}),
    "spike": lambda root: plot_logs(spiked()),
    "learning rate": lambda root: plot_logs(history(50), metrics=["loss", "accuracy", "lr"]),
    "10 metrics": lambda root: plot_logs(ten_metrics(), metrics=NAMES),
    "10 metrics of 5 runs": lambda root: plot_logs(
        {f"run {i}": ten_metrics().assign(val_loss=i + 1.0) for i in range(5)}, metrics=NAMES
    ),
    "4 metrics": lambda root: plot_logs(ten_metrics(), metrics=NAMES[:4]),
    "5 metrics": lambda root: plot_logs(ten_metrics(), metrics=NAMES[:5]),
    "hours": lambda root: plot_logs(history(500), x="time"),
    "seeds and resumes": lambda root: plot_logs(folder_with_everything(root)),
}


def measured(figure):
    """The panels' boxes and the legend's, drawn, in pixels; and the share of the figure that the panels have."""
    figure.canvas.draw()
    renderer = figure.canvas.get_renderer()
    axes = figure.axes
    whole = [ax.get_tightbbox(renderer) for ax in axes]
    inner = [ax.get_window_extent(renderer) for ax in axes]
    legends = [legend.get_window_extent(renderer) for legend in figure.legends]
    share = sum(box.width * box.height for box in inner) / (figure.bbox.width * figure.bbox.height)
    return whole, inner, legends, share


def overlap(one, other):
    shared = Bbox.intersection(one, other)
    return shared is not None and shared.width > 1 and shared.height > 1


@pytest.mark.parametrize("case", CASES)
def test_nothing_overlaps_and_the_axes_have_most_of_the_room(case, tmp_path):
    figure = np.atleast_1d(CASES[case](tmp_path))[0].figure
    whole, _, legends, share = measured(figure)
    assert share >= 0.6
    boxes = [*whole, *legends]
    assert not [(i, j) for i in range(len(boxes)) for j in range(i) if overlap(boxes[i], boxes[j])]
    for box in boxes:  # nothing is cut off at the edge
        assert box.x0 >= -1
        assert box.y0 >= -1
        assert box.x1 <= figure.bbox.x1 + 1
        assert box.y1 <= figure.bbox.y1 + 1
    assert len(legends) <= 1
