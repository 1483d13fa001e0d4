"""Every example in a docstring runs and says what it says."""

import doctest
import importlib
import pkgutil
import sys

import pytest

import fabric_template

# nothing to try there: they are imported for what they do
WITHOUT = {"fabric_template.__main__"}
MODULES = sorted(
    found.name
    for found in pkgutil.walk_packages(fabric_template.__path__, "fabric_template.")
    if found.name not in WITHOUT
)


@pytest.mark.parametrize("name", MODULES)
@pytest.mark.filterwarnings("ignore:.*does not have many workers")
def test_examples(name):
    module = importlib.import_module(name)
    result = doctest.testmod(module, optionflags=doctest.ELLIPSIS)
    assert result.failed == 0
    assert sys.modules[name] is module


def test_most_modules_have_an_example():
    tried = {name: doctest.testmod(importlib.import_module(name)).attempted for name in MODULES}
    assert sum(tried.values()) > 60
