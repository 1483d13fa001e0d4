"""The class under test. It changes in one place when the new engine takes the old one's."""

import pytest

from fabric_template.next_loop import FabricLoop


@pytest.fixture
def loop_class():
    """Return the FabricLoop class under test."""
    return FabricLoop
