"""Released SGLangs in whole processes: packed (`bundle`), run on a GPU (`run`), and judged (`judge`)."""

import tarfile
from pathlib import Path

TOP = Path(__file__).resolve().parents[3]
ARCHIVE = "bundle.tar.xz"


def extract(archive: tarfile.TarFile, into: Path) -> None:
    """Unpack files, second names of files, and folders. Other members and names that lead out of it are refused."""
    for one in archive:
        names = (one.name, one.linkname) if one.islnk() else (one.name,)
        inside = all((into / name).resolve().is_relative_to(into.resolve()) for name in names)
        if not inside or not (one.isreg() or one.isdir() or one.islnk()):
            raise SystemExit(f"{archive.name}: {one.name} is no file or folder in the archive")
    # Python 3.11 has filters of archives since 3.11.4, and later versions ask for one.
    archive.extractall(into, **({"filter": "data"} if hasattr(tarfile, "data_filter") else {}))
