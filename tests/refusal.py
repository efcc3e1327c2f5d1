"""What a refusal must be: one exception type, one exact message."""

import re

import pytest


def refused(error, message):
    """The exception with exactly this message, no subclass of it."""
    return pytest.raises(error, match=f"^{re.escape(message)}$", check=lambda raised: type(raised) is error)
