"""Install instep into a folder as a wheel would: packages, fixtures, entry points and the command.

Leaves out: building the wheel, which needs hatchling; what a wheel contains is read from `pyproject.toml`.
"""

import os
import shutil
import sys
import tomllib
from pathlib import Path

TOP = Path(__file__).resolve().parents[3]


def install(folder: Path) -> dict[str, str]:
    """Install into the folder -> the environment of a shell that has this installation and not the checkout."""
    project = tomllib.loads((TOP / "pyproject.toml").read_text())
    wheel, about = project["tool"]["hatch"]["build"]["targets"]["wheel"], project["project"]
    site, scripts = folder / "site", folder / "bin"
    for package in wheel["packages"]:
        shutil.copytree(TOP / package, site / Path(package).name)
    for source, target in wheel["force-include"].items():
        (site / target).parent.mkdir(parents=True, exist_ok=True)
        (site / target).symlink_to(TOP / source)
    info = site / f"{about['name']}-{about['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {about['name']}\nVersion: {about['version']}\n")
    (info / "entry_points.txt").write_text("".join(
        f"[{group}]\n" + "".join(f"{name} = {value}\n" for name, value in points.items())
        for group, points in about["entry-points"].items()))
    scripts.mkdir()
    for name, value in about["scripts"].items():
        module, _, function = value.partition(":")
        (scripts / name).write_text(f"#!{sys.executable}\nfrom {module} import {function}\n{function}()\n")
        (scripts / name).chmod(0o755)
    (scripts / "python").write_text(f'#!/bin/sh\nexec {sys.executable} "$@"\n')  # a link would lose the environment
    (scripts / "python").chmod(0o755)
    own = ("PYTHON", "PYTEST", "TRITON", "GITHUB")
    kept = {name: value for name, value in os.environ.items() if not name.startswith(own)}
    return {**kept, "PYTHONPATH": str(site), "PATH": f"{scripts}{os.pathsep}{kept['PATH']}", "OMP_NUM_THREADS": "1",
            "COLUMNS": "120"}  # fmt: skip
