"""Test a few random programs of soak/random_runs.py in both loops."""

import json
import subprocess
import sys
from pathlib import Path

import pytest
from interpreter import fork_command

SOAK = Path(__file__).resolve().parents[2] / "soak"
# The script checks several programs with an unusual feature, and one program whose run is killed.
CODE = """
import json, sys, tempfile
from pathlib import Path
import random_runs as runs
import hand_loop

def check(name, event=None, **shapes):
    description = {**runs.SIMPLEST, "options": {"max_epochs": 2}, "event": event, **shapes}
    outcome = runs.check_description(description, Path(tempfile.mkdtemp()))
    found[name] = [outcome.compared, outcome.differences, outcome.refusals]

found = {}
runs.warm_up(Path(tempfile.mkdtemp()))
check("functions", val="one")
check("lightning", style="lightning", net="dropout", log="both", sampler="shuffle", val="one")
check("stream", data="stream", scheduler="StepLR")
event = {"kind": "SIGKILL", "at": "batch", "part": 0.6, "rank": 0, "is_repeated": True, "crosses": False}
check("killed", event, net="dropout")
parse_optimizer = hand_loop.parse_optimizer

def parse_wrongly(value):
    optimizer, schedulers = parse_optimizer(value)
    optimizer.param_groups[0]["lr"] *= 1.001
    return optimizer, schedulers

hand_loop.parse_optimizer = parse_wrongly
check("fault", val="one")
print(json.dumps(found))
"""


@pytest.fixture(scope="module")
def found():
    done = subprocess.run(
        fork_command([sys.executable, "-c", CODE]), cwd=SOAK, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["functions", "lightning", "stream", "killed"])
def test_fabric_loop_and_mini_loop_give_equal_results_for_random_training_scripts(found, name):
    compared, differences, refusals = found[name]
    assert differences == []
    assert refusals == {}
    assert len(compared) >= 2


def test_random_training_scripts_detect_a_bug_that_was_inserted_on_purpose(found):
    compared, differences, refusals = found["fault"]
    assert [kind for kind, details in differences] == [
        "FabricLoop differs from HandLoop",
        "MiniLoop differs from HandLoop",
    ]
    assert all("weights" in details[0] for kind, details in differences)


def test_the_same_seed_generates_the_same_random_training_scripts(monkeypatch):
    monkeypatch.syspath_prepend(str(SOAK))
    import program_pieces as pieces
    from random_programs import assemble, draw

    drawn = [draw(0, number) for number in range(500)]
    assert drawn[:20] == [draw(0, number) for number in range(20)]
    sources = {assemble(description) for description in drawn[:200]}
    assert len(sources) == 200
    assert [compile(source, "program.py", "exec") for source in sources]
    tables = {"net": pieces.NETS, "loader": pieces.LOADERS, "optimizer": pieces.OPTIMIZERS, "batch": pieces.BATCHES}
    tables |= {"scheduler": pieces.SCHEDULERS, "style": pieces.STYLES, "val": pieces.VAL_LOADERS}
    for dimension, table in tables.items():
        assert {description[dimension] for description in drawn} == set(table), dimension
