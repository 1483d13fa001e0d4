"""A few of the faults that the soak runs by the thousand: kills, failing operations, failing reads, configurations."""

import json
import subprocess
import sys
from pathlib import Path

import beside
import configurations
import pytest
from interpreter import ready

FOLDER = Path(__file__).parent


def run(script, *options):
    """Return (figures, standard error) of a script that has to end without a loss."""
    command = ready([sys.executable, str(FOLDER / f"{script}.py"), *map(str, options)])
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-3000:] + done.stderr[-3000:]
    figures = json.loads(done.stdout.splitlines()[-1])
    assert figures["losses"] == []
    return figures


@pytest.mark.parametrize(("ranks", "kills"), [(1, 20), (2, 4)])
def test_killed_at_random_instants(ranks, kills):
    assert run("kills", "--ranks", ranks, "--kills", kills, "--seed", 0)["kills"] >= kills


def test_each_operation_on_the_disk_fails_once():
    figures = run("sweep", "--every", 17)
    assert figures["operations"] > 150


def test_each_look_at_the_disk_fails_once():
    figures = run("reads", "--every", 12)
    assert figures["looks"] > 200


def test_random_configurations_are_ended_and_resumed():
    figures = run("configurations", "--steady", "--seed", 1, "--count", 4)
    assert figures["refused"] == []
    assert figures["resumed"] >= 1


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("number", range(5))
def test_random_configurations_beside_trainer(tmp_path, number):
    assert beside.compare(beside.drawn(0, number, workers=False), tmp_path / "beside") in ([], None)


def test_a_number_is_always_the_same_configuration():
    drawn = [configurations.draw(5, number, whatever=True) for number in range(100)]
    assert drawn[17] == configurations.draw(5, 17, whatever=True)
    assert {end["kind"] for one in drawn for end in one["ends"]} == set(configurations.CODES)
    assert {one["loader"] for one in drawn} == set(configurations.LOADERS)
    shapes = {beside.drawn(5, number)["shape"] for number in range(60)}
    assert shapes == set(beside.SHAPES)
