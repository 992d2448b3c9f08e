"""What vLLM's configuration says where a description is active.

vLLM asks a platform twice: before it fills in its defaults, and when the configuration is
complete. What is replaced is what an unknown chip cannot do; a user's own value is never
replaced without a line that says so.
"""

from __future__ import annotations

import os
from contextlib import contextmanager
from typing import TYPE_CHECKING
from typing import Any

from vllm_fl.integration.log import logger

if TYPE_CHECKING:
    from collections.abc import Iterator

    from vllm_fl.platform.description import Chip

#: The entry of vLLM's ``additional_config``, which is a part of every key of its compile caches.
KEY = "vllm_fl_platform"

_RUNNER = "VLLM_USE_V2_MODEL_RUNNER"
_WORKER = "vllm_fl.platform.worker.ChipWorker"

_in_worker = False


def enter_worker() -> None:
    """Note that this process runs a worker: the device may be opened."""
    global _in_worker
    _in_worker = True


def is_in_worker() -> bool:
    """Whether this process runs a worker."""
    return _in_worker


def prefer_runner() -> None:
    """Choose vLLM's first model runner; the second one is Triton and unified addresses throughout.

    vLLM reads the variable while a configuration is made, before any platform is asked.
    """
    os.environ.setdefault(_RUNNER, "0")


def before_defaults(vllm_config: Any) -> None:
    """Say what vLLM must not fill in: it would choose for a chip that it knows."""
    chip = _chip()
    compilation = vllm_config.compilation_config
    asked_for = _fusions_off(compilation.pass_config)
    if asked_for:
        logger.warning("vllm-fl: %s has no %s of vLLM's; left out", chip.name, ", ".join(asked_for))
    if chip.compile_backend is None:
        compilation.mode = _no_compilation()


def complete(vllm_config: Any) -> None:
    """Make a complete configuration one for the chip; log what it has come to."""
    chip = _chip()
    parallel, compilation = vllm_config.parallel_config, vllm_config.compilation_config
    if parallel.worker_cls == "auto":
        parallel.worker_cls = chip.worker.replace(":", ".") if chip.worker else _WORKER
    parallel.disable_custom_all_reduce = True
    _set_block_size(vllm_config.cache_config)
    if chip.compile_backend is None:
        compilation.mode = _no_compilation()
    _fusions_off(compilation.pass_config)
    if chip.graph_wrapper is None:
        from vllm.config import CUDAGraphMode

        compilation.cudagraph_mode = CUDAGraphMode.NONE
        # vLLM fills it in for platforms with graphs alone, and finds no range for None.
        if compilation.compile_sizes is None:
            compilation.compile_sizes = []
    _ship_fingerprint(vllm_config)
    _apply_quirks(vllm_config)
    _log(vllm_config)


@contextmanager
def block_size(cache_config: Any) -> Iterator[None]:
    """Let vLLM take the description's size of a block for one that the user gave, within."""
    if not _set_block_size(cache_config):
        yield
        return
    cache_config.user_specified_block_size = True
    try:
        yield
    finally:
        cache_config.user_specified_block_size = False


def _set_block_size(cache_config: Any) -> bool:
    """Set the size that the description says; return whether it says one and the user does not."""
    size = _chip().block_size
    if size is None or cache_config is None or cache_config.user_specified_block_size:
        return False
    cache_config.block_size = size
    return True


def _chip() -> Chip:
    from vllm_fl.platform.active_chip import CHIP

    return CHIP


def _no_compilation() -> Any:
    from vllm.config import CompilationMode

    return CompilationMode.NONE


def _fusions_off(pass_config: Any) -> list[str]:
    """Turn off the passes that name compiled operators of vLLM; return those that were on."""
    names = [name for name in vars(pass_config) if name.startswith(("fuse_", "enable_"))]
    were_on = [name for name in names if getattr(pass_config, name)]
    for name in names:
        setattr(pass_config, name, False)
    return were_on


def _ship_fingerprint(vllm_config: Any) -> None:
    from vllm_fl.platform.active_chip import DESCRIPTION

    more = vllm_config.additional_config
    if isinstance(more, dict):
        more[KEY] = DESCRIPTION.fingerprint()
    else:
        logger.warning(
            "vllm-fl: additional_config is a %s and not a dict, so that vLLM's compile cache does not know "
            "the chip: give each chip a VLLM_CACHE_ROOT of its own",
            type(more).__name__,
        )


def vllm_version() -> tuple[int, ...]:
    """Return vLLM's version as far as a quirk names one, such as ``(0, 32)``."""
    import vllm

    return tuple(int(part) for part in str(vllm.__version__).split(".")[:2])


def _apply_quirks(vllm_config: Any) -> None:
    from vllm_fl.platform.active_chip import CHIP
    from vllm_fl.platform.active_chip import DESCRIPTION

    for quirk in CHIP.quirks:
        if quirk.applies_to(vllm_version()):
            DESCRIPTION.load(f"quirks: {quirk.name}", quirk.apply)(vllm_config)
            logger.info("vllm-fl: quirk %s of the platform: %s", quirk.name, quirk.reason)


def _log(vllm_config: Any) -> None:
    from vllm.config import CompilationMode
    from vllm.config import CUDAGraphMode

    from vllm_fl.platform.active_chip import CHIP
    from vllm_fl.platform.active_chip import DESCRIPTION

    overrides = [name for name in ("worker", "runner") if getattr(CHIP, name)]
    compilation = vllm_config.compilation_config
    logger.info(
        "vllm-fl: platform %s by %s; %s runner; compiled %s; graphs %s; %d names bound, %d overrides",
        CHIP.name,
        DESCRIPTION.wheel,
        "V2" if vllm_config.use_v2_model_runner else "V1",
        _on_or_off(compilation.mode != CompilationMode.NONE),
        _on_or_off(compilation.cudagraph_mode != CUDAGraphMode.NONE),
        len(CHIP.cuda_names) + len(CHIP.accelerator),
        len(overrides) + len(CHIP.quirks),
    )


def _on_or_off(value: bool) -> str:
    return "on" if value else "off"
