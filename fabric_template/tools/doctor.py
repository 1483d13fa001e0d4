"""Doctor: what is wrong with a training: two recorded beside each other, the source of a loop, a run that has ended.

Nothing of a loop is changed: PyTorch's own hooks tell what it does, and are taken off afterwards.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from ..core.errors import Misuse
from .finished import Fact, read_run
from .mistakes import read_source
from .parting import Finding, Report, compare
from .recording import Recording
from .sources import Mistake

__all__ = ["Fact", "Finding", "Mistake", "Recording", "Report", "compare", "read_run", "read_source", "record"]


@contextmanager
def record(name: str = "", steps: int = 50) -> Iterator[Recording]:
    """Note what the training in this block does, at each of its first optimizer steps: any loop, or `loop.fit`.

    Noted are the states of random numbers, batches, modes, losses, gradients, settings of the optimizer and weights, as
    digests and a few values each; the training goes on unchanged, also after the steps that were asked for.

    Args:
        name: how it is called in a report.
        steps: how many are noted.

    Example:
        >>> import torch
        >>> def train(lr):
        ...     net = torch.nn.Linear(2, 1)
        ...     torch.nn.init.ones_(net.weight), torch.nn.init.zeros_(net.bias)
        ...     optimizer = torch.optim.SGD(net.parameters(), lr)
        ...     for _ in range(3):
        ...         optimizer.zero_grad()
        ...         net(torch.ones(4, 2)).mean().backward()
        ...         optimizer.step()
        >>> with record("old") as old:
        ...     train(lr=0.1)
        >>> with record("new") as new:
        ...     train(lr=0.2)
        >>> print(compare(old, new))
        yours       old: 3 steps of SGD, 2 parameters, loss 2 to 1.4
        ours        new: 3 steps of SGD, 2 parameters, loss 2 to 0.8
        first       step 0: learning rate 0.1 in yours, 0.2 here: the optimizer is made with another one
        write       lr=0.1
        then        step 0: other weights
    """
    from .observing import Observer

    if not isinstance(steps, int) or steps < 1:
        raise Misuse(f"record(steps={steps!r}): expected how many steps are noted, 1 or more")
    recording = Recording(name or "training", steps)
    with Observer(recording):
        yield recording
