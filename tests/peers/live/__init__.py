"""Released SGLangs in whole processes: packed (`bundle`), run on a GPU (`run`), and judged (`judge`)."""

import tarfile
from pathlib import Path
from typing import Any

TOP = Path(__file__).resolve().parents[3]
ARCHIVE = "bundle.tar.xz"
# Members that lead out of their folder are refused. Python 3.11 knows that since 3.11.4.
SAFELY: dict[str, Any] = {"filter": "data"} if hasattr(tarfile, "data_filter") else {}
