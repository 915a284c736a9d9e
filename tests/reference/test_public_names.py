"""The public names: all of them are there, and those that need no torch do not bring it.

Leaves out: what they do.
"""

import subprocess
import sys
from pathlib import Path

import pytest

import instep_reference
from instep_reference import contract

ROOT = Path(instep_reference.__file__).parents[1]
LIGHT = ("errors.BadInput", "config.ModelConfig", "adaptive.AdaptiveFile")


@pytest.mark.parametrize("package", [instep_reference, contract], ids=lambda package: package.__name__)
def test_every_public_name_exists_and_is_ours(package: object) -> None:
    names = package.__all__  # type: ignore[attr-defined]
    assert names == sorted(set(names), key=names.index) and len(names) >= 3
    for name in names:
        assert getattr(package, name).__module__.startswith("instep_reference."), name
    with pytest.raises(AttributeError, match="no attribute 'nothing'"):
        package.nothing  # type: ignore[attr-defined]  # noqa: B018


def test_light_part_of_the_contract_does_not_import_torch() -> None:
    names = ", ".join(name.partition(".")[2] for name in LIGHT)
    program = f"import sys; from instep_reference.contract import {names}; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-P", "-c", program], capture_output=True, text=True, check=True,
                          env={"PYTHONPATH": str(ROOT)})
    assert done.stdout.strip() == "False"
