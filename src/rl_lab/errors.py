"""Errors that a user can act on. The command line prints their message alone, without a traceback."""

from __future__ import annotations

import difflib
from collections.abc import Iterable

MESSAGE_PREFIX = "rl-lab: "  # of the line on stderr that says why a command failed


class RLLabError(Exception):
    """Base of every error that is the user's to fix: it says what, where, what was expected and how to fix it."""


class ConfigError(RLLabError):
    """The configuration names something that does not exist or does not fit."""


class CheckpointError(RLLabError):
    """A checkpoint cannot be read or does not belong to this run."""


class RunNotFoundError(RLLabError):
    """A RUN argument names no run directory."""


class EnvironmentFailure(RLLabError):
    """An environment cannot be made, breaks the Gymnasium contract or keeps failing."""


class DataError(RLLabError):
    """A data source was asked for something that it cannot give."""


class NonFiniteError(RLLabError):
    """A loss or a parameter became NaN or infinite."""


def nearest(name: str, valid: Iterable[str]) -> str:
    """' Did you mean 'x'?' for the closest valid name, or the only one that begins so, or the list of valid names."""
    names = sorted(set(map(str, valid)))
    longer = [valid_name for valid_name in names if len(str(name)) > 2 and valid_name.startswith(str(name))]
    close = difflib.get_close_matches(str(name), names, n=1, cutoff=0.6) or longer[: len(longer) == 1]
    if close:
        return f" Did you mean '{close[0]}'?"
    return f" Valid names: {', '.join(names)}." if names else ""
