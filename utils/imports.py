"""Importing the user's own modules, in a project that has a package called `utils` just as this one has."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import PathFinder
from pathlib import Path

OURS = sys.modules.get("utils") if __package__ == "utils" else None  # None: ejected, nothing to hide
HOME = OURS and Path(__file__).resolve().parents[1]


@contextlib.contextmanager
def users_imports(folder: Path) -> Iterator[None]:
    """What is imported inside is the user's: `folder` comes first on sys.path, and `utils` is never ours. From then on
    the name is theirs where they have such a package: they may import from it later, and all of ours is loaded."""
    before, hidden = list(sys.path), {}
    sys.path[:] = [path for path in (str(folder), *before) if Path(path).resolve() != HOME]
    importlib.invalidate_caches()
    if OURS is not None and sys.modules.get("utils") is OURS:
        hidden = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "utils"}
    try:
        yield
    finally:
        if "utils" not in sys.modules and PathFinder.find_spec("utils", sys.path) is None:
            sys.modules.update(hidden)
            sys.path[:] = before if str(folder) in before else [*before, str(folder)]
