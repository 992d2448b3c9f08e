"""Stand-in CANN libraries, so that the real torch_npu wheel can be imported without CANN.

Every function answers 0 and does nothing, but a few: there are no devices, and the
chip is called Ascend910B1. That is enough for torch_npu to register its operators
with their real schemas, and for nothing else: no kernel of the wheel can run.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import subprocess
from pathlib import Path
from typing import TYPE_CHECKING
from typing import Final

if TYPE_CHECKING:
    from collections.abc import Mapping

_HERE: Final = Path(__file__).parent
_LIBRARIES: Final = ("hccl", "ascendcl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel")
_SPECIAL: Final = """\
int aclrtGetDeviceCount(unsigned *count) { if (count) *count = 0; return 0; }
int aclrtGetDevice(int *device) { if (device) *device = 0; return 107002; }
const char *aclrtGetSocName(void) { return "Ascend910B1"; }
const char *aclGetRecentErrMsg(void) { return "stand-in CANN: there is no device"; }
"""


def _symbols(name: str) -> list[str]:
    lines = (_HERE / name).read_text().split("\n")
    return [line for line in lines if line and not line.startswith("#")]


def build(folder: Path, *, without: tuple[str, ...] = ()) -> Path:
    """Build the libraries into ``folder`` and return it.

    Args:
        folder: made if it is not there.
        without: libraries to leave out, such as ``"atb"``.

    Raises:
        FileNotFoundError: there is no C compiler.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise FileNotFoundError("the stand-in CANN libraries need a C compiler")
    folder.mkdir(parents=True, exist_ok=True)
    zeros = "".join(f"long {name}(void) {{ return 0; }}\n" for name in _symbols("cann_symbols.txt"))
    # 1 is an error of ATB: a call that reached it must not look like a success.
    ones = "".join(f"long {name}(void) {{ return 1; }}\n" for name in _symbols("atb_symbols.txt"))
    sources = dict.fromkeys(_LIBRARIES, _SPECIAL + zeros) | {"atb": ones}
    for name, source in sources.items():
        if name in without:
            continue
        # With its name inside, a library that is loaded by its path serves those that need it.
        options = ["-shared", "-fPIC", "-w", f"-Wl,-soname,lib{name}.so", "-x", "c", "-"]
        command = [compiler, *options, "-o", str(folder / f"lib{name}.so")]
        subprocess.run(command, input=source, text=True, check=True)
    return folder


def load(folder: Path) -> None:
    """Load the libraries into this process, so that torch_npu can be imported in it."""
    os.environ["TORCH_DEVICE_BACKEND_AUTOLOAD"] = "0"
    for library in sorted(folder.glob("*.so")):
        ctypes.CDLL(str(library), ctypes.RTLD_GLOBAL)


def environment(folder: Path) -> Mapping[str, str]:
    """Return the variables with which a new process finds the libraries."""
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("LD_LIBRARY_PATH")])])
    return {"LD_LIBRARY_PATH": path, "TORCH_DEVICE_BACKEND_AUTOLOAD": "0"}
