"""Live: a callback that redraws the curves in a notebook while a run trains."""

from __future__ import annotations

import io
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHARE = 0.05  # of the time, at most, goes into pictures


class LivePlot:
    """Redraws what `plot_logs` draws, at most once a second; what stays in the notebook is a plain picture.

    It reads the run's metrics.csv as epochs end, and steps.csv with ``x="step"``. Where no notebook is (a script, a batch
    job), it does nothing; ``fabric-template plot --watch`` is for these.

    Args:
        x: "epoch", "step" or "time".
        **words: the other words of `plot_logs`, such as metrics=["val_loss", "lr"].

    Example:
        >>> from fabric_template import FabricLoop, LivePlot
        >>> loop = FabricLoop(max_epochs=10, callbacks=[LivePlot(metrics=["loss"])])
    """

    def __init__(self, x: str = "epoch", metrics: str | Sequence[str] | None = None, **words: Any) -> None:
        self.words = {"x": x, "metrics": metrics, **words}
        self._handle: Any = None
        self._due = 0.0

    def on_train_start(self, trainer: Any, module: Any) -> None:
        """A new run has a picture of its own."""
        self._handle, self._due = None, 0.0

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """The row of the epoch before is on disk."""
        self._draw(trainer)

    def on_validation_end(self, trainer: Any, module: Any) -> None:
        """Over steps there is something new in the middle of an epoch, too."""
        if self.words["x"] == "step":
            self._draw(trainer)

    def on_fit_end(self, trainer: Any, module: Any) -> None:
        """The whole run."""
        self._draw(trainer, always=True)

    def on_exception(self, trainer: Any, module: Any, error: BaseException) -> None:
        """What there is of it."""
        self._draw(trainer, always=True)

    def _draw(self, trainer: Any, always: bool = False) -> None:
        began = time.monotonic()
        if (began < self._due and not always) or not trainer.is_global_zero or not _in_notebook():
            return
        from IPython.display import Image, display

        if (picture := self._picture(trainer.log_dir)) is None:
            return
        image = Image(data=picture, format="png")
        if self._handle is None:
            self._handle = display(image, display_id=True)
        else:
            self._handle.update(image)
        took = time.monotonic() - began
        self._due = began + max(1.0, took / SHARE)

    def _picture(self, folder: Any) -> bytes | None:
        """The curves as they stand; None where there is nothing yet to draw."""
        from matplotlib import pyplot

        from .plots import plot_logs

        try:
            if folder is None or not Path(folder, "metrics.csv").is_file():  # no CSV, or no row yet
                return None
            axes: Any = plot_logs(folder, **self.words)
        except ValueError:  # none with these metrics
            return None
        figure: Any = (axes if hasattr(axes, "figure") else axes[0]).figure
        content = io.BytesIO()
        figure.savefig(content, dpi=100, format="png")
        pyplot.close(figure)  # the notebook would show it once more
        return content.getvalue()


def _in_notebook() -> bool:
    """Whether what is displayed is seen, and can be replaced."""
    try:
        from IPython import get_ipython
    except ImportError:
        return False
    shell = get_ipython()
    return shell is not None and hasattr(shell, "kernel")
