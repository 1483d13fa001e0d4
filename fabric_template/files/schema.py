"""Schema: what a checkpoint file may say of a run, checked as a whole before anything of it is used.

A file that can be read may still not be believed: a name in it can lead anywhere, a counter can keep a loop busy for years,
a random state out of range crashes the process. What a resume uses stands in the tables `OURS` (our own key) and `FILE`
(Trainer's keys, as far as the loop itself reads them), whatever else a file holds is let be. In a table, a dict stands for
its keys (with a "?" they may be missing), ``{kind: kind}`` for a dict of any keys, ``[kind]`` for a list of any length, a
tuple for a list of just these, an `Is` for one value, and a function for the table that it picks for the value.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy
import torch
from torch import Tensor

from ..exact.randomness import PLAIN
from .errors import CheckpointError
from .names import is_name

MOST = 2**48  # of any count


class Is(NamedTuple):
    """One value: what it must be, in words and as a test."""

    words: str
    test: Callable[[Any], bool]


def check(table: Any, value: Any, where: str) -> None:
    """Refuse a value that is not as its table says.

    Example:
        >>> check({"epoch": count, "rates?": [number]}, {"epoch": 3, "rates": [0.1]}, "file")
    """
    if isinstance(table, Is):
        if not table.test(value):
            raise CheckpointError(f"{where} is {_shown(value)}, expected {table.words}")
    elif isinstance(table, list | tuple):
        count = len(table) if isinstance(table, tuple) else None
        if not isinstance(value, list | tuple) or count not in (None, len(value)):
            raise CheckpointError(f"{where} is {_shown(value)}, expected a list{f' of {count}' if count else ''}")
        for index, part in enumerate(value):
            check(table[0 if count is None else index], part, f"{where}[{index}]")
    elif not isinstance(table, dict):
        check(table(value), value, where)
    elif not isinstance(value, Mapping):
        raise CheckpointError(f"{where} is {_shown(value)}, expected a dict")
    elif isinstance(key := next(iter(table), None), Is):
        for name, part in value.items():
            check(key, name, f"a key of {where}")
            check(table[key], part, f"{where}[{_shown(name)}]")
    else:
        for name, kind in table.items():
            key = name.removesuffix("?")
            if key == name and key not in value:
                raise CheckpointError(f"{where} has no {key}")
            if key in value:
                check(kind, value[key], f"{where}.{key}".lstrip("."))


def check_resumable(checkpoint: Mapping[str, Any], path: str | Path) -> None:
    """Refuse a file of which a resume cannot use something, before any of it is used.

    Example:
        >>> try:
        ...     check_resumable({"global_step": True}, "demo.ckpt")
        ... except CheckpointError as error:
        ...     print(str(error)[:64])
        'demo.ckpt' cannot be gone on from: global_step is True, expecte
    """
    try:
        check(FILE, checkpoint, "")
        for odd, rule in RULES.items():
            if (ours := checkpoint.get("fabric_template")) is not None and not rule(ours):
                raise CheckpointError(f"in fabric_template {odd}")
    except CheckpointError as error:
        raise CheckpointError(
            f"'{path}' cannot be gone on from: {error}; it was altered, or written by something else: use another file"
        ) from None


def _shown(value: Any) -> str:
    """A value in a few words, however much there is of it."""
    if isinstance(value, Tensor):
        return f"a tensor ({value.dtype}, shape {tuple(value.shape)})"
    if isinstance(value, str | bytes) or (isinstance(value, int) and value.bit_length() <= 64):
        return repr(value[:60] if isinstance(value, str | bytes) else value)
    if isinstance(value, int):
        return f"a number of {value.bit_length()} bits"
    return repr(value) if value is None or isinstance(value, float) else f"a {type(value).__name__}"


# ---- kinds of values


def maybe(table: Any) -> Callable[[Any], Any]:
    """That, or None."""
    return lambda value: anything if value is None else table


def number_from(least: float, most: float, *types: type) -> Is:
    """A number between two; NaN is none."""
    return Is(f"{'a number' if float in types else 'a whole number'} from {least} to {most}",
              lambda value: type(value) in types and least <= value <= most)  # fmt: skip


def one_of(*values: Any) -> Is:
    """One of these; True is no 1."""
    return Is(f"one of {values}", lambda value: any(type(value) is type(one) and value == one for one in values))


def _is_whole(value: Any, *dtypes: torch.dtype, numel: int | None = None) -> bool:
    """Whether this is a tensor in memory, each element in its own and in order."""
    is_one = isinstance(value, Tensor) and value.layout is torch.strided and not value.is_meta and value.is_contiguous()
    return is_one and value.dtype in (dtypes or (value.dtype,)) and numel in (None, value.numel())


def _is_sparse(value: Any) -> bool:
    """Whether this is a gradient such as an Embedding may have."""
    return isinstance(value, Tensor) and value.layout is torch.sparse_coo and not value.is_meta


anything = Is("anything", lambda value: True)
flag = one_of(False, True)
text = Is("a text", lambda value: isinstance(value, str) and len(value) < 10_000)
count = number_from(0, MOST, int)
number = Is(  # NumPy's, too: a callback may log them
    "a number", lambda value: isinstance(value, float | numpy.number) or (isinstance(value, int) and abs(value) < 2**63)
)
finite = number_from(-1e308, 1e308, float)
seed = number_from(-(2**63), 2**63 - 1, int)
scalar = Is("a tensor of one element", lambda value: _is_whole(value, numel=1))
measured = Is("a number or a tensor", lambda value: _is_whole(value) or number.test(value))
cell = Is("a number or a text", lambda value: value is None or isinstance(value, str) or number.test(value))
file_name = Is("a file name that the loop gives to one of the best", is_name)

# ---- random numbers


def _words(number: int, last: int) -> Is:
    """The words of a Mersenne twister in a tensor of int64, the last of them no more than that."""
    return Is(f"{number} words of 32 bits", lambda value: _is_whole(value, torch.int64, numel=number) and value.dim() == 1
              and int(value.min()) >= 0 and int(value.max()) < 2**32 and int(value[-1]) <= last)  # fmt: skip


def _is_taken(put: Callable[[Any], object], value: Any) -> bool:
    try:
        put(value)
    except Exception:
        return False
    return True


def _bit_generator(value: Any) -> bool:
    """Whether NumPy takes it, with positions inside of what they point into: it does not ask, and crashes later."""
    known = {name: getattr(numpy.random, name) for name in ("MT19937", "PCG64", "PCG64DXSM", "Philox", "SFC64")}
    inner = value.get("state") if isinstance(value, Mapping) else None
    if not isinstance(inner, Mapping) or value.get("bit_generator") not in known:
        return False
    places = (inner.get("pos", 0), 624), (value.get("buffer_pos", 0), 4)
    fresh = known[value["bit_generator"]](0)
    return all(type(place) is int and 0 <= place <= most for place, most in places) and _is_taken(
        lambda state: setattr(fresh, "state", state), value
    )


octets = Is("a tensor of bytes", lambda value: _is_whole(value, torch.uint8) and value.numel() < 2**13)
torch_state = Is(
    "a state of torch.Generator", lambda value: octets.test(value) and _is_taken(torch.Generator().set_state, value)
)
python_state = (one_of(3), _words(625, 624), maybe(finite))
numpy_state = (one_of("MT19937"), _words(624, 2**32), number_from(0, 624, int), one_of(0, 1), finite)


def generator(value: Any) -> Any:
    """The table for what `generator_state` gives: torch's, Python's, NumPy's old one's or new one's."""
    if isinstance(value, Tensor):
        return torch_state if value.numel() > 64 else octets  # a device's are short
    if isinstance(value, list | tuple):
        return python_state if len(value) == 3 else numpy_state
    return Is("a state of numpy.random.Generator", _bit_generator)


RNG = {
    "torch": torch_state, "python": python_state, "numpy": numpy_state, "cuda?": [octets], "generators?": [generator],
}  # fmt: skip

# ---- where the passes over the loaders stand

PASS = {
    "began": RNG, "first": maybe(RNG), "born": maybe(RNG), "is_born": flag, "taken": count, "num_workers": count,
    "earlier": [count], "workers": maybe([maybe(RNG)]), "ahead?": maybe([[seed]]), "parts?": [anything],
    "parts_began?": [anything],
}  # fmt: skip
AFTER = {"born?": maybe(RNG), "workers?": maybe([maybe(RNG)]), "parts?": [anything]}


def source(value: Any) -> Any:
    """The table for a loader: in a pass, after one, or with nothing to say."""
    return anything if value is None else PASS if isinstance(value, Mapping) and "began" in value else AFTER


LOADERS = maybe({
    "sources": [source], "ahead": maybe(RNG), "generators": [generator], "seeds?": [seed], "taken?": count,
    "fetched?": count,
})  # fmt: skip

# ---- what was logged

META = {
    "fx": text, "name": text, "prog_bar": flag, "logger": flag, "on_step": flag, "on_epoch": flag,
    "reduce": one_of("mean", "sum", "max", "min"), "enable_graph": flag, "sync_dist": flag,
    "sync_dist_group": one_of(None), "dataloader_idx": maybe(count), "suffix": flag, "rank_zero_only": flag,
}  # fmt: skip
METRICS = {
    "train": [{"meta": META, "total": maybe(scalar), "weight": count, "step_value": maybe(measured), "object": maybe(text)}],
    "callback": {text: measured}, "row": {text: measured}, "objects": {text: {text: anything}},
    "in_batches": maybe(flag), "last_fx": maybe(text), "resets?": [text],
}  # fmt: skip
RETURNED = {"sums": {text: scalar}, "weights": {text: count}, "bad_step": maybe(number_from(-1, MOST, int))}


def _are_rows(value: Any) -> bool:
    try:
        rows = [json.loads(line) for line in value.splitlines()]
    except (AttributeError, ValueError, RecursionError):
        return False
    return all(isinstance(row, list) and all(map(cell.test, row)) for row in rows)


EARLIER = {
    "rows": count, "names": [text], "last": {text: cell}, "lines?": Is("rows in JSON", _are_rows), "home": [cell],
}  # fmt: skip
ROWS = {"rows": count, "columns": [text], "waiting?": [{text: text}]}

# ---- the whole

DATA = {"loader?": text, "samples?": maybe(count), "batch_size?": maybe(count)}
FINGERPRINT = {
    "accumulate_grad_batches?": count, "precision?": text, "optimizers?": [[text]], "schedulers?": [text],
    "processes?": count, "versions?": {text: text}, "settings?": {text: text}, "batches?": maybe(count), "data?": [DATA],
}  # fmt: skip
TENSORS = {text: Is("a tensor in memory", _is_whole)}
HELD = {
    "generators": {text: generator}, "buffers": TENSORS,
    "settings": {text: {text: Is("a plain value", lambda value: type(value) in PLAIN)}},
    "groups": [maybe([[maybe(text)]])], "tensors": TENSORS,
    "weights?": maybe(measured),
    "gradients": {text: Is("a tensor in memory", lambda value: _is_whole(value) or _is_sparse(value))},
}  # fmt: skip
RANK = {
    "rng": RNG, "train": LOADERS, "val": LOADERS, "returned": RETURNED, "metrics": METRICS, "held?": HELD,
}  # fmt: skip
OURS = {
    "format?": count, "batch_idx": count, "epoch": count, "saved_in": maybe(text), "is_exact?": flag, "is_last_batch": flag,
    "total_batches": count, "batches_that_stepped": count, "stepped_before?": count, "steps_in_epoch": count,
    "seconds?": number_from(0, MOST, int, float), "ranks": [RANK], "loaders_epoch": {text: count}, "returned": {text: number},
    "history": lambda value: EARLIER if isinstance(value, Mapping) else [{text: cell}],
    "rates": [number], "evaluated?": [count], "kept": {"best?": {file_name: number}, "judged?": count},
    "window?": maybe(number_from(1, MOST, int)),
    "should_stop?": flag, "elapsed?": number_from(0, MOST, int, float), "fingerprint?": FINGERPRINT,
    "buckets?": [count],
    "shares?": count, "order?": {"epoch": count, "samples": Is("a tensor in memory", _is_whole)},
    "logs": [maybe({one_of("metrics.csv", "steps.csv"): ROWS})],
}  # fmt: skip
RULES: dict[str, Callable[[Any], bool]] = {  # between parts that are each what they must be; in words what is wrong otherwise
    "no rank has a part": lambda ours: len(ours["ranks"]) > 0,
    "its ranks have no equal shares": lambda ours: (shares := ours.get("shares", 1)) and len(ours["ranks"]) % shares == 0,
    "batch_idx is more than total_batches": lambda ours: ours["batch_idx"] <= ours["total_batches"],
    "a column of the logs comes twice": lambda ours: all(
        len(set(rows["columns"])) == len(rows["columns"]) for position in ours["logs"] for rows in (position or {}).values()
    ),
    "a sum of what the steps returned has no weight": lambda ours: all(
        rank["returned"]["sums"].keys() == rank["returned"]["weights"].keys() for rank in ours["ranks"]
    ),
    "a loader is far behind its pass": lambda ours: all(  # and would be wound on for years
        sum(at.get("earlier", ())) + at.get("taken", 0) <= 2 * stage.get("fetched", 0) + 1000
        for rank in ours["ranks"] for stage in (rank["train"], rank["val"]) if stage for at in stage["sources"] if at
    ),
}  # fmt: skip
PROGRESS = {"ready?": count, "started?": count, "processed?": count, "completed?": count}
FIT_LOOP = {
    "epoch_progress?": {"current?": PROGRESS}, "epoch_loop.state_dict?": {"_batches_that_stepped?": count},
    "epoch_loop.batch_progress?": {"current?": PROGRESS, "total?": PROGRESS, "is_last_batch?": flag},
    "state_dict?": {"combined_loader?": [anything]},
}  # fmt: skip
FILE = {
    "epoch?": number_from(-1, MOST, int), "global_step?": count, "callbacks?": {text: anything},
    "optimizer_states?": [{anything: anything}], "lr_schedulers?": [{text: anything}], "loops?": {"fit_loop?": FIT_LOOP},
    "fabric_template?": maybe(OURS),
}  # fmt: skip
