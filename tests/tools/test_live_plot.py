"""Test when LivePlot draws in a notebook, and that it never stops a run."""

from unittest.mock import Mock

import pytest
from clock import Clock
from lightning.pytorch.callbacks import Callback
from modules import Classifier, make_loader
from processes import run_processes

from fabric_template import FabricLoop, LivePlot
from fabric_template.tools import plots


class Notebook:
    """A fake IPython kernel that records each picture and the time at which it is shown."""

    # matplotlib registers its event handlers at these attributes.
    kernel = events = Mock()

    def __init__(self, monkeypatch):
        self.clock, self.shown = Clock(), []
        monkeypatch.setattr("IPython.get_ipython", lambda: self)
        monkeypatch.setattr("IPython.display.display", self.display)
        monkeypatch.setattr(plots, "time", self.clock)

    def display(self, image, display_id):
        # Only the first picture may be displayed, because later pictures must replace it with update().
        assert self.shown == []
        self.update(image)
        return self

    def update(self, image):
        self.shown.append((self.clock.now - 1000, image.data))

    def on_train_epoch_start(self, trainer, module):
        """Make each epoch take 0.4 s."""
        self.clock.sleep(0.4)


@pytest.fixture
def notebook(monkeypatch):
    return Notebook(monkeypatch)


def fit(*callbacks, epochs=8, **options):
    quiet = {"accelerator": "cpu", "enable_progress_bar": False, "enable_model_summary": False}
    loop = FabricLoop(max_epochs=epochs, callbacks=[*callbacks], **quiet, **options)
    loop.fit(Classifier(), make_loader(8), make_loader(8, shuffle=False))
    return loop


def test_redrawing_the_plot_takes_at_most_5_percent_of_the_training_time(notebook, monkeypatch):
    render = plots.render_picture

    def render_slowly(*args, **options):
        notebook.clock.sleep(0.1)
        return render(*args, **options)

    monkeypatch.setattr(plots, "render_picture", render_slowly)
    fit(notebook, LivePlot(), epochs=22)
    # Leave out the last picture, which is always drawn at the end of the run.
    *times, _ = (at for at, _ in notebook.shown)
    gaps = [after - before for before, after in zip(times, times[1:], strict=False)]
    assert len(gaps) >= 2
    assert min(gaps) >= 2.0 - 0.01
    assert max(gaps) < 2.0 + 1.0
    assert all(picture.startswith(b"\x89PNG") for _, picture in notebook.shown)


def test_live_plot_draws_every_epoch_even_if_the_first_plot_is_slow(notebook, monkeypatch):
    """Only the first picture takes extra time, to import matplotlib."""
    render = plots.render_picture

    def import_and_render(*args, **options):
        notebook.clock.sleep(0.02 if notebook.shown else 6.0)
        return render(*args, **options)

    class SlowEpochs(Callback):
        def on_train_epoch_start(self, trainer, module):
            notebook.clock.sleep(2.2)

    monkeypatch.setattr(plots, "render_picture", import_and_render)
    fit(SlowEpochs(), LivePlot(), epochs=6)
    # Each of the first five epochs is drawn when the next epoch starts, and the last epoch at the end of the run.
    assert len(notebook.shown) == 6


def test_live_plot_does_not_draw_again_without_new_csv_rows(notebook):
    class SlowBatches(Callback):
        def on_train_batch_end(self, *args):
            notebook.clock.sleep(5.0)

    fit(SlowBatches(), LivePlot(), epochs=3)
    assert len(notebook.shown) == 3


def test_an_error_in_live_plot_does_not_stop_the_run(notebook, monkeypatch):
    fit(LivePlot(), epochs=1, logger=False)
    monkeypatch.setattr(plots, "render_picture", lambda *args, **options: 1 / 0)
    with pytest.warns(UserWarning, match="LivePlot: the run could not be drawn: division by zero"):
        fit(LivePlot(), epochs=1)
    assert notebook.shown == []


def test_a_run_trained_with_live_plot_can_resume_without_live_plot(notebook, recwarn):
    fit(LivePlot(), epochs=1)
    loop = FabricLoop(max_epochs=2, accelerator="cpu", enable_progress_bar=False)
    history = loop.fit(Classifier(), make_loader(8), make_loader(8, shuffle=False), resume="last")
    assert len(history) == 2
    assert [str(warning.message) for warning in recwarn if "LivePlot" in str(warning.message)] == []


def train_with_plot(rank):
    plot = LivePlot()
    if rank == 1:
        # Prevent process 1 from drawing, so that the two processes differ.
        plot.on_train_batch_start = lambda *_: None
    loop = fit(plot, epochs=2)
    assert loop.current_epoch == 2


def test_live_plot_does_not_hang_even_if_the_processes_draw_at_different_batches():
    """If only one process read log_dir, it would wait forever for the other process."""
    assert run_processes(train_with_plot, timeout=60)[0] == [0, 0]
