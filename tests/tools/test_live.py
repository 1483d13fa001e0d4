"""What is drawn while a run trains: in a notebook by LivePlot, into a file by plot --watch."""

import json
import sys
from pathlib import Path

import nbformat
import pytest
from clock import Clock
from interpreter import ready
from modules import Classifier, make_loader
from nbclient import NotebookClient
from test_pictures import history
from test_runs import make

from fabric_template import CSVLogger, FabricLoop, LivePlot
from fabric_template.files.locks import one_writer
from fabric_template.tools import live, picture
from fabric_template.tools.cli import main

REPOSITORY = Path(__file__).resolve().parents[2]


class Screen:
    """Stands for IPython's display: what was shown first, and what took its place."""

    def __init__(self, monkeypatch):
        import IPython.display

        self.pictures, self.clock = [], Clock()
        monkeypatch.setattr(live, "_in_notebook", lambda: True)
        monkeypatch.setattr(live, "time", self.clock)
        monkeypatch.setattr(IPython.display, "display", self.display)

    def display(self, image, display_id):
        assert display_id is True
        assert self.pictures == []
        self.update(image)
        return self

    def update(self, image):
        self.pictures.append((self.clock.now - 1000, image.data))


def fit(*callbacks, epochs=5, **words):
    loop = FabricLoop(
        accelerator="cpu", max_epochs=epochs, callbacks=[*callbacks], enable_progress_bar=False,
        enable_model_summary=False, **words,
    )  # fmt: skip
    loop.fit(Classifier(), make_loader(8), make_loader(8, shuffle=False))
    return loop


class TakesTime:
    """Each epoch takes 0.4 s."""

    def __init__(self, clock):
        self.clock = clock

    def on_train_epoch_start(self, trainer, module):
        self.clock.sleep(0.4)


@pytest.mark.parametrize(
    ("drawing", "times"),
    [(0.0, [0.8, 2.0, 3.2, 3.2]), (0.2, [1.2, 3.8])],  # no more than a twentieth of the time is for pictures
)
def test_one_picture_is_redrawn_no_more_often_than_once_a_second(monkeypatch, drawing, times):
    screen = Screen(monkeypatch)
    drawn = []
    plain = LivePlot._picture

    def draw(self, folder):
        drawn.append(folder)
        screen.clock.sleep(drawing)
        return plain(self, folder)

    monkeypatch.setattr(LivePlot, "_picture", draw)
    loop = fit(TakesTime(screen.clock), LivePlot(), epochs=8)
    assert set(drawn) == {loop.log_dir}
    assert [at for at, _ in screen.pictures] == pytest.approx(times)
    assert all(image.startswith(b"\x89PNG") for _, image in screen.pictures)
    assert screen.pictures[-1][1] == plain(LivePlot(), loop.log_dir)  # the whole run


def test_words_are_those_of_plot_logs_and_what_cannot_be_drawn_is_not(monkeypatch):
    screen = Screen(monkeypatch)
    fit(LivePlot(metrics="nothing_of_that_name"), epochs=1)
    fit(LivePlot(), epochs=1, logger=False)
    assert screen.pictures == []
    fit(LivePlot(x="step", metrics=["loss"], smooth=0.5), epochs=1)
    assert len(screen.pictures) == 1


def test_a_run_that_fails_leaves_its_picture(monkeypatch):
    class Fails:
        def on_train_epoch_start(self, trainer, module):
            if trainer.current_epoch == 2:
                raise RuntimeError("no")

    screen = Screen(monkeypatch)
    loop = FabricLoop(
        accelerator="cpu",
        max_epochs=5,
        callbacks=[LivePlot(), Fails()],
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    with pytest.raises(RuntimeError):
        loop.fit(Classifier(), make_loader(8))
    assert screen.pictures[-1][1] == LivePlot()._picture(loop.log_dir)


def test_outside_of_a_notebook_nothing_is_drawn(monkeypatch):
    monkeypatch.setattr(LivePlot, "_picture", lambda self, folder: pytest.fail("nobody looks"))
    fit(LivePlot(), epochs=1)


CELL = """
import torch
from fabric_template import FabricLoop, LivePlot, TensorLoader
net = torch.nn.Linear(2, 1)
data = TensorLoader(torch.ones(8, 2), torch.zeros(8, 1), batch_size=4)
loop = FabricLoop(accelerator="cpu", max_epochs=4, enable_progress_bar=False, callbacks=[LivePlot()])
step = lambda net, batch: torch.nn.functional.mse_loss(net(batch[0]), batch[1])
loop.fit(net, data, optimizer=torch.optim.SGD(net.parameters(), lr=0.1), training_step=step);
"""


@pytest.mark.filterwarnings("ignore::DeprecationWarning:(zmq|jupyter_client|jupyter_core|nbclient).*")
def test_in_a_saved_notebook_one_plain_picture_is_left(tmp_path, monkeypatch):
    spec = tmp_path / "jupyter/kernels/live/kernel.json"
    spec.parent.mkdir(parents=True)
    argv = ready([sys.executable, "-m", "ipykernel_launcher", "-f", "{connection_file}"])
    spec.write_text(json.dumps({"argv": argv, "display_name": "live", "language": "python"}))
    for name, value in {
        "JUPYTER_PATH": tmp_path / "jupyter", "JUPYTER_RUNTIME_DIR": tmp_path / "jupyter/runtime",
        "IPYTHONDIR": tmp_path / "ipython", "PYTHONPATH": REPOSITORY, "CUDA_VISIBLE_DEVICES": "",
    }.items():  # fmt: skip
        monkeypatch.setenv(name, str(value))
    monkeypatch.setenv("MPLBACKEND", "module://matplotlib_inline.backend_inline")  # as a kernel has it
    notebook = nbformat.v4.new_notebook(cells=[nbformat.v4.new_code_cell(CELL)])
    done = NotebookClient(
        notebook, kernel_name="live", timeout=900, resources={"metadata": {"path": str(tmp_path)}}
    ).execute()
    shown = [output for output in done.cells[0].outputs if output.output_type != "stream"]
    assert [output.output_type for output in shown] == ["display_data"]
    assert set(shown[0]["data"]) == {"image/png", "text/plain"}


# ---- plot --watch


def test_a_picture_of_a_run_that_has_ended_is_drawn_once(capsys):
    folder = make("run", 0)
    assert main(["plot", str(folder), "--watch"]) == 0
    assert capsys.readouterr().out == f"picture     {folder}/history.png: the run has ended\n"
    assert Path(folder, "history.png").read_bytes().startswith(b"\x89PNG")


def test_a_picture_follows_its_run_and_ends_with_it(capsys, monkeypatch):
    logger = CSVLogger("logs", name="run", version=0)
    rows = iter(history(4).to_dict("records"))
    writer = one_writer([Path(logger.claim() and logger.log_dir or logger.log_dir)])
    writer.__enter__()
    drawn = []
    plain = picture.draw
    monkeypatch.setattr(picture, "draw", lambda paths, out, **words: drawn.append(plain(paths, out, **words)))

    def between(seconds):
        """In a second a row is written; after the last one, the run ends."""
        row = next(rows, None)
        if row is None:
            writer.__exit__(None, None, None)
        elif row["epoch"] != 2:  # a second without a row costs no picture
            logger.log_epoch(row)

    monkeypatch.setattr(picture.time, "sleep", between)
    picture.watch(["logs"], Path("out.png"))
    assert capsys.readouterr().out == "picture     out.png: watched until the run ends, or Ctrl-C\n"
    assert len(drawn) == 3
    assert Path("out.png").is_file()


def test_ctrl_c_ends_the_watching_and_is_no_error(capsys, monkeypatch):
    folder = make("run", 0)

    def interrupt(seconds):
        raise KeyboardInterrupt

    monkeypatch.setattr(picture.time, "sleep", interrupt)
    with one_writer([folder]):
        assert main(["plot", str(folder), "--watch", "--out", "a.png"]) == 0
    assert capsys.readouterr().out == (
        "picture     a.png: watched until the run ends, or Ctrl-C\npicture     a.png: no longer watched\n"
    )


def test_what_cannot_be_drawn_is_said(capsys):
    make("run", 0, rows=0)
    assert main(["plot", "logs", "--watch"]) == 2
    assert "there is no metrics.csv in 'logs'" in capsys.readouterr().err
