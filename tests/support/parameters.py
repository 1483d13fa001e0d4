"""Choose which parametrized tests the suite runs. The others get the mark `soak` and run only in `make soak`."""

import itertools

import pytest


def keep(parameters, *kept):
    """Return the names in ``parameters``. All except ``kept`` get the mark `soak`."""
    assert set(kept) <= set(parameters), f"keep: got {set(kept) - set(parameters)}, expected names of the table"
    return [name if name in kept else pytest.param(name, marks=pytest.mark.soak) for name in parameters]


def leave(parameters, *left):
    """Return the names in ``parameters``. Those in ``left`` get the mark `soak`."""
    return keep(parameters, *(name for name in parameters if name not in left))


def sample(step, *tables):
    """Return all combinations of values from the tables. All but every `step`-th get the mark `soak`."""
    cases = enumerate(itertools.product(*tables))
    return [pytest.param(*case, marks=[pytest.mark.soak] if number % step else []) for number, case in cases]


def halve(*tables):
    """Return all combinations of values from the tables. Every second one gets the mark `soak`.

    With three or more tables, each pair of values from two tables still occurs in an unmarked combination.
    """
    cases = []
    for places in itertools.product(*(enumerate(table) for table in tables)):
        is_left = sum(number for number, _ in places) % 2
        values = [value for _, value in places]
        cases.append(pytest.param(*values, marks=[pytest.mark.soak] if is_left else []))
    return cases


def once(*tables):
    """Return all combinations of values from the tables. All but one per value of the longest table get the mark `soak`.

    In the unmarked combinations, the values of the other tables alternate.
    """
    longest = max(range(len(tables)), key=lambda index: len(tables[index]))
    cases = []
    for places in itertools.product(*(enumerate(table) for table in tables)):
        expected, is_left = places[longest][0], False
        for index, (number, _) in enumerate(places):
            if index != longest:
                expected, other = divmod(expected, len(tables[index]))
                is_left = is_left or number != other
        values = [value for _, value in places]
        cases.append(pytest.param(*values, marks=[pytest.mark.soak] if is_left else []))
    return cases
