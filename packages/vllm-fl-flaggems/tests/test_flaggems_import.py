"""What importing FlagGems does to a process, and that this package contains it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path

import pytest

_EMULATION = Path(__file__).parents[3] / "tests" / "emulation" / "gems"

pytestmark = [
    pytest.mark.skipif(
        find_spec("flag_gems") is None or find_spec("triton") is None, reason="needs flag-gems and triton"
    ),
    pytest.mark.skipif(not _EMULATION.is_dir(), reason="needs the repository's tests/emulation"),
]

_PREPARE = "import sys, flag_gems_on_cpu\nflag_gems_on_cpu.install()\nimport torch\n"
_CONTAINED = "from vllm_fl_flaggems._gems import flag_gems\n"
_DEFINED = """
names = [f"{ns}::{op}" for ns, op in (("_C", "silu_and_mul"), ("_C", "cutlass_scaled_mm"),
    ("_moe_C", "topk_softmax"), ("_moe_C", "moe_sum"), ("_C_cache_ops", "concat_and_cache_mla"),
    ("_vllm_fa3_C", "get_scheduler_metadata")) if hasattr(getattr(torch.ops, ns), op)]
print(names)
"""


@pytest.fixture
def emulated(python):
    def run(code: str) -> str:
        lines = python(_PREPARE + code, _EMULATION).splitlines()
        return "\n".join(line for line in lines if not line.startswith("[Note]"))

    return run


_LEFT = """
print(sorted(name for name in sys.modules if name.partition(".")[0] == "vllm"))
print("flag_gems.patches" in sys.modules, hasattr(flag_gems, "apply_gems_patches_to_vllm"))
"""


def test_no_schema_no_extension_and_no_stand_in_is_left(emulated):
    assert emulated(_CONTAINED + _DEFINED + _LEFT).splitlines() == ["[]", "[]", "False False"]


def test_a_plain_import_does_define_them(emulated):
    """The effect is real: without it the test above would say nothing."""
    assert "_moe_C::topk_softmax" in emulated("import flag_gems\n" + _DEFINED)


def test_who_imported_it_first_keeps_it(emulated):
    code = "import flag_gems as theirs\n" + _CONTAINED + "print(theirs is flag_gems)"
    assert emulated(code) == "True"


def _flag(name: str) -> bool:
    try:
        return name in Path("/proc/cpuinfo").read_text()
    except OSError:
        return False


def _has(build: str) -> bool:
    spec = find_spec("vllm")
    folders = (spec.submodule_search_locations if spec else None) or []
    return any(list(Path(folder).glob(f"{build}.*so")) for folder in folders)


needs_builds = pytest.mark.skipif(
    not (_has("_C_AVX2") and _flag("avx2")), reason="needs a vLLM with another build of _C that runs here"
)

# So does vLLM: the library is loaded, although Python does not find the module in it.
_LOAD_VARIANT = """
import contextlib
with contextlib.suppress(ImportError):
    import vllm._C_AVX2
assert hasattr(torch.ops._C, "rms_norm")
"""


@needs_builds
def test_beside_another_build_of_vllm_s_extension(emulated):
    code = "print('vllm._C' in sys.modules, hasattr(torch.ops._moe_C, 'topk_softmax'))"
    assert emulated(_LOAD_VARIANT + _CONTAINED + code) == "False False"


@needs_builds
def test_before_another_build_of_vllm_s_extension(emulated):
    assert emulated(_CONTAINED + _LOAD_VARIANT + "print('alive')") == "alive"


@needs_builds
@pytest.mark.skipif(not _flag("avx512_bf16"), reason="needs a CPU that runs vllm._C")
def test_a_plain_import_aborts_there(python):
    """The abort is real, and a process cannot catch it."""
    code = (
        "import subprocess, sys\n"
        f"code = {_PREPARE + _LOAD_VARIANT + 'import flag_gems'!r}\n"
        "print(subprocess.run([sys.executable, '-c', code], capture_output=True).returncode)"
    )
    assert python(code, _EMULATION) == "-6"
