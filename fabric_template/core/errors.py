"""Errors: what a user got wrong, in classes that Trainer's users and Python's both know how to catch."""

from lightning.fabric.utilities.exceptions import MisconfigurationException


class Misuse(MisconfigurationException, ValueError):
    """A value, a module or a combination that cannot work; the message is one line that says what to write instead.

    Code written for Trainer catches it as Lightning's MisconfigurationException, everybody else as a ValueError.

    Example:
        >>> from fabric_template import FabricLoop
        >>> try:
        ...     FabricLoop(mode="best")
        ... except MisconfigurationException as error:
        ...     print(isinstance(error, ValueError), error)
        True mode='best': expected "min" or "max"
    """


class MisuseOfType(MisconfigurationException, TypeError):
    """The same for something of a wrong type: MisconfigurationException and TypeError."""


class MissingLoader(MisuseOfType, Misuse):
    """A verb without loader: a TypeError for Trainer's users, as for any missing argument, and a ValueError."""
