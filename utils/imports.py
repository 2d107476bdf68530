"""Importing the user's own modules, in a project that has a package called `utils` just as this one has."""

import contextlib
import importlib
import sys
from collections.abc import Iterator
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

OURS = Path(__file__).resolve().parents[1] if __package__ == "utils" else None  # None: ejected, nothing to hide


@contextlib.contextmanager
def users_imports(folder: Path) -> Iterator[None]:
    """What is imported inside is the user's: `folder` comes first on sys.path, and `utils` is never ours. From then on
    the name is theirs where they have such a package, for they may import from it later and ours is all loaded."""
    before = list(sys.path)
    sys.path[:] = [str(folder), *before]
    sys.path[:] = [path for path in sys.path if Path(path).resolve() != OURS]
    importlib.invalidate_caches()
    theirs, ours = PathFinder.find_spec("utils", sys.path), {}
    if theirs is None or origin(theirs) != origin(getattr(sys.modules.get("utils"), "__spec__", None)):
        ours = {name: sys.modules.pop(name) for name in list(sys.modules) if name.partition(".")[0] == "utils"}
    try:
        yield
    finally:
        if theirs is None and "utils" not in sys.modules:
            sys.modules.update(ours)
            sys.path[:] = before if str(folder) in before else [*before, str(folder)]


def origin(spec: ModuleSpec | None) -> tuple | None:
    """Where a package lies; one without __init__.py has folders only."""
    return spec and (spec.origin, *(spec.submodule_search_locations or ()))
