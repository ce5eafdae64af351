"""`python -m tools.sbom FOLDER` writes ragkv-VERSION.cdx.json: what an installed ragkv consists of, as CycloneDX.

cyclonedx-py lists every package of the environment. An environment of developers holds more than ragkv needs, so the
list is cut to the packages that ragkv itself requires, and what these require.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tomllib
from collections.abc import Sequence
from importlib.metadata import distribution
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from ragkv import __version__

ROOT = Path(__file__).resolve().parents[1]


def required(lines: Sequence[str]) -> set[str]:
    """Return the names of all packages that an installation needs.

    Args:
        lines: Requirements as pyproject.toml writes them. Each must be installed.
    """
    found: set[tuple[str, str]] = set()
    waiting = [(Requirement(line), "") for line in lines]
    while waiting:
        requirement, extra = waiting.pop()
        if requirement.marker and not requirement.marker.evaluate({"extra": extra}):
            continue
        name = canonicalize_name(requirement.name)
        for wanted in ("", *requirement.extras):
            if (name, wanted) not in found:
                found.add((name, wanted))
                waiting += [(Requirement(line), wanted) for line in distribution(name).requires or ()]
    return {name for name, _ in found}


def cut(bom: dict[str, Any], lines: Sequence[str], version: str) -> dict[str, Any]:
    """Return the list with the packages only that ragkv needs.

    Args:
        bom: What cyclonedx-py wrote.
        lines: Requirements of ragkv.
        version: Version of ragkv.
    """
    direct, names = {canonicalize_name(Requirement(line).name) for line in lines}, required(lines)
    components = [each for each in bom["components"] if canonicalize_name(each["name"]) in names]
    main = {**bom["metadata"]["component"], "version": version, "purl": f"pkg:pypi/ragkv@{version}"}
    kept = {each["bom-ref"] for each in components}
    dependencies = [
        {**each, "dependsOn": [ref for ref in each.get("dependsOn", ()) if ref in kept]}
        for each in bom["dependencies"]
        if each["ref"] in kept
    ]
    # cyclonedx-py counts the packages of every extra as dependencies of ragkv.
    own = [each["bom-ref"] for each in components if canonicalize_name(each["name"]) in direct]
    dependencies.append({"ref": main["bom-ref"], "dependsOn": own})
    metadata = {**bom["metadata"], "component": main}
    return {**bom, "metadata": metadata, "components": components, "dependencies": dependencies}


def write(folder: Path) -> Path:
    """Write the list of components and return its path.

    Args:
        folder: Where to write it.
    """
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    arguments = ["environment", "--pyproject", str(ROOT / "pyproject.toml"), "--output-reproducible", sys.executable]
    done = subprocess.run(
        [sys.executable, "-m", "cyclonedx_py", *arguments], capture_output=True, text=True, check=True
    )
    bom = cut(json.loads(done.stdout), project["dependencies"], __version__)
    folder.mkdir(parents=True, exist_ok=True)
    path = folder / f"ragkv-{__version__}.cdx.json"
    path.write_text(json.dumps(bom, indent=2) + "\n", "utf-8")
    return path


if __name__ == "__main__":
    print(write(Path(sys.argv[1])))
