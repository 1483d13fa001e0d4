"""Graphs: a whole training step (forward, backward, update) as one CUDA graph, recorded once per epoch and replayed."""

from __future__ import annotations

import gc
import warnings
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.fabric.strategies import SingleDeviceStrategy
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_unflatten  # torch has no public name for it

from .errors import Misuse
from .outputs import loss_in
from .run import Run
from .update import AutomaticUpdate

WARM_UP = 3  # steps before the first recording: libraries set themselves up, optimizers make their states
INSTEAD = "or leave out compile='cuda-graph'"


@dataclass
class Recorded:
    """One recorded step: what it reads, what it makes, what it logs."""

    inputs: list[Tensor | None]
    graph: Any = field(default_factory=lambda: torch.cuda.CUDAGraph())
    output: Any = None
    logged: list[tuple[str, Tensor, dict[str, Any]]] = field(default_factory=list)


class GraphedUpdate(AutomaticUpdate):
    """The ordinary update, whose steps are launched all at once where they are the same as one that was recorded.

    For steps that take less time than their launches. The numbers are those of the ordinary update to the bit: the same
    kernels run in the same order, and draw the same random numbers. What Python does in a step is done when it is recorded,
    once per epoch, for each shape of batch and each learning rate; what it logs and returns is read at each step.
    """

    def __init__(self, run: Run) -> None:
        super().__init__(run)
        self._check()
        self._epoch = -1
        self._recorded: dict[Any, Recorded] = {}
        self._seen: dict[Any, int] = {}
        self._is_off = False  # it cannot be recorded
        self._step = self.step
        self._is_kept = self.hooks.heard("on_train_batch_end")  # what the next replay overwrites
        self._log_again = self.hooks.named("training_step", self._log_all)

    def _check(self) -> None:
        """Refuse what Python has to do at each step."""
        run, config = self.run, self.run.config
        own = [name for name in ("own_step", "own_zero", "own_backward", "own_clip") if getattr(self, name) is not None]
        hooks = "on_before_zero_grad, on_before_backward, on_after_backward and on_before_optimizer_step"
        groups = self.optimizer.param_groups
        on_device = all(group.get("fused") or group.get("capturable") for group in groups)
        refused = {
            f"it runs on {self.fabric.device}: write accelerator='gpu'": self.fabric.device.type != "cuda",
            "the strategy has several processes": not isinstance(self.fabric.strategy, SingleDeviceStrategy),
            f"accumulate_grad_batches={config.accumulate_grad_batches}": config.accumulate_grad_batches != 1,
            "precision='16-mixed' reads its scale back: write 'bf16-mixed'": self.scaler is not None,
            f"something listens to {hooks}": self.heard,
            "the module has its own optimizer_step, optimizer_zero_grad, backward or clipping": bool(own),
            "a profiler looks at the parts of a step": self.hooks.profiler is not None,
            "the step takes its batches itself": run.trained.hands_iterator,
            "it is no optimizer of torch's": self.needs_closure,
            f"{type(self.optimizer).__name__} counts its steps on the host: write fused=True": not (
                on_device or isinstance(self.optimizer, torch.optim.SGD)
            ),
            "torchmetrics objects in the module make new tensors at each step: return or log plain tensors": any(
                hasattr(part, "full_state_update") for part in run.trained.net.modules()
            ),
        }
        if why := [reason for reason, holds in refused.items() if holds]:
            raise Misuse(f"compile='cuda-graph': a step cannot be recorded: {'; '.join(why)}; {INSTEAD}")

    def __call__(self, batch: Any, batch_idx: int, last_of_window: bool) -> Any:
        """Train on one batch: by a recorded step where there is one, else as ever."""
        if self._is_off:
            return super().__call__(batch, batch_idx, last_of_window)
        if self.run.at.current_epoch != self._epoch:  # whatever may have changed between two epochs
            self._epoch = self.run.at.current_epoch
            self._recorded.clear()
        if type(batch) is tuple and all(type(part) is Tensor for part in batch):  # nearly always
            leaves: Any = batch
            key: tuple = (*map(_kind, leaves), *self._rates(), self.skips_backward)
        else:
            leaves, spec = tree_flatten(batch)
            key = (spec, *map(_kind, leaves), *self._rates(), self.skips_backward)
        recorded = self._recorded.get(key)
        if recorded is None:
            self._seen[key] = self._seen.get(key, 0) + 1
            if self._seen[key] == WARM_UP:
                vars(self)["step"] = self._watched
            if self._seen[key] <= WARM_UP or (recorded := self._record(batch, batch_idx)) is None:
                return super().__call__(batch, batch_idx, last_of_window)
            self._recorded[key] = recorded
        for there, leaf in zip(recorded.inputs, leaves, strict=True):
            if there is not None:
                there.copy_(leaf, non_blocking=True)
        recorded.graph.replay()
        if recorded.logged:
            self._log_again(recorded.logged)
        output = recorded.output
        if self.keeps:
            loss = output if isinstance(output, Tensor) else loss_in(output, self.run)
            assert loss is not None
            self._keep(output, loss)
            if self._is_kept:
                self._outputs = {name: _copied(value) for name, value in self._outputs.items()}
        self.run.at.stepped()
        outputs, self._outputs = self._outputs, {}
        return outputs

    def _log_all(self, logged: list[tuple[str, Tensor, dict[str, Any]]]) -> None:
        for name, value, words in logged:
            self.run.metrics.log(name, value, **words)

    def _rates(self) -> Iterator[Any]:
        """What of the optimizer stands in the graph as a number."""
        for group in self.optimizer.param_groups:
            for name in ("lr", "betas", "momentum", "weight_decay"):
                value = group.get(name)
                yield None if isinstance(value, Tensor) else value

    def _watched(self, *batch: Any) -> Any:
        """The step as ever, once: what of it a graph would not do is found before anything is recorded."""
        self.step = self._step
        before, mode, reads = self._buffers(), torch.cuda.get_sync_debug_mode(), ""
        known = set(map(id, before.values()))
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            torch.cuda.set_sync_debug_mode("warn")
            try:
                output = self.step(*batch)
            finally:
                torch.cuda.set_sync_debug_mode(mode)
        for one in caught:
            if "synchronizing CUDA operation" in str(one.message):
                reads = reads or f"{one.filename}, line {one.lineno}, reads from the device"
            elif "prototype feature" not in str(one.message):
                warnings.warn_explicit(one.message, one.category, one.filename, one.lineno)
        new = [name for (_, name), buffer in self._buffers().items() if id(buffer) not in known]
        if why := reads or (
            f"the buffer {new[0]} is a new tensor each time; write into it, as copy_() does" if new else ""
        ):
            self._give_up(why)
        return output

    def _give_up(self, why: str) -> None:
        self._is_off = True
        self.run.said.warn(f"compile='cuda-graph': this step cannot be recorded, and is run as ever: {why}")

    def _record(self, batch: Any, batch_idx: int) -> Recorded | None:
        """Record a step for batches like this one; nothing runs meanwhile. None where that cannot be."""
        leaves, spec = tree_flatten(batch)
        inputs = [_copied(leaf) for leaf in leaves]
        self._batch = (tree_unflatten(inputs, spec), batch_idx)[: 1 + self.takes_idx]
        self._last_loss = None  # whose nodes belong to the stream that it was computed on
        recorded = Recorded([leaf if isinstance(leaf, Tensor) else None for leaf in inputs])
        generator = torch.cuda.default_generators[self.fabric.device.index or 0]
        before = generator.clone_state()
        try:
            with self.run.metrics.recording(recorded.logged), recording(recorded.graph):
                recorded.output = self._whole_step()
        except Exception as error:
            generator.graphsafe_set_state(before)  # a recording that breaks off leaves it unusable
            self._give_up(next(iter(str(error).splitlines()), type(error).__name__))
            return None
        finally:
            self._batch = ()
        return recorded

    def _buffers(self) -> dict[tuple[nn.Module, str], Tensor]:
        """The tensors that modules hold, by module and name."""
        modules = self.run.trained.net.modules()
        return {(part, name): buffer for part in modules for name, buffer in part.named_buffers(recurse=False)}

    def _whole_step(self) -> Any:
        output = self.step(*self._batch)
        loss = output if isinstance(output, Tensor) else loss_in(output, self.run)
        if loss is None:
            raise RuntimeError("the step left this batch out")
        self.optimizer.zero_grad()
        self._backward(loss)
        for prepare in self.before_step:
            prepare(self.optimizer)
        with capturable(self.optimizer):
            if self.is_plain:
                self.optimizer.step()
            else:
                self.fabric.strategy.optimizer_step(self.optimizer)
        return _detached(output)


@contextmanager
def recording(graph: Any) -> Iterator[None]:
    """What is launched inside is recorded, and does not run. (torch.cuda.graph empties caches first, which takes long.)"""
    beside, collects = torch.cuda.Stream(), gc.isenabled()
    torch.cuda.synchronize()
    beside.wait_stream(torch.cuda.current_stream())
    gc.disable()  # what is freed meanwhile might not be
    try:
        with torch.cuda.stream(beside):
            # of this thread only: one that pins memory may go on
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                yield
            except BaseException:
                with suppress(RuntimeError):  # that it was broken off
                    graph.capture_end()
                raise
            graph.capture_end()
    finally:
        if collects:
            gc.enable()


@contextmanager
def capturable(optimizer: Any) -> Iterator[None]:
    """Fused optimizers count on the device anyway, and ask for this word all the same."""
    before = [group.get("capturable") for group in optimizer.param_groups]
    for group in optimizer.param_groups:
        if "capturable" in group:
            group["capturable"] = True
    try:
        yield
    finally:
        for group, value in zip(optimizer.param_groups, before, strict=True):
            if "capturable" in group:
                group["capturable"] = value


def _kind(leaf: Any) -> Any:
    if isinstance(leaf, Tensor):
        return leaf.shape, leaf.dtype, leaf.stride()
    return leaf if isinstance(leaf, int | float | str | bool | None) else id(leaf)


def _detached(output: Any) -> Any:
    leaves, spec = tree_flatten(output)
    return tree_unflatten([leaf.detach() if isinstance(leaf, Tensor) else leaf for leaf in leaves], spec)


def _copied(value: Any) -> Any:
    return value.clone() if isinstance(value, Tensor) else value
