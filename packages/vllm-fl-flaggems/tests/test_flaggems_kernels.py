"""Run the tests of FlagGems' real kernels, which stand in ``interpreted``, in a process of their own."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

_FOLDER = Path(__file__).with_name("interpreted")
_EMULATION = Path(__file__).parents[3] / "tests" / "emulation" / "gems"


@pytest.mark.skipif(find_spec("flag_gems") is None, reason="needs flag-gems")
@pytest.mark.skipif(find_spec("triton") is None, reason="needs triton")
@pytest.mark.skipif(not _EMULATION.is_dir(), reason="needs the repository's tests/emulation")
@pytest.mark.parametrize("which", ["not long", pytest.param("long", marks=pytest.mark.long)])
def test_the_kernels_in_triton_s_interpreter(which):
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", which, str(_FOLDER)],
        env={**os.environ, "TRITON_INTERPRET": "1"},
        capture_output=True,
        text=True,
        check=False,
        timeout=2 * 3600 if which == "long" else 3600,
    )
    print(done.stdout[-20000:])
    assert done.returncode == 0, done.stdout[-20000:] + done.stderr[-2000:]
    assert re.search(r"\b1 passed" if which == "long" else r"\d{2,} passed", done.stdout)
    assert "skipped" not in done.stdout
