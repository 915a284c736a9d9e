"""The machine of a result: versions, device, and the installed kernels.

Torch is imported only for the name of a CUDA device.
"""

from __future__ import annotations

import platform
from importlib.metadata import PackageNotFoundError, version

from .kernel_syntax import kernels_syntax


def machine(device: str) -> dict[str, str | None]:
    """Versions, device, and the digest of the kernels; None for packages that are not installed."""
    return {
        "python": platform.python_version(), "system": system(), "device": device,
        "device_name": _name(device), **{package: installed(package) for package in ("torch", "triton", "instep")},
        "kernels_syntax": kernels_syntax(),
    }


def system() -> str:
    """The system, as in "Linux x86_64, glibc 2.39", without the Linux kernel's build, which changes no result."""
    library = " ".join(filter(None, platform.libc_ver()))
    return f"{platform.system()} {platform.machine()}" + (f", {library}" if library else "")


def installed(package: str) -> str | None:
    """The version of an installed package, without importing it."""
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def release(name: str, *packages: str) -> str:
    """A project and its version: that of the first installed package. Sources on Python's path have no metadata."""
    version = next(filter(None, map(installed, packages or (name,))), "(no version metadata)")
    return f"{name} {version}"


def _name(device: str) -> str:
    if not device.startswith("cuda"):
        return platform.processor() or platform.machine()
    import torch

    return str(torch.cuda.get_device_name(device))
