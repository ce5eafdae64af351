"""The recipe, and the packages it names: fetched with apt, unpacked with dpkg, never installed."""

from __future__ import annotations

import gzip
import hashlib
import subprocess
import tomllib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from urllib.parse import quote

RECIPE = Path(__file__).with_name("recipe.toml")


@dataclass(frozen=True)
class Source:
    """Files of one package that one reader reads.

    Attributes:
        package, version, sha256, licence: The package as Debian has it.
        reader: The name of a function in `readers` or `entries`.
        book: Stands first in the titles; the document's own title if empty.
        most: Kilobytes of text to keep.
        least: Words of its shortest passage.
        files: Patterns of paths in the package.
    """

    package: str
    version: str
    sha256: str
    licence: str
    reader: str
    book: str
    most: int
    least: int
    files: tuple[str, ...]


def sources(recipe: Path = RECIPE) -> list[Source]:
    """The rows of the recipe."""
    rows = tomllib.loads(recipe.read_text("utf-8"))["source"]
    return [Source(**{**row, "files": tuple(row["files"])}) for row in rows]


def unpacked(source: Source, folder: Path) -> Path:
    """The folder of a package's files.

    Raises:
        ValueError: The package is not the one of the recipe.
    """
    debs, target = folder / "debs", folder / "unpacked" / source.package
    debs.mkdir(parents=True, exist_ok=True)
    found = list(debs.glob(f"{source.package}_{quote(source.version, safe='+~.-')}_*.deb".replace("%3A", "%3a")))
    if not found:
        subprocess.run(["apt-get", "download", "-qq", f"{source.package}={source.version}"], cwd=debs, check=True)
        found = list(debs.glob(f"{source.package}_*.deb"))
    if not target.exists():
        digest = hashlib.sha256(found[0].read_bytes()).hexdigest()
        if digest != source.sha256:
            raise ValueError(f"{found[0].name} has SHA-256 {digest}, the recipe says {source.sha256}")
        target.mkdir(parents=True)
        subprocess.run(["dpkg-deb", "-x", str(found[0]), str(target)], check=True)
    return target


def files(source: Source, root: Path) -> Iterator[Path]:
    """The files of a source in order, each once."""
    seen: set[Path] = set()
    for pattern in source.files:
        for path in sorted(root.glob(pattern)):
            if path.is_file() and path not in seen:
                seen.add(path)
                yield path


def text(path: Path) -> str:
    """What a file says; compressed files are opened."""
    data = path.read_bytes()
    if path.suffix in (".gz", ".dz"):
        data = gzip.decompress(data)
    try:
        return data.decode("utf-8")
    except UnicodeDecodeError:
        return data.decode("latin-1")
