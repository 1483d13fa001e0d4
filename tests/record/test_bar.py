"""The progress bar: drawn where somebody sees it, on rank zero, seldom, and closed whatever happens."""

import pytest
import tqdm.auto
from lightning.pytorch.callbacks import TQDMProgressBar
from modules import Classifier, make_loader
from runs import fit, val_loader

import fabric_template.process.session
import fabric_template.record.bar
from fabric_template.record.bar import can_show_bar


class Bar:
    """Stands for tqdm: notes what it is told."""

    made = []

    def __init__(self, **words):
        self.words, self.n, self.draws, self.closed, self.postfix = words, words["initial"], [], 0, None
        Bar.made.append(self)

    def set_postfix(self, values, refresh):
        assert refresh is False
        self.postfix = dict(values)

    def refresh(self):
        self.draws.append((self.n, self.postfix))

    def set_description(self, *words, **more):
        pass

    set_description_str = set_description

    def reset(self, *words, **more):
        pass

    def close(self):
        self.closed += 1


@pytest.fixture
def bars(monkeypatch):
    """Every bar that is made, drawn at every batch."""
    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    monkeypatch.setattr(Bar, "made", [])
    monkeypatch.setattr(fabric_template.record.bar, "SECONDS_BETWEEN", 0.0)
    monkeypatch.setattr(fabric_template.process.session, "can_show_bar", lambda: True)
    return Bar.made


def test_off_when_nobody_looks(tmp_path, monkeypatch, capfd):
    """Neither a terminal nor a notebook: tests run like that, and so do jobs that write to a file."""
    monkeypatch.setattr(Bar, "made", [])
    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    monkeypatch.setattr(fabric_template.record.bar, "is_interactive", lambda: False)
    assert not can_show_bar()
    fit(tmp_path, max_epochs=1, enable_progress_bar=True)
    assert Bar.made == []
    assert capfd.readouterr().err == ""


def test_values(tmp_path, bars):
    """One bar an epoch; it counts batches and shows what was logged with prog_bar."""
    loop, _, _ = fit(tmp_path, train=lambda: make_loader(24), val=val_loader, max_epochs=2, enable_progress_bar=True)
    epochs = [bar for bar in bars if bar.words["desc"].startswith("epoch")]
    assert [bar.words["desc"] for bar in epochs] == ["epoch 0", "epoch 1"]
    assert [bar.words["total"] for bar in epochs] == [6, 6]
    assert all(bar.closed == 1 for bar in bars)
    # the first epoch has no validation to show yet; the second shows the first's
    shown = [draw for draw in epochs[1].draws if draw[0] == 1]
    assert shown
    assert list(shown[0][1]) == ["val_loss"]
    assert float(shown[0][1]["val_loss"]) > 0
    assert {"val_loss"} == set(loop.progress_bar_metrics)


def test_enable_progress_bar_false(tmp_path, bars):
    fit(tmp_path, max_epochs=1, enable_progress_bar=False)
    assert bars == []


def test_rank_zero_only(tmp_path, bars, monkeypatch):
    from lightning.fabric import Fabric

    monkeypatch.setattr(Fabric, "is_global_zero", property(lambda self: False))
    fit(tmp_path, max_epochs=1, enable_progress_bar=True, logger=False, enable_checkpointing=False)
    assert bars == []


def test_a_progress_bar_callback_replaces_it(tmp_path, bars):
    class Mine(TQDMProgressBar):
        def __init__(self):
            super().__init__()
            self.disable()

    fit(tmp_path, max_epochs=1, enable_progress_bar=True, callbacks=[Mine()])
    assert bars == []


def test_closed_after_an_exception(tmp_path, bars):
    class Fails(Classifier):
        def training_step(self, batch, batch_idx):
            if batch_idx == 3:
                raise RuntimeError("mine")
            return super().training_step(batch, batch_idx)

    with pytest.raises(RuntimeError, match="mine"):
        fit(tmp_path, Fails, max_epochs=1, enable_progress_bar=True)
    assert len(bars) == 1
    assert bars[0].closed == 1


@pytest.mark.parametrize(("seconds", "draws"), [(2**-10, 4), (2**-4, 250), (1.0, 1000)])
def test_throttled_by_time(monkeypatch, seconds, draws):
    """A thousand steps of so many seconds: five draws a second at most, and the values are read only then."""
    clock = [100.0]
    monkeypatch.setattr(tqdm.auto, "tqdm", Bar)
    monkeypatch.setattr(Bar, "made", [])
    monkeypatch.setattr(fabric_template.record.bar.time, "monotonic", lambda: clock[0])
    read = []

    def values():
        read.append(1)
        return {"loss": 0.123456}

    bar = fabric_template.record.bar.Bar(values)
    bar.show()
    bar.start("epoch 0", 1000)
    for done in range(1, 1001):
        clock[0] += seconds
        bar.advance(done)
    count = len(Bar.made[0].draws)
    assert len(read) == count
    assert count == draws
    assert Bar.made[0].draws[0][1] == {"loss": "0.1235"}
    bar.close()
    bar.advance(1001)
    assert (len(read), Bar.made[0].closed) == (count, 1)


def test_disabled_costs_nothing(monkeypatch):
    bar = fabric_template.record.bar.Bar(lambda: pytest.fail("nobody looks"))
    bar.start("epoch 0", 10)
    bar.advance(5)
    bar.close()
