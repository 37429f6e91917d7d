"""Where specifications lie: those that come with the library, and files of one's own."""

from __future__ import annotations

import os
from pathlib import Path

from costgraph.algebra.symbols import shown
from costgraph.errors import SpecError
from costgraph.notation.records import near

__all__ = ["DEVICES", "NETWORKS", "known", "path_of"]

#: What a specification is of, and the folder of those that come with the library.
DEVICES, NETWORKS = ("hardware", "."), ("network", "networks")


def _folder() -> Path:
    # inside the package in a wheel; beside it in a checkout, which an editable install points to
    inside, beside = (folder / "hardware_specs" for folder in Path(__file__).resolve().parents[1:3])
    return inside if inside.is_dir() else beside


def known(of: tuple[str, str] = DEVICES) -> list[str]:
    """Return the names of the devices, or networks, that come with the library, sorted."""
    return sorted(path.stem for path in (_folder() / of[1]).glob("*.toml"))


def path_of(name_or_path: object, of: tuple[str, str] = DEVICES) -> Path:
    """Return the file of a name, or the path itself, which ends with ``.toml`` or has a slash in it."""
    what, folder = of
    if not isinstance(name_or_path, str | os.PathLike):
        raise SpecError(f"{what} {shown(name_or_path)}: expected a name or the path of a TOML file")
    text = os.fsdecode(name_or_path)
    if isinstance(name_or_path, os.PathLike) or text.endswith(".toml") or "/" in text or os.sep in text:
        return Path(text)
    names = known(of)
    if text not in names:
        expected = f"{near(text, names)}expected the path of a .toml file or one of {', '.join(names)}"
        raise SpecError(f"{what} {shown(text)} is unknown: {expected}")
    return _folder() / folder / f"{text}.toml"
