"""Whether the plain code that a kernel computes has been edited since the kernel was written.

`fingerprints.json` holds a hash of every such function, over its tokens without comments, docstring and layout. After
a change of a plain function its kernels step aside until they compute the new one and the file is renewed by
`python -m rl_lab.kernels.sources`.
"""

from __future__ import annotations

import hashlib
import inspect
import io
import json
import textwrap
from collections.abc import Iterable
from functools import cache
from pathlib import Path
from pkgutil import resolve_name
from tokenize import COMMENT, DEDENT, ENCODING, ENDMARKER, INDENT, NEWLINE, NL, generate_tokens
from typing import Any

from rl_lab.kernels.catalogue import KERNELS

FILE = Path(__file__).with_name("fingerprints.json")
LAYOUT = {COMMENT, DEDENT, ENCODING, ENDMARKER, INDENT, NEWLINE, NL}


def changed_source(names: Iterable[str]) -> str | None:
    """A reason that names the first function of these that is not what it was; None where all are."""
    for name in names:
        function = find(name)
        if _fingerprint_of(function) != recorded().get(name):
            return f"{'.'.join(name.split('.')[-2:])} was edited"
    return None


def find(name: str) -> Any:
    """The function or property with a full name such as `package.module.Class.method`, as it is now."""
    owner, _, attribute = name.rpartition(".")
    own = vars(_owner(owner))
    return own[attribute] if attribute in own else inspect.getattr_static(_owner(owner), attribute)


_owner = cache(resolve_name)  # the module or class with a full name


@cache
def recorded() -> dict[str, str]:
    return json.loads(FILE.read_text())


@cache
def _fingerprint_of(function: Any) -> str:
    """A hash of the function's tokens; empty where its source is not to be had."""
    function = function.fget if isinstance(function, property) else function
    try:
        source = inspect.getsource(inspect.unwrap(function))
    except (OSError, TypeError):
        return ""
    tokens = generate_tokens(io.StringIO(textwrap.dedent(source)).readline)
    words = [token.string for token in tokens if token.type not in LAYOUT and token.string[:3] != '"""']
    return hashlib.sha256(" ".join(words).encode()).hexdigest()[:16]


def renew() -> None:
    """Take the present functions as those that the kernels compute."""
    names = sorted({name for kernel in KERNELS for name in kernel.mirrors})
    FILE.write_text(json.dumps({name: _fingerprint_of(find(name)) for name in names}, indent=1) + "\n")


if __name__ == "__main__":
    renew()
