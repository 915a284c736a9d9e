"""A fork of a process that has imported torch runs a copy of the source as a new Python does.

Leaves out: what is run (`test_faults.py`).
"""

import subprocess
import sys
from pathlib import Path

import pytest

from instep_proof.faults import plant, run_in_forks
from support.running.covering import WHOLE

SAYS = """
import os, sys, instep, torch
print(instep.SAID, os.getcwd(), os.environ["COLUMNS"], sys.argv, __name__, torch.get_num_threads())
print("beside", file=sys.stderr)
"""
WORDS = (
    ("-c", SAYS, "more", "words"), ("-c", "raise SystemExit(3)"), ("-c", "import sys; sys.exit('no')"), ("-c", "1 / 0"),
    ("-c", "import os; os.kill(os.getpid(), 9)"), ("-m", "instep.within", "word"),
    ("-c", "import atexit; atexit.register(print, 'last')"),
)


@WHOLE
@pytest.mark.skipif(sys.platform != "linux", reason="forks are made on Linux alone")
def test_a_fork_ends_as_a_new_python_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "instep").mkdir()
    (tmp_path / "instep" / "__init__.py").write_text("SAID = 'the copy'\n")
    (tmp_path / "instep" / "within.py").write_text("import sys\nprint(__name__, sys.argv)\n")
    fresh = [plant.run_python(tmp_path, *words) for words in WORDS]
    with run_in_forks.warm():
        assert plant.forks is not None
        for words, new in zip(WORDS, fresh, strict=True):
            fork = plant.run_python(tmp_path, *words)
            assert (fork.returncode, fork.stdout) == (new.returncode, new.stdout), words
            assert fork.stderr.splitlines()[-1:] == new.stderr.splitlines()[-1:], words
        assert plant.forks.spent > 0 and "the copy" in fresh[0].stdout
        monkeypatch.setattr(plant, "TIMEOUT_S", 0.2)
        with pytest.raises(subprocess.TimeoutExpired):
            plant.run_python(tmp_path, "-c", "import time; time.sleep(60)")
        monkeypatch.setattr(plant, "TIMEOUT_S", 60.0)
        assert plant.run_python(tmp_path, "-c", "print(1)").stdout == "1\n", "one that was ended ends no other"
        lost = plant.run_python(tmp_path, "-c", "import os; os.kill(os.getppid(), 9)")
        assert lost.returncode == run_in_forks.LOST and "every run is forked from has ended" in lost.stderr
        assert plant.run_python(tmp_path, "-c", "print(1)").stdout == "1\n", "the server is started again"
    assert plant.forks is None
