"""FlagGems, imported once and without its effects on vLLM's operators.

``import flag_gems`` loads ``flag_gems.patches``, which imports vLLM's compiled
extensions by name and defines schemas, without kernels, for what it does not find
in ``torch.ops._C``, ``_moe_C``, ``_C_cache_ops`` and ``_vllm_fa3_C``. Whoever asks
``hasattr(torch.ops._moe_C, "topk_softmax")`` is then misled; the extension, loaded
later, finds its names taken; and where vLLM has loaded another variant of ``_C``
(on a CPU: ``_C_AVX2`` or ``_C_AVX512``) the second one aborts the process. None of
it is needed here, so that an empty module stands in while FlagGems is imported.
``import flag_gems.patches`` afterwards loads the real one, at the caller's risk.

Importing this module is what imports FlagGems: Python's own lock makes it once.
"""

from __future__ import annotations

import sys
from importlib import import_module
from types import ModuleType

_PATCHES = "flag_gems.patches"


def _import_contained() -> ModuleType:
    if "flag_gems" in sys.modules or _PATCHES in sys.modules:
        return import_module("flag_gems")  # somebody else was first
    stand_in = ModuleType(_PATCHES, "Stands in while vllm_fl_flaggems imports flag_gems.")
    stand_in.__dict__["__all__"] = []
    sys.modules[_PATCHES] = stand_in
    try:
        return import_module("flag_gems")
    finally:
        sys.modules.pop(_PATCHES, None)


flag_gems = _import_contained()

#: The context of a device: some launchers of FlagGems use the current one, not the tensors'.
device_of = flag_gems.runtime.torch_device_fn.device
