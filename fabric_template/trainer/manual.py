"""Manual optimization: the module's own steps."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ..core.errors import Misuse, MisuseOfType
from ..core.functions import FunctionSteps
from ..core.run import Run
from ..core.update import AutomaticUpdate


class ManualUpdate(AutomaticUpdate):
    """One batch of manual optimization: the module's ``training_step`` does everything through ``self.optimizers()``."""

    def __init__(self, run: Run) -> None:
        self._ddp = run.steps.ddp
        self._used: set[int] = set()  # the optimizers that have stepped in this batch, after the last backward
        self._has_begun = self._counts = False
        self._counted: list[Any] = []  # hooks of optimizers that functions step as they are
        # whether gradients are added over the ranks; of a step function not before it has called loop.backward
        self._is_ready = self._ddp is None or not isinstance(run.trained.owner, FunctionSteps)
        super().__init__(run)

    def set_up(self) -> None:
        """Know what there is to call, and count the steps of optimizers that step functions have at hand themselves."""
        super().set_up()
        self.close()
        if isinstance(self.owner, FunctionSteps):
            own = [one for one in self.run.optimizing.optimizers if isinstance(one, Optimizer)]
            self._counted = [one.register_step_post_hook(self._count) for one in own]

    def close(self) -> None:
        """The run is over: the optimizers are their owner's alone again."""
        while self._counted:
            self._counted.pop().remove()

    def stepped(self, optimizer: Optimizer) -> None:
        """Count a step of ``training_step``; as under Trainer, none that another hook takes."""
        if self._counts and not self._counted:
            self._count(optimizer)

    def _count(self, optimizer: Optimizer, args: Any = (), words: Any = None) -> None:
        if not self._is_ready:
            raise Misuse(
                "training_step called loss.backward() in a run of several processes, and then stepped an optimizer: the"
                " gradients are this process's own; write loop.backward(loss), which adds them over all"
            )
        self.run.at.stepped_by_hand(1)  # what comes of an error now is behind a step
        self._used.add(id(optimizer))

    def __call__(self, batch: Any, batch_idx: int, last_of_window: bool) -> Any:
        """Run the step; returns what ``on_train_batch_end`` gets as outputs."""
        self._used.clear()
        self._counts = True
        output = self.step(batch, batch_idx) if self.takes_idx else self.step(batch)
        self._counts = False
        if not isinstance(output, Tensor | Mapping | None):
            raise MisuseOfType(
                "In manual optimization, `training_step` must either return a Tensor or have no return; it returned a"
                f" {type(output).__name__}"
            )
        outputs = dict(output) if isinstance(output, Mapping) else {"loss": output} if output is not None else {}
        if isinstance(loss := outputs.get("loss"), Tensor):
            if not self._has_begun and loss.requires_grad:
                self._check_function()
            outputs["loss"] = loss.detach()
            self.run.log.note_returned(output, outputs["loss"])
        self._has_begun = True
        self.run.at.stepped_by_hand(0)
        return outputs

    def _check_function(self) -> None:
        """A step function that returns its loss for the loop to minimize trains nothing: that shows behind its first batch."""
        is_left = not self._used and all(parameter.grad is None for parameter in self.run.trained.net.parameters())
        if isinstance(self.owner, FunctionSteps) and is_left:
            raise Misuse(
                "fit got several optimizers, and training_step used none of them: it steps them itself, as in zero_grad();"
                " loss.backward(); step(); to have one loss minimized, give one optimizer all parameters, in groups"
            )

    def step_with(self, optimizer: Optimizer, closure: Callable | None, **arguments: Any) -> Any:
        """One optimizer's step, called by the module."""
        output = super().step_with(optimizer, closure, **arguments)
        self._used.add(id(optimizer))
        return output

    def backward(self, loss: Tensor, *args: Any, **kwargs: Any) -> None:
        """Backward with its hooks, for ``manual_backward``."""
        self._used.clear()
        self._is_ready = True
        if self._ddp is not None:
            from lightning.pytorch.overrides.distributed import prepare_for_backward

            prepare_for_backward(self._ddp, loss)
        super().backward(loss, *args, **kwargs)

    def waiting(self) -> list[Optimizer]:
        """Those whose parameters may have gradients that a later batch steps with."""
        return [optimizer for optimizer in self.run.optimizing.optimizers if id(optimizer) not in self._used]

    def preparations(self) -> Iterator[Callable[[Optimizer], Any]]:
        """Only the hook: in manual optimization the module clips."""
        yield partial(self.hooks.call, "on_before_optimizer_step")
