"""accumulate_weights: a step over several batches is that of one large batch, whatever they hold."""

import pytest
import torch
from modules import quiet
from torch import nn
from torch.nn.functional import cross_entropy

from fabric_template import FabricLoop
from fabric_template.core.errors import Misuse

IGNORED = -100


def make_batches(sizes=(4, 1, 3, 2, 4), tokens=6):
    """Batches of other sizes, of texts in which other numbers of tokens count."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(sum(sizes), tokens, 8, generator=generator)
    y = torch.randint(0, 5, (sum(sizes), tokens), generator=generator)
    y[torch.rand(y.shape, generator=generator) < 0.4] = IGNORED
    return list(zip(x.split(list(sizes)), y.split(list(sizes)), strict=True))


def make_net():
    torch.manual_seed(1)
    return nn.Linear(8, 5).double()


def by_token(net, batch):
    x, y = batch
    return cross_entropy(net(x.double()).flatten(0, 1), y.flatten(), ignore_index=IGNORED)


def by_sample(net, batch):
    return net(batch[0].double()).square().mean()


def count_tokens(batch):
    return (batch[1] != IGNORED).sum()  # a tensor: nothing is read from the device


def fit(batches, step=by_token, **words):
    net = make_net()
    words = {"gradient_clip_val": 0.3, "max_epochs": 2, **words}
    resume = {"resume": words.pop("resume", None)}
    loop = FabricLoop(**quiet(**words))
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    loop.fit(net, batches, optimizer=optimizer, training_step=step, **resume)
    return loop, net


@pytest.mark.parametrize(("step", "weights"), [(by_token, count_tokens), (by_sample, "samples")])
def test_windows_are_large_batches(step, weights):
    """Windows of 3 and of 2 batches, the last shorter one too; without weights it is another step."""
    batches = make_batches()
    large = [tuple(map(torch.cat, zip(*part, strict=True))) for part in (batches[:3], batches[3:])]
    _, expected = fit(large, step)
    loop, net = fit(batches, step, accumulate_grad_batches=3, accumulate_weights=weights)
    assert loop.global_step == 4
    for ours, theirs in zip(net.parameters(), expected.parameters(), strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-14)
    _, alike = fit(batches, step, accumulate_grad_batches=3)
    assert (alike.weight - expected.weight).abs().max() > 1e-3


def test_windows_of_one_batch_are_as_without():
    _, expected = fit(make_batches())
    _, net = fit(make_batches(), accumulate_weights=count_tokens)
    assert net.weight.equal(expected.weight)


def test_over_two_processes(monkeypatch):
    """Each takes every other batch; the step is over all that both hold."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    batches = make_batches((4, 1, 3, 2))
    _, expected = fit([tuple(map(torch.cat, zip(*batches, strict=True)))])
    words = {"devices": 2, "strategy": "ddp_fork", "accumulate_grad_batches": 2, "accumulate_weights": count_tokens}
    _, net = fit(Shared(batches), **words)
    torch.testing.assert_close(net.weight, expected.weight, rtol=1e-12, atol=1e-14)


class Shared(torch.utils.data.IterableDataset):
    def __init__(self, batches):
        self.batches = batches

    def __iter__(self):
        rank = torch.distributed.get_rank() if torch.distributed.is_initialized() else 0
        return iter(self.batches[rank::2])


def test_a_resume_in_the_middle_of_a_window():
    class Save:
        def on_train_batch_end(self, loop, batch_idx):
            if (loop.current_epoch, batch_idx) == (1, 1):
                loop.save_checkpoint("middle.ckpt")

    words = {"accumulate_grad_batches": 3, "accumulate_weights": count_tokens, "enable_checkpointing": True}
    _, expected = fit(make_batches(), callbacks=[Save()], **words)
    loop, net = fit(make_batches(), resume="middle.ckpt", **words)
    assert net.weight.equal(expected.weight)
    assert loop.global_step == 4


def test_refused():
    with pytest.raises(Misuse) as caught:
        FabricLoop(accumulate_weights="tokens")
    assert str(caught.value) == "accumulate_weights='tokens': expected None, \"samples\" or a function of a batch"
    net = make_net()
    net.automatic_optimization = False
    loop = FabricLoop(**quiet(accumulate_weights="samples"))
    with pytest.raises(Misuse) as caught:
        loop.fit(net, make_batches(), optimizer=torch.optim.SGD(net.parameters(), lr=0.1), training_step=by_token)
    assert str(caught.value) == (
        "accumulate_weights= is for automatic optimization: leave it out, and weigh the losses in training_step"
    )
