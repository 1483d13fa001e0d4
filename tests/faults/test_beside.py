"""Random configurations under Trainer and here: the same bits. `make soak` runs a thousand, in processes of their own."""

import pytest
from beside import compare, drawn

COUNT = 5


@pytest.mark.filterwarnings("ignore")  # what each of the two warns of is no matter here
@pytest.mark.parametrize("number", range(COUNT))
def test_the_same_bits(tmp_path, number):
    assert compare(drawn(0, number, workers=False), tmp_path / "beside") in ([], None)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("seed", "number"), [(0, 34), (2, 30)])
def test_what_was_found(tmp_path, seed, number):
    """A mean's sums under 64-true; the workers of a stream that is overfitted and loaded anew each epoch."""
    assert compare(drawn(seed, number), tmp_path / "beside") == []


def test_a_number_is_always_the_same_configuration():
    configurations = [drawn(5, number) for number in range(100)]
    assert configurations[17] == drawn(5, 17)
    kinds = {words["loader"] for words in configurations}
    assert {"own", "items", "function", "shuffled", "combined", "handed", "iterable"} <= kinds
    assert {words["shape"] for words in configurations} == {"lightning", "handed", "gan", "manual"}
