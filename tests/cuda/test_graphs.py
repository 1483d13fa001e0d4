"""compile="cuda-graph": steps that are recorded and replayed have the ordinary steps' bits; what cannot be recorded is said."""

import re

import pytest
import torch
from device import DEVICE, ON, Drawing, Still, fused_adam, on_device, shuffled_on_device
from modules import Classifier, assert_same_weights, make_loader, quiet, sgd
from runs import Plain, assert_same_end, fit, logs_of, val_loader
from torch.optim.lr_scheduler import StepLR
from torchmetrics import MeanMetric

from fabric_template import FabricLoop

pytestmark = pytest.mark.gpu


def both(tmp_path, make, train=shuffled_on_device, epochs=3, **words):
    """The same fit as ever and with recorded steps; asserts that they end alike, and returns how often was replayed."""
    ends, drawn = [], []
    replays = count_replays()
    for word in (False, "cuda-graph"):
        words |= {**ON, "max_epochs": epochs, "compile": word, "log_every_n_steps": 2}
        ends.append(fit(tmp_path / str(word), make, train, val_loader, **words))
        drawn.append(torch.rand(3, device=DEVICE).tolist())
    assert_same_end(*ends)
    assert logs_of(tmp_path / "False") == logs_of(tmp_path / "cuda-graph")
    assert drawn[0] == drawn[1]
    return next(replays)


def count_replays():
    """How many graphs were replayed since now."""
    real, count = torch.cuda.CUDAGraph.replay, [0]

    def replay(self):
        count[0] += 1
        return real(self)

    torch.cuda.CUDAGraph.replay = replay

    def result():
        torch.cuda.CUDAGraph.replay = real
        yield count[0]

    return result()


@pytest.fixture(autouse=True)
def replay_as_found():
    real = torch.cuda.CUDAGraph.replay
    yield
    torch.cuda.CUDAGraph.replay = real


def scheduled(module):
    optimizer = fused_adam(module)
    return [optimizer], [StepLR(optimizer, 1, 0.5)]


@pytest.mark.parametrize("precision", ["32-true", "bf16-mixed", "bf16-true"])
@pytest.mark.parametrize("optimizers", [fused_adam, sgd, scheduled])
def test_the_same_bits(tmp_path, optimizers, precision):
    """Dropout, noise and BatchNorm on the device; logged per step and per epoch, validated, checkpointed."""
    assert both(tmp_path, lambda: Drawing(optimizers), precision=precision) == (21 if optimizers is scheduled else 27)


def test_clipped_and_in_batches_of_two_sizes(tmp_path):
    """The odd batch at an epoch's end is rare: it is run as ever until it was seen often enough."""
    words = {"gradient_clip_val": 0.1, "train": lambda: make_loader(39)}
    assert both(tmp_path, lambda: Drawing(fused_adam), epochs=5, **words) == 42 + 2


def test_what_plain_objects_return(tmp_path):
    class Fused(Plain):
        def training_step(self, batch):
            loss = super().training_step(batch)
            return {"loss": loss, "twice": 2 * loss}

        def configure_optimizers(self):
            return torch.optim.Adam(self.net.parameters(), lr=0.01, fused=True)

    assert both(tmp_path, Fused) == 27


def test_resumed_in_the_middle_it_ends_the_same(tmp_path):
    words = {**ON, "make_module": lambda: Drawing(fused_adam), "train": shuffled_on_device, "compile": "cuda-graph"}
    whole = fit(tmp_path / "whole", max_epochs=2, **words)
    fit(tmp_path / "cut", max_steps=13, **words)
    assert_same_end(whole, fit(tmp_path / "cut", max_epochs=2, resume="last", seed=9, **words))


def test_what_hooks_keep_stays_as_it_was(tmp_path):
    kept = []

    class Keeps(Still):
        def on_train_batch_end(self, outputs, batch, batch_idx):
            kept.append(outputs["loss"])

    fit(tmp_path, lambda: Keeps(fused_adam), on_device, **ON, max_epochs=1, compile="cuda-graph")
    assert len({loss.item() for loss in kept}) == 10


def test_a_step_that_reads_from_the_device_is_run_as_ever(tmp_path):
    """What reads is named; what the module draws on the device goes on."""

    class Reads(Drawing):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            return loss if loss.item() > 0 else 2 * loss

    words = {**ON, "max_epochs": 2, "train": on_device}
    said = r"compile='cuda-graph': this step cannot be recorded, and is run as ever: .*test_graphs.py, line \d+, reads from the"
    with pytest.warns(UserWarning, match=said):
        _, module, _ = fit(tmp_path / "graph", lambda: Reads(fused_adam), compile="cuda-graph", **words)
    _, expected, _ = fit(tmp_path / "plain", lambda: Reads(fused_adam), **words)
    assert_same_weights(expected, module)


def test_a_recording_that_breaks_off_leaves_the_random_numbers_usable(tmp_path):
    """Where only the recording fails: what was watched before went well."""

    class Breaks(Drawing):
        def training_step(self, batch, batch_idx):
            loss = super().training_step(batch, batch_idx)
            if torch.cuda.is_current_stream_capturing():
                raise ValueError("not here")
            return loss

    words = {**ON, "max_epochs": 2, "train": on_device}
    with pytest.warns(
        UserWarning, match="compile='cuda-graph': this step cannot be recorded, and is run as ever: not here"
    ):
        _, module, _ = fit(tmp_path / "graph", lambda: Breaks(fused_adam), compile="cuda-graph", **words)
    _, expected, _ = fit(tmp_path / "plain", lambda: Breaks(fused_adam), **words)
    assert_same_weights(expected, module)


def test_a_buffer_that_is_made_anew_is_noticed(tmp_path):
    class Anew(Still):
        def __init__(self):
            super().__init__(fused_adam)
            self.register_buffer("seen", torch.zeros(()))

        def training_step(self, batch, batch_idx):
            self.seen = self.seen + 1
            return super().training_step(batch, batch_idx)

    with pytest.warns(UserWarning, match="the buffer seen is a new tensor each time"):
        _, module, _ = fit(tmp_path, Anew, on_device, **ON, max_epochs=2, compile="cuda-graph")
    assert module.seen == 20


class Measured(Still):
    def __init__(self):
        super().__init__(fused_adam)
        self.mean = MeanMetric()


class Listens(Still):
    def __init__(self):
        super().__init__(fused_adam)

    def on_after_backward(self):
        pass


def by_adam(module):
    return torch.optim.Adam(module.parameters(), lr=0.01)


@pytest.mark.parametrize(("make", "words", "said"), [
    (lambda: Still(by_adam), {}, "Adam counts its steps on the host: write fused=True"),
    (lambda: Still(fused_adam), {"accumulate_grad_batches": 2}, "accumulate_grad_batches=2"),
    (lambda: Still(fused_adam), {"precision": "16-mixed"}, "precision='16-mixed' reads its scale back: write 'bf16-mixed'"),
    (lambda: Still(fused_adam), {"accelerator": "cpu"}, "it runs on cpu: write accelerator='gpu'"),
    (Measured, {}, "torchmetrics objects in the module make new tensors at each step: return or log plain tensors"),
    (Listens, {}, "something listens to on_before_zero_grad, on_before_backward, on_after_backward and"),
])  # fmt: skip
def test_refused(make, words, said):
    loop = FabricLoop(**{**quiet(), **ON, "max_epochs": 1, "compile": "cuda-graph", **words})
    with pytest.raises(ValueError, match=re.escape(said)) as error:
        loop.fit(make(), make_loader())
    assert str(error.value).endswith("or leave out compile='cuda-graph'")


def test_a_rate_that_changes_each_step_is_run_as_ever(tmp_path):
    def each_step(module):
        optimizer = fused_adam(module)
        return [optimizer], [{"scheduler": StepLR(optimizer, 1, 0.9), "interval": "step"}]

    assert both(tmp_path, lambda: Still(each_step), epochs=1) == 0
    assert both(tmp_path / "log", lambda: Classifier(sgd), epochs=1) == 7
