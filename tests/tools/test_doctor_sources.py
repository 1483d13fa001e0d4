"""The doctor reads a script's text: each common mistake by its line, and nothing of what is right."""

import json
from pathlib import Path

import pytest

from fabric_template.tools.doctor import read_source

REPOSITORY = Path(__file__).resolve().parents[2]
RIGHT = """
import torch
from torch import nn, optim
from torch.nn.functional import cross_entropy
from torch.utils.data import DataLoader
from torch.utils.data.distributed import DistributedSampler

sampler = DistributedSampler(data)
train, val = DataLoader(data, 32, sampler=sampler), DataLoader(other, 32)
net = nn.Sequential(nn.Linear(8, 16), nn.Dropout(0.1), nn.Linear(16, 3)).to("cuda")
optimizer = optim.Adam(net.parameters(), lr=1e-3)
scheduler = optim.lr_scheduler.StepLR(optimizer, 3)
criterion = nn.CrossEntropyLoss()
if resume:
    checkpoint = torch.load("last.ckpt")
    start_epoch = checkpoint["epoch"]
for epoch in range(start_epoch, 10):
    sampler.set_epoch(epoch)
    net.train()
    total = 0
    for i, (x, y) in enumerate(train):
        optimizer.zero_grad()
        logits = net(x)
        loss = criterion(logits, y)
        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        total += loss.detach()
    scheduler.step()
    net.eval()
    with torch.no_grad():
        for x, y in val:
            criterion(net(x), y)
    rng = torch.get_rng_state()
    state = {"net": net.state_dict(), "optimizer": optimizer.state_dict(), "scheduler": scheduler.state_dict()}
    torch.save({**state, "epoch": epoch, "rng": rng}, "last.ckpt")
"""
SAVED = '    torch.save({**state, "epoch": epoch, "rng": rng}, "last.ckpt")\n'
SCALED = """        scaler.scale(loss).backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        scaler.step(optimizer)
"""
CLEAR, CLIP = "        optimizer.zero_grad()\n", "        nn.utils.clip_grad_norm_(net.parameters(), 1.0)\n"
STEP, BACK, TOTAL = "        optimizer.step()\n", "        loss.backward()\n", "        total += loss.detach()\n"
SCHEDULE = "    scheduler.step()\n"
BY_BATCH = [(TOTAL, f"    {SCHEDULE}{TOTAL}"), (f"{SCHEDULE}    net.eval", "    net.eval")]
PLAIN = """        loss.backward()
        nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
"""
SUMMED = """        if (i + 1) % 4 == 0:
            optimizer.step()
            optimizer.zero_grad()
"""
MISTAKES = {  # what is replaced, by what, and what is said of which line, in its words
    "zero_grad": ([(CLEAR, "")], "loss.backward()",
                  "the gradients are never cleared: each step uses the sum of all before it",
                  "optimizer.zero_grad() before backward"),
    "cleared too early": ([(CLEAR, ""), (STEP, CLEAR + STEP)], "optimizer.zero_grad()",
                          "the gradients are cleared before the optimizer has used them",
                          "optimizer.zero_grad() before backward, or after optimizer.step()"),
    "clipped late": ([(CLIP + STEP, STEP + CLIP)], "clip_grad_norm_",
                     "the gradients are clipped after the step that used them",
                     "clip_grad_norm_ between backward and the optimizer's step"),
    "clipped scaled": ([(PLAIN, SCALED)], "clip_grad_norm_",
                       "the gradients are clipped while the GradScaler's factor is still in them",
                       "scaler.unscale_(optimizer) before it"),
    "not divided": ([(CLEAR, ""), (STEP, SUMMED)], "loss.backward()",
                    "the gradients of 4 batches are added up and the loss is not divided", "(loss / 4).backward()"),
    "stays in eval": ([("    net.train()\n", "")], "net.eval()",
                      "net is put into eval mode and never back: from the second epoch on it trains without dropout, and"
                      " BatchNorm learns nothing", "net.train() at the beginning of each epoch"),
    "graphs": ([("loss.detach()", "loss")], "total += loss",
               "total holds the graph of every batch: memory grows from step to step",
               "loss.detach() there, and .item() where it is printed"),
    "softmax": ([("logits = net(x)", "logits = torch.softmax(net(x), dim=1)")], "loss = criterion(logits, y)",
                "softmax is done twice: criterion does it itself", "give it the logits"),
    "softmax in the net": ([("nn.Linear(16, 3))", "nn.Linear(16, 3), nn.Softmax(1))"), ("criterion(net(x), y)", "net(x)")],
                           "loss = criterion", "softmax is done twice: criterion does it itself", "give it the logits"),
    "scheduler first": ([("    scheduler.step()\n", ""), ("    net.train()\n", "    scheduler.step()\n    net.train()\n")],
                        "scheduler.step()",
                        "the scheduler is stepped before the optimizer: the first learning rate is never used",
                        "scheduler.step() after optimizer.step()"),
    "one cycle by epoch": ([("StepLR(optimizer, 3)", "OneCycleLR(optimizer, 0.1, epochs=10, steps_per_epoch=len(train))")],
                           "scheduler.step()",
                           "OneCycleLR was made for a step with each batch and is stepped with each epoch: it hardly begins",
                           "scheduler.step() after each optimizer.step()"),
    "set_epoch": ([("    sampler.set_epoch(epoch)\n", "")], "sampler = DistributedSampler",
                  "each epoch has the same order: the sampler is not told which epoch it is",
                  "sampler.set_epoch(epoch) at the beginning of each epoch"),
    "without optimizer": ([(SAVED, '    torch.save({"net": net.state_dict(), "epoch": epoch, "rng": rng}, "last.ckpt")\n')],
                          "torch.save", "the checkpoint is resumed without the optimizer: Adam forgets its averages",
                          '"optimizer": optimizer.state_dict() in it, and load_state_dict when it is resumed'),
    "without scheduler": ([(SAVED, '    torch.save({"net": net.state_dict(), "optim": optimizer.state_dict(), "epoch": epoch,'
                                   ' "rng": rng}, "last.ckpt")\n')],
                          "torch.save", "the checkpoint is resumed without the scheduler, which begins anew",
                          '"scheduler": scheduler.state_dict() in it, and load_state_dict when it is resumed'),
}  # fmt: skip
ADVICE = {
    "without random state": ([(SAVED, '    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "epoch":'
                                      ' epoch, "scheduler": scheduler.state_dict()}, "last.ckpt")\n')], "torch.save",
                             "no random state is in the checkpoint: a resumed run shuffles and drops otherwise than one that"
                             " was not interrupted", "torch.get_rng_state() in it, torch.set_rng_state() when it is resumed"),
    "read back": ([("loss.detach()", "loss.item()")], "total += loss.item()", "loss.item() in each step waits for the device",
                  "add up loss.detach(), and read it back now and then"),
    "graph in validation": ([("    with torch.no_grad():\n", "    if True:\n")], "criterion(net(x), y)",
                            "the loop in eval mode keeps what backward would need, in memory and time",
                            "with torch.no_grad(): around the loop of line 32"),
    "steps of batches": (BY_BATCH,
                         "scheduler.step()",
                         "StepLR has the numbers of epochs and is stepped with each batch: soon the learning rate is nothing",
                         "scheduler.step() once in each epoch, behind the loop of batches"),
}  # fmt: skip


def found_in(folder, source, name="script.py"):
    path = folder / name
    path.write_text(source)
    return read_source(path)


def seeded(changes):
    source = RIGHT
    for old, new in changes:
        assert source.count(old) == 1, old
        source = source.replace(old, new)
    return source


@pytest.mark.parametrize("name", [*MISTAKES, *ADVICE])
def test_a_mistake_is_named_with_its_line(tmp_path, name):
    changes, line, what, write = {**MISTAKES, **ADVICE}[name]
    source = seeded(changes)
    (mistake,) = found_in(tmp_path, source)
    assert (mistake.what, mistake.write, mistake.is_advice) == (what, write, name in ADVICE)
    assert line in source.splitlines()[mistake.line - 1]


@pytest.mark.parametrize("name", ["zero_grad", "stays in eval", "softmax", "graphs"])
def test_also_in_functions(tmp_path, name):
    """The loops of epochs and of batches are functions of their own."""
    changes, line, what, _ = MISTAKES[name]
    top, loop = seeded(changes).split("for epoch in range(start_epoch, 10):\n")
    train, rest = loop.split("    scheduler.step()\n")
    validate, save = rest.split("    rng =")
    source = (
        f"{top}\n\ndef train_epoch(epoch):\n{train}\n\ndef validate():\n{validate}\n\n"
        f"for epoch in range(start_epoch, 10):\n    train_epoch(epoch)\n    scheduler.step()\n    validate()\n    rng ={save}"
    )
    (mistake,) = found_in(tmp_path, source)
    assert mistake.what == what
    assert line in source.splitlines()[mistake.line - 1]


def test_what_is_right_has_no_remark(tmp_path):
    assert found_in(tmp_path, RIGHT) == []


VARIANTS = {
    "cleared through the net": [("optimizer.zero_grad()", "net.zero_grad(set_to_none=True)")],
    "cleared by hand": [(CLEAR, "        for p in net.parameters():\n            p.grad = None\n")],
    "cleared after the step": [(CLEAR, ""), (TOTAL, CLEAR + TOTAL)],
    "divided": [(CLEAR, ""), (STEP, SUMMED), ("loss.backward()", "(loss / 4).backward()")],
    "divided before": [(CLEAR, ""), (STEP, SUMMED),
                       ("criterion(logits, y)", "criterion(logits, y) / 4")],
    "unscaled": [(PLAIN, SCALED.replace("        nn", "        scaler.unscale_(optimizer)\n        nn"))],
    "a sum that is trained on": [(TOTAL, "        loss += 0.1 * net[0].weight.norm()\n"),
                                 (BACK, ""), (STEP, BACK + STEP)],
    "read back now and then": [(TOTAL, "        if i % 50 == 0:\n            print(loss.item())\n")],
    "no random numbers in the order": [("DistributedSampler(data)", "DistributedSampler(data, shuffle=False)"),
                                       ("    sampler.set_epoch(epoch)\n", "")],
    "scheduled by batch": [("StepLR(optimizer, 3)", "StepLR(optimizer, 3000)"),
                           *BY_BATCH],
    "always in train mode": [("    net.eval()\n", ""), ("    net.train()\n", "")],
    "a new net in each round": [("    net.train()\n", "    net = nn.Sequential(nn.Linear(8, 3), nn.Dropout(0.1))\n")],
    "a teacher in eval mode": [("    net.train()\n", ""), ("    net.eval()\n", "    teacher.eval()\n")],
    "log_softmax": [("logits = net(x)", "logits = torch.log_softmax(net(x), 1)")],
    "a closure": [(PLAIN, "        def closure():\n            optimizer.zero_grad()\n            loss = criterion(net(x), y)\n"
                          "            loss.backward()\n            return loss\n\n        loss = optimizer.step(closure)\n"),
                  ("        optimizer.zero_grad()\n        logits", "        logits")],
}  # fmt: skip


@pytest.mark.parametrize("name", VARIANTS)
def test_other_ways_that_are_right_have_no_remark(tmp_path, name):
    assert found_in(tmp_path, seeded(VARIANTS[name])) == []


def test_no_alarm_on_what_is_ours(tmp_path):
    """Pages, notebooks, demos and benchmarks."""
    places = [*REPOSITORY.glob("fabric_template/demos/*.py"), *REPOSITORY.glob("benchmarks/*.py")]
    remarks = {path.name: read_source(path) for path in [*places, *REPOSITORY.glob("notebooks/*.ipynb")]}
    for page in [REPOSITORY / "README.md", *REPOSITORY.rglob("docs/**/*.md")]:
        blocks = [part.partition("```")[0] for part in page.read_text().split("```python\n")[1:]]
        remarks[page.name] = found_in(tmp_path, "\n".join(blocks)) if page.name != "doctor.md" else []
    remarks = {name: [one for one in found if not one.is_advice] for name, found in remarks.items()}
    assert {name: found for name, found in remarks.items() if found} == {}


def test_a_notebook_is_read_by_its_cells(tmp_path):
    cells = [
        ("code", ["%pip install torch\n", "import torch\n"]),
        ("markdown", "x"),
        ("code", seeded(MISTAKES["graphs"][0])),
    ]
    cells = [{"cell_type": kind, "source": source} for kind, source in cells]
    (mistake,) = found_in(tmp_path, json.dumps({"cells": cells}), "note.ipynb")
    assert mistake.what == MISTAKES["graphs"][2]
