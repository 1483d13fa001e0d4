"""Every public name of lightning.Trainer, asked before, in every hook and after each verb of both: the same answers."""

import warnings

import lightning.pytorch as pl
import pytest
import torch
from both import LOOPS
from fabric_template.core.overrides import HOOKS
from lightning.fabric.utilities.exceptions import MisconfigurationException
from modules import Classifier, by_step, make_loader, quiet
from runs import val_loader
from torch import nn

DEEDS = {"fit", "validate", "test", "predict", "print", "save_checkpoint", "init_module"}  # tested where they belong
NAMES = sorted(name for name in {*dir(pl.Trainer), *vars(pl.Trainer(**quiet()))} - DEEDS if name[0] != "_")

_OWN_CLASS = "a class of ours; what modules and callbacks ask of it is tested where they are"
_METRICS = "a run has metrics of its own from its start; Trainer forgets those of the run before only after setup"

# The names whose answers differ: in which hooks (None: in all), and why. "fresh": before anything has run.
DIFFERENT = {
    "strategy": (None, _OWN_CLASS),
    "fit_loop": (None, _OWN_CLASS),
    "predict_loop": (None, _OWN_CLASS),
    "validate_loop": (None, _OWN_CLASS),
    "test_loop": (None, _OWN_CLASS),
    "estimated_stepping_batches": ({"fresh"}, "refused: there is no loader yet; Trainer answers -1"),
    "is_last_batch": ({"on_train_epoch_start"}, "no batch is at hand; Trainer's is the last one of the epoch before"),
    "callback_metrics": ({"setup"}, _METRICS),
    "logged_metrics": ({"setup"}, _METRICS),
    "progress_bar_metrics": ({"setup"}, _METRICS),
}


class Whole(Classifier):
    """With a step for each verb, and a batch hook whose values the callbacks see."""

    def validation_step(self, batch, batch_idx, dataloader_idx=0):
        super().validation_step(batch, batch_idx)

    def test_step(self, batch, batch_idx):
        self.log("test_loss", nn.functional.cross_entropy(self(batch[0]), batch[1]), prog_bar=True)

    def predict_step(self, batch, batch_idx):
        return self(batch[0])


def shown(value):
    """A value in a form in which two runs can be compared."""
    if isinstance(value, torch.Tensor | float):
        return float(value)
    if isinstance(value, dict):
        return {name: shown(part) for name, part in value.items()}
    if isinstance(value, list | tuple):
        return [shown(part) for part in value]
    if value is None or isinstance(value, bool | int):
        return value
    if isinstance(value, str):
        return str(value)
    if hasattr(value, "scheduler"):
        words = ("interval", "frequency", "monitor", "reduce_on_plateau", "strict", "name")
        return [type(value.scheduler).__name__, *(getattr(value, word) for word in words)]
    if hasattr(value, "status"):
        return [part and part.value for part in (value.fn, value.stage, value.status)]
    return type(value).__name__, len(value) if hasattr(value, "__len__") else None


class Asks(pl.Callback):
    """Asks for every name in every hook."""

    def __init__(self):
        self.seen = {name: [] for name in NAMES}
        self.verb = None

    def ask(self, trainer, hook):
        for name, seen in self.seen.items():
            try:
                answer = shown(getattr(trainer, name))
            except (AttributeError, RuntimeError, MisconfigurationException):  # the one refusal is as good as the other
                answer = "refused"
            seen.append((self.verb, hook, answer))


def _asking(hook):
    return lambda self, trainer, *args, **words: self.ask(trainer, hook)


for _hook in HOOKS:
    if hasattr(pl.Callback, _hook):
        setattr(Asks, _hook, _asking(_hook))

WORDS = {
    "plain": {"max_epochs": 2},
    "parts": {"max_epochs": 2, "accumulate_grad_batches": 3, "val_check_interval": 0.5, "min_steps": 2, "limit_val_batches": 2},
    "steps": {"max_steps": 7, "max_epochs": -1, "num_sanity_val_steps": 0, "overfit_batches": 3, "gradient_clip_val": 1.0},
    "fast": {"fast_dev_run": 2},
}  # fmt: skip


def ask_both(root, words):
    """{name: [(verb, hook, answer), ...]} of Trainer, and of the loop."""
    sides = []
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for kind in LOOPS.values():
            pl.seed_everything(1, verbose=False)
            module, asks = Whole(by_step), Asks()
            trainer = kind(**quiet(callbacks=[asks], default_root_dir=str(root), **words))
            asks.ask(trainer, "fresh")
            verbs = {
                "fit": lambda trainer, module: trainer.fit(module, make_loader(24), [val_loader(), val_loader()]),
                "validate": lambda trainer, module: trainer.validate(module, val_loader(), verbose=False),
                "test": lambda trainer, module: trainer.test(module, make_loader(8, shuffle=False), verbose=False),
                "predict": lambda trainer, module: trainer.predict(module, make_loader(16, shuffle=False)),
            }
            for asks.verb, run in verbs.items():
                run(trainer, module)
                asks.ask(trainer, "after")
            sides.append(asks.seen)
    return sides


@pytest.fixture(scope="module", params=WORDS)
def asked(request, tmp_path_factory):
    return ask_both(tmp_path_factory.mktemp("names"), WORDS[request.param])


@pytest.mark.parametrize("name", NAMES)
def test_the_same_answer_everywhere(asked, name):
    """... or one that is listed above; a name that a new Lightning brings fails here until it is one or the other."""
    expected, ours = (seen[name] for seen in asked)
    assert [place[:2] for place in expected] == [place[:2] for place in ours]
    where, reason = DIFFERENT.get(name, (set(), "not listed in DIFFERENT"))
    pairs = [pair for pair in zip(expected, ours, strict=True) if pair[0] != pair[1]]
    assert where is None or not [pair for pair in pairs if pair[0][1] not in where], (name, reason)


def test_what_is_listed_does_differ(tmp_path):
    expected, ours = ask_both(tmp_path, WORDS["plain"])
    assert {name for name in NAMES if expected[name] != ours[name]} == set(DIFFERENT)


@pytest.mark.parametrize("words", [{}, {"devices": 2, "strategy": "ddp_spawn"}, {"num_nodes": 2}], ids=str)
def test_devices_before_the_launch(words):
    names = ("num_devices", "device_ids", "num_nodes", "world_size", "local_rank", "global_rank", "node_rank",
             "is_global_zero", "distributed_sampler_kwargs")  # fmt: skip
    sides = [kind(**quiet(**words)) for kind in LOOPS.values()]
    first, second = ([getattr(side, name) for name in names] for side in sides)
    assert first == second
