"""Draw a run in a notebook while it trains."""

from __future__ import annotations

import sys
import time
import warnings
from pathlib import Path
from typing import Any

from .plots import render_picture

MAX_TIME_SHARE = 0.05


class LivePlot:
    """Draw the curves in a notebook while a run trains. Outside of notebooks, do nothing.

    Args:
        **options: Options of `plot_logs`, such as x="step" or metrics=["loss", "lr"].

    Example:
        >>> from fabric_template import FabricLoop, LivePlot
        >>> loop = FabricLoop(max_epochs=10, callbacks=[LivePlot(metrics=["loss"])])
    """

    def __init__(self, **options: Any) -> None:
        self.options = options
        self.display: Any = None
        self.next_time = 0.0

    def on_fit_start(self, trainer: Any, module: Any) -> None:
        """Start a new picture."""
        self.display, self.next_time = None, 0.0

    def on_train_epoch_start(self, trainer: Any, module: Any) -> None:
        """Draw at most once a second and in at most 5 % of the time."""
        start = time.monotonic()
        if start >= self.next_time:
            self.on_fit_end(trainer, module)
            self.next_time = start + max(1.0, (time.monotonic() - start) / MAX_TIME_SHARE)

    on_validation_end = on_train_epoch_start

    def on_fit_end(self, trainer: Any, module: Any, error: BaseException | None = None) -> None:
        """Draw the rows that are logged so far."""
        shell = sys.modules["IPython"].get_ipython() if "IPython" in sys.modules else None
        log = Path(trainer.log_dir or "", "metrics.csv")
        if not hasattr(shell, "kernel") or not trainer.is_global_zero or not log.is_file():
            return
        from IPython.display import Image, display

        try:
            image = Image(render_picture(log, **self.options), format="png")
        except ValueError:
            # These metrics are not logged yet.
            return
        except Exception as problem:
            warnings.warn(f"LivePlot: the run is not drawn. {problem}", stacklevel=2)
            return
        if self.display is None:
            self.display = display(image, display_id=True)
        else:
            self.display.update(image)

    on_exception = on_fit_end
