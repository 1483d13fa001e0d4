"""Evaluate: a pass of validation or test with its hooks and metrics; predictions; the table of results."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Iterable, Iterator
from operator import itemgetter
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from .history import name_outputs
from .hooks import is_a, overrides
from .passes import INFINITE, Handed, Turn
from .steps import Modes, takes, takes_batch_idx, takes_iterator
from .timing import timed_batches

if TYPE_CHECKING:
    from .run import Run


def evaluate(
    run: Run, loaders: Any, stage: str, *, most: int | float = INFINITE, inference: bool = False
) -> list[dict]:
    """Run ``validation_step`` or ``test_step`` over the loaders.

    The module is handed back in the modes in which it came, also after an error.

    Args:
        run: whose module, hooks and metrics these are.
        loaders: one after another.
        stage: "validate", "sanity_check" (nothing is kept) or "test".
        most: batches of each loader at most.
        inference: under torch.inference_mode; False: torch.no_grad.

    Returns:
        What was logged, a dict for each loader.
    """
    if sum(min(limit, most) for limit in loaders.limits) == 0:
        return []
    word = "test" if stage == "test" else "validation"
    hooks, metrics, sanity = run.hooks, run.metrics, stage == "sanity_check"
    step_name = f"{word}_step"
    timed = hooks.timed(run.steps.get(step_name), f"[Strategy]{type(run.fabric.strategy).__name__}.{step_name}")
    step = hooks.named(step_name, timed)
    method, transfer = getattr(run.trained.owner, step_name), run.data.transfer
    hands, given = takes_iterator(method), _given(method)
    several = len(loaders.loaders) > 1 and loaders.combined is None
    check_dataloader_idx(run, word, step_name, several)
    batch_start, batch_end = f"on_{word}_batch_start", f"on_{word}_batch_end"
    results: list[dict[str, Any]] = []
    before_stage = run.at.begin_evaluation(stage)
    metrics.start(metrics.val)

    def store() -> None:
        metrics.batches_end()
        results.append({} if sanity else dict(metrics.merge()))

    with torch.inference_mode() if inference else torch.no_grad():
        batches = _timed(run, loaders.start_evaluation(most), "_EvaluationLoop", "test" if stage == "test" else "val")
        handed = Handed(batches, metrics.batch_taken) if hands else None
        run.steps.modes = modes = Modes(run.trained.net)
        try:
            _switch(run, f"on_{word}_model_eval")
            hooks.call(f"on_{word}_start")
            hooks.call(f"on_{word}_epoch_start")
            current, keeps = 0, True
            for batch, batch_idx, index, _ in batches if handed is None else handed.turns():
                if index != current:
                    store()
                    current, keeps = index, True
                run.at.evaluate_batch()
                if transfer is not None and handed is None:
                    batch = transfer(batch, index)
                place: tuple[int, ...] = (batch_idx, index) if several else (batch_idx,)
                metrics.batch_starts(batch, index if several else None)
                hooks.call(batch_start, batch, *place)
                if handed is None:
                    output = step(batch, *place[given])
                elif (output := _take(step, handed)) is _NO_MORE:
                    break
                else:
                    batch, batch_idx, index = handed.latest
                    place = (batch_idx, index) if several else (batch_idx,)
                if keeps:
                    keeps = _keep(run, output, "test" if stage == "test" else "val", *place)
                hooks.call(batch_end, output, batch, *place)
                metrics.batch_ends()
                if not sanity:
                    run.log.evaluated(index)
                run.bar.advance(batch_idx + 1)
            store()
            metrics.val.dataloader_idx = None
            returned = {} if sanity else run.history.end_validation(run.log.all_reduce)
            if not run.trained.is_lightning:  # a plain module's returned values are its metrics
                metrics.callback.update({name: torch.tensor(value) for name, value in returned.items()})
            hooks.call(f"on_{word}_epoch_end")
            at_end = {} if sanity else metrics.merge()
            everything = {name: value for result in reversed(results) for name, value in result.items()} | at_end
            for result in results:
                result.update(at_end)
            if not sanity:
                run.log.validation(everything if run.trained.is_lightning else {**returned, **everything}, returned)
            hooks.call(f"on_{word}_end")
            metrics.epoch_ends()
            if overrides(run.trained.owner, f"on_{word}_model_train"):
                hooks.call(f"on_{word}_model_train")
            else:
                hooks.call_callbacks(f"on_{word}_model_train")
                modes.restore()
        except BaseException:
            modes.restore()
            raise
        finally:
            hooks.enter(None)
            run.at.enter(before_stage)
            run.steps.modes = None
    if returned and not (run.trained.is_lightning and any(results)):
        ends = [f"/dataloader_idx_{index}" if several else "" for index in range(len(results))]
        results = [
            {name: value for name, value in returned.items() if name.endswith(end)} | result
            for end, result in zip(ends, results, strict=True)
        ]
    return [
        {name: value.item() if isinstance(value, Tensor) else value for name, value in result.items()}
        for result in results
    ]


def _keep(run: Run, output: Any, prefix: str, batch_idx: int, loader: int | None = None) -> bool:
    """Keep what a step returned beside what it logs, of a LightningModule that logs the loss only; whether to go on so.

    Of several loaders it stands under Trainer's names. Who logs all that it returns pays for that once in a pass.
    """
    end = "" if loader is None else f"/dataloader_idx_{loader}"
    values = {f"{name}{end}": value for name, value in name_outputs(output, prefix).items()}
    if run.metrics.active:
        logged = {f"{name}{end}" for _, name, index in run.metrics.active if index == loader}
        allowed = {f"{prefix}_loss{end}"} if run.trained.is_lightning else values.keys()
        values = {name: values[name] for name in values if name in allowed and name not in logged}
        if not values:
            return False
    if values:
        run.history.val.add(values, run.log.size_of_batch(), batch_idx)
    return True


def predict(run: Run, loaders: Any, keep: bool, inference: bool) -> list[Any] | None:
    """Run ``predict_step`` over the loaders; a module without one is called with the batch.

    Returns:
        The predictions by batch, on the CPU; a list of such lists for several loaders; None when not kept.
    """
    if sum(loaders.limits) == 0:
        return None
    hooks, transfer, several = run.hooks, run.data.transfer, len(loaders.loaders) > 1
    has_step = callable(getattr(run.trained.owner, "predict_step", None))
    step = hooks.timed(
        run.steps.get("predict_step" if has_step else "forward"),
        f"[Strategy]{type(run.fabric.strategy).__name__}.predict_step",
    )
    given = _given(run.trained.owner.predict_step) if has_step else slice(0)
    if has_step:
        check_dataloader_idx(run, "predict", "predict_step", several)
    writers = [callback.interval for callback in run.hooks.callbacks if is_a(callback, "BasePredictionWriter")]
    keeps = keep or any(interval.on_epoch for interval in writers)
    kept: list[list[Any]] = [[] for _ in loaders.loaders]
    run.predicted.made, run.predicted.indices = kept, [[] for _ in loaders.loaders]
    run.at.begin_evaluation("predict")
    with torch.inference_mode() if inference else torch.no_grad():
        batches = _timed(run, loaders.start_evaluation(), "_PredictionLoop", "predict")
        handed = Handed(batches) if has_step and takes_iterator(run.trained.owner.predict_step) else None
        modes = Modes(run.trained.net)
        try:
            _switch(run, "on_predict_model_eval")
            hooks.call("on_predict_start")
            hooks.call("on_predict_epoch_start")
            for batch, batch_idx, index, _ in batches if handed is None else handed.turns():
                run.at.evaluate_batch()
                if handed is None:
                    batch = batch if transfer is None else transfer(batch, index)
                    if writers:
                        run.predicted.indices[index].append(_indices_of(run, loaders.loaders[index], batch_idx))
                place: tuple[int, ...] = (batch_idx, index) if several else (batch_idx,)
                hooks.call("on_predict_batch_start", batch, *place)
                if handed is None:
                    output = step(batch, *place[given])
                elif (output := _take(step, handed)) is _NO_MORE:
                    break
                else:
                    batch, batch_idx, index = handed.latest
                    place = (batch_idx, index) if several else (batch_idx,)
                hooks.call("on_predict_batch_end", output, batch, *place)
                if output is None:
                    run.said.warn("predict returned None if it was on purpose, ignore this warning...")
                if keeps:
                    kept[index].append(to_cpu(output))
                run.bar.advance(batch_idx + 1)
            hooks.call("on_predict_epoch_end")
            hooks.call("on_predict_end")
            hooks.call_callbacks("on_predict_model_train")
        finally:
            modes.restore()
    if not keep:
        return None
    return kept if several else kept[0]


def _given(step: Callable) -> slice:
    """Which of (batch_idx, dataloader_idx) a step takes beside the batch."""
    return slice(0 if takes_batch_idx(step) else 1, 2 if takes(step, "dataloader_idx") else 1)


def _indices_of(run: Run, loader: Any, batch_idx: int) -> list[int]:
    """Which samples of the dataset a batch has; empty when the loader's sampler did not note them."""
    seen = getattr(getattr(loader, "batch_sampler", None), "seen_batch_indices", None)
    if not seen:
        run.said.warn(
            "Couldn't infer the batch indices fetched from your dataloader: a BasePredictionWriter gets none; expected a"
            " DataLoader with a batch sampler"
        )
    return seen[batch_idx] if seen else []


def _timed(run: Run, batches: Iterator[Turn], loop: str, stage: str) -> Iterator[Turn]:
    """The batches, fetched under the profiler by Trainer's name for that; (batch, batch_idx, dataloader_idx, is_last)."""
    return timed_batches(run.hooks.profiler, batches, f"[{loop}].{stage}_next", itemgetter(3))


_NO_MORE = object()


def _take(step: Callable, handed: Handed) -> Any:
    """What a step returns that takes its batches itself; _NO_MORE when it asked for more than there are."""
    try:
        return step(handed)
    except StopIteration:
        return _NO_MORE


def _switch(run: Run, hook: str) -> None:
    """Into evaluation mode: the module's own way, or ``eval()``."""
    if overrides(run.trained.owner, hook):
        run.hooks.call(hook)
    else:
        run.hooks.call_callbacks(hook)
        run.trained.net.eval()


def check_dataloader_idx(run: Run, word: str, step_name: str, several: bool) -> None:
    """Several loaders need ``dataloader_idx`` in the step and the batch hooks; one loader must not require it.

    A plain model's step may leave it out: what it returns is told apart by its name.
    """
    for hook in (step_name, f"on_{word}_batch_start", f"on_{word}_batch_end"):
        method = overrides(run.trained.owner, hook)
        if method is None or (several and hook == step_name and not run.trained.is_lightning):
            continue
        parameters = inspect.signature(method).parameters
        open_ended = any(p.kind is inspect.Parameter.VAR_POSITIONAL for p in parameters.values())
        given = parameters.get("dataloader_idx")
        loader = f"{'val' if word == 'validation' else word}_dataloader"
        name = run.trained.name
        if several and given is None and not open_ended and "dataloader_iter" not in parameters:
            raise RuntimeError(
                f"You provided multiple `{loader}`, but no `dataloader_idx` argument in `{name}.{hook}()`."
                " Try adding `dataloader_idx=0` to its signature."
            )
        if not several and given is not None and given.default is inspect.Parameter.empty:
            raise RuntimeError(
                f"You provided only a single `{loader}`, but have included `dataloader_idx` in `{name}.{hook}()`. Either"
                " remove the argument or give it a default value i.e. `dataloader_idx=0`."
            )


def to_cpu(value: Any) -> Any:
    """Tensors in a collection, on the CPU."""
    from lightning.fabric.utilities import move_data_to_device

    return move_data_to_device(value, torch.device("cpu"))


def print_results(results: list[dict[str, Any]], stage: str) -> None:
    """Print what was logged as a table: a row for each metric, a column for each loader.

    Example:
        >>> print_results([{"val_acc": 0.5}], "validate")
        ────────────────────────────────────────────────────
             Validate metric            DataLoader 0
        ────────────────────────────────────────────────────
                 val_acc                     0.5
        ────────────────────────────────────────────────────
    """
    results = [{name.split("/dataloader_idx_")[0]: value for name, value in result.items()} for result in results]
    names = sorted({name for result in results for name in result})
    if not names:
        return
    heads = [f"DataLoader {index}" for index in range(len(results))]
    width = max(25, *(len(text) for text in [*names, *heads]))
    rule = "─" * (width + 1) * (len(heads) + 1)

    def line(cells: Iterable[Any]) -> str:
        return " ".join(f"{cell!s:^{width}}" for cell in cells).rstrip()

    rows = [line([name, *(result.get(name, "") for result in results)]) for name in names]
    print("\n".join([rule, line([f"{stage} metric".capitalize(), *heads]), rule, *rows, rule]))
