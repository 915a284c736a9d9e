"""Released SGLangs in whole processes: packed (`bundle`), run on a GPU (`run`), and judged (`judge`)."""

from pathlib import Path

TOP = Path(__file__).resolve().parents[3]
ARCHIVE = "bundle.tar.xz"
