"""Test that the examples in docstrings run and print the documented output."""

import doctest
import importlib
import pkgutil
import sys

import pytest

import fabric_template

# Leave out fabric_template.__main__, because importing it runs the command line.
WITHOUT = {"fabric_template.__main__"}
MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(fabric_template.__path__, "fabric_template.")
    if found.name not in WITHOUT
)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_docstring_examples_print_the_documented_output(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    assert sys.modules[name] is module


def test_at_least_ten_modules_have_a_docstring_example():
    finder = doctest.DocTestFinder()
    found = {name: finder.find(importlib.import_module(name)) for name in MODULES}
    assert sum(any(test.examples for test in tests) for tests in found.values()) >= 10
