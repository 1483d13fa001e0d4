"""Random configurations, ended once and resumed: as if nothing had been. `make soak` runs three thousand."""

import json
import subprocess
import sys
from pathlib import Path

import configurations
import pytest
from interpreter import ready

SCRIPT = Path(__file__).with_name("configurations.py")


def run(*words):
    return subprocess.run(ready([sys.executable, str(SCRIPT), *words]), capture_output=True, text=True)


@pytest.mark.parametrize(("ranks", "count"), [(1, 12), (2, 2)])
def test_ended_and_resumed(ranks, count):
    """At counted points, not at a clock's instants: the same runs each time."""
    done = run("--steady", "--seed", "0", "--ranks", str(ranks), "--count", str(count))
    figures = json.loads(done.stdout)
    assert (figures["losses"], figures["refused"]) == ([], []), done.stderr[-3000:]
    assert done.returncode == 0
    assert figures["configurations"] == count
    assert figures["resumed"] >= count / 3


def test_a_number_is_always_the_same_configuration():
    """So that one that was lost can be run again alone; and every kind of piece is drawn."""
    shown = run("--whatever", "--seed", "5", "--count", "400", "--show").stdout.splitlines()
    assert json.dumps(configurations.draw(5, 17, 1, whatever=True)) == shown[17]
    drawn = [json.loads(line) for line in shown]
    assert {words["number"] for words in drawn} == set(range(400))
    assert {end["kind"] for words in drawn for end in words["ends"]} == {
        "kill", "exception", "SIGTERM", "SIGINT", "KeyboardInterrupt"
    }  # fmt: skip
    for key, number in {"shape": 7, "loader": 14, "optimizer": 22, "scheduler": 17, "metric": 19, "logger": 4}.items():
        assert len({str(words[key]) for words in drawn}) == number, key
