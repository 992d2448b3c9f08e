# ruff: noqa: D102 - vLLM's own class documents what it asks
"""vLLM's platform, made of the active description.

The class attributes are fixed when this module is imported, which happens only where a
description is active. What vLLM asks of a platform and a description does not say is
vLLM's default; what vLLM 0.26 to 0.33 leave unanswered is answered here.
"""

from __future__ import annotations

import functools
from typing import TYPE_CHECKING
from typing import Any
from typing import ClassVar

import torch
from vllm.platforms.interface import DeviceCapability
from vllm.platforms.interface import Platform
from vllm.platforms.interface import PlatformEnum

from vllm_fl.integration.attention import OPERATOR
from vllm_fl.integration.log import logger
from vllm_fl.platform import kernels
from vllm_fl.platform import settings
from vllm_fl.platform.active_chip import CHIP
from vllm_fl.platform.active_chip import DESCRIPTION
from vllm_fl.platform.errors import PlatformError

if TYPE_CHECKING:
    from types import ModuleType

#: What a worker cannot do without.
NEEDED = ("device_count", "manual_seed_all", "set_device")


def as_vllm_names(reference: str) -> str:
    """Return ``module:Class`` as vLLM names it: ``module.Class``."""
    return reference.replace(":", ".")


@functools.cache
def device_module() -> ModuleType:
    """Make PyTorch know the device; return the module that is to it what ``torch.cuda`` is to CUDA.

    Raises:
        PlatformError: it cannot be imported, or lacks what every worker needs.
    """
    for name in CHIP.imports:
        DESCRIPTION.load("imports", name)
    module: ModuleType = DESCRIPTION.load("torch_module", CHIP.torch_module)
    lacking = [name for name in NEEDED if not callable(getattr(module, name, None))]
    if lacking:
        raise PlatformError(
            f"{DESCRIPTION}: field torch_module: {CHIP.torch_module} has no {', '.join(lacking)}"
        )
    return module


@functools.cache
def _warn_of(name: str) -> None:
    logger.warning(
        "vllm-fl: vLLM asks the platform for %s, and %s has none; it goes on without", name, CHIP.torch_module
    )


class ChipPlatform(Platform):  # type: ignore[misc]
    """The chip of the active description, as vLLM sees it."""

    # Anything else claims to be one of the chips that vLLM knows.
    _enum = PlatformEnum.OOT
    # Not for people: vLLM makes torch.device(f"{device_name}:{index}") of it.
    device_name = CHIP.device_type
    device_type = CHIP.device_type
    dispatch_key = CHIP.dispatch_key
    dist_backend = CHIP.dist_backend
    device_control_env_var = CHIP.visible_devices or Platform.device_control_env_var
    ray_device_key = CHIP.ray_key
    ray_noset_device_env_vars: ClassVar[list[str]] = list(CHIP.ray_noset)
    # Also for small functions, which vLLM compiles in eager mode too.
    simple_compile_backend = CHIP.compile_backend or "eager"

    def __init__(self) -> None:
        # vLLM makes torch.device(device_type) in the front end, before there is a worker.
        device_module()
        settings.prefer_runner()

    def __getattr__(self, key: str) -> Any:
        # vLLM's own looks in torch.<device_type>, which need not be there.
        if key.startswith("__"):
            raise AttributeError(key)
        found = getattr(device_module(), key, None)
        if found is None:
            _warn_of(key)
        return found

    @property
    def supported_dtypes(self) -> list[torch.dtype]:
        return [getattr(torch, name) for name in CHIP.dtypes]

    # -- what the chip is --

    @classmethod
    def get_device_name(cls, device_id: int = 0) -> str:
        return CHIP.name

    @classmethod
    def get_device_uuid(cls, device_id: int = 0) -> str:
        return f"{DESCRIPTION.name}-{device_id}"

    @classmethod
    def get_device_capability(cls, device_id: int = 0) -> DeviceCapability | None:
        return DeviceCapability(*CHIP.capability) if CHIP.capability else None

    @classmethod
    def get_device_total_memory(cls, device_id: int = 0) -> int:
        """Return a chip's bytes; without ``total_memory`` the front end gets none.

        It asks before it may fork its workers, and an open device does not survive that.
        """
        if CHIP.total_memory:
            return int(DESCRIPTION.load("total_memory", CHIP.total_memory)(device_id))
        if not settings.is_in_worker():
            raise NotImplementedError(f"{DESCRIPTION} has no total_memory, and the device stays shut here")
        return int(device_module().get_device_properties(device_id).total_memory)

    @classmethod
    def num_compute_units(cls, device_id: int = 0) -> int:
        if CHIP.compute_units:
            return int(DESCRIPTION.load("compute_units", CHIP.compute_units)(device_id))
        return int(device_module().get_device_properties(device_id).multi_processor_count)

    @classmethod
    def get_current_memory_usage(cls, device: Any = None) -> float:
        return float(torch.accelerator.max_memory_allocated(device))

    @classmethod
    def check_if_supports_dtype(cls, dtype: torch.dtype) -> None:
        name = str(dtype).removeprefix("torch.")
        if name not in CHIP.dtypes:
            raise ValueError(f"{CHIP.name} has no {name}, but {', '.join(CHIP.dtypes)}: give --dtype")

    @classmethod
    def supports_fp8(cls) -> bool:
        return CHIP.fp8

    @classmethod
    def is_pin_memory_available(cls) -> bool:
        return CHIP.pin_memory

    # -- what is done to it --

    @classmethod
    def set_device(cls, device: torch.device) -> None:
        device_module().set_device(device)

    @classmethod
    def manual_seed_all(cls, seed: int) -> None:
        device_module().manual_seed_all(seed)

    @classmethod
    def inference_mode(cls) -> Any:
        return torch.inference_mode(mode=True)

    @classmethod
    def import_kernels(cls) -> None:
        """Import no compiled library of vLLM: what is in there is for other chips."""
        device_module()

    @classmethod
    def register_triton_kernel_overrides(cls) -> None:
        """Put the description's functions in the place of vLLM's Triton kernels (0.32 and later).

        Without Triton, plain PyTorch takes the place of those that every model needs.
        """
        from vllm.triton_utils import HAS_TRITON

        chips = {
            name: DESCRIPTION.load(f"triton_kernels: {name}", reference)
            for name, reference in CHIP.triton_kernels.items()
        }
        ours = {} if HAS_TRITON else kernels.WITHOUT_TRITON
        if chips or ours:
            from vllm.triton_utils.dispatcher import register_kernels

            register_kernels({**ours, **chips})

    # -- what vLLM does for it --

    @classmethod
    def apply_config_platform_defaults(cls, vllm_config: Any) -> None:
        settings.before_defaults(vllm_config)

    @classmethod
    def check_and_update_config(cls, vllm_config: Any) -> None:
        settings.complete(vllm_config)

    @classmethod
    def update_block_size_for_backend(cls, vllm_config: Any) -> None:
        with settings.block_size(vllm_config.cache_config):
            super().update_block_size_for_backend(vllm_config)

    @classmethod
    def get_attn_backend_cls(
        cls, selected_backend: Any, attn_selector_config: Any, num_heads: int | None = None
    ) -> str:
        """Return the attention of last resort: the dispatch has been asked before.

        Raises:
            NotImplementedError: the description has none.
        """
        if selected_backend is not None:
            return str(selected_backend.get_path())
        if CHIP.attention:
            return as_vllm_names(CHIP.attention)
        raise NotImplementedError(
            f"no installed wheel serves {OPERATOR} on {CHIP.name}; the lines of vllm-fl above say why "
            f"those that were asked declined. Install one, or name one in {DESCRIPTION}: field attention"
        )

    @classmethod
    def get_device_communicator_cls(cls) -> str:
        return (
            as_vllm_names(CHIP.communicator) if CHIP.communicator else super().get_device_communicator_cls()
        )

    @classmethod
    def get_punica_wrapper(cls) -> str:
        from vllm.triton_utils import HAS_TRITON

        where = ("gpu", "PunicaWrapperGPU") if HAS_TRITON else ("cpu", "PunicaWrapperCPU")
        return "vllm.lora.punica_wrapper.punica_{}.{}".format(*where)

    @classmethod
    def stateless_init_device_torch_dist_pg(cls, *args: Any, **kwargs: Any) -> Any:
        raise NotImplementedError(
            f"no group of {CHIP.dist_backend} is made outside of torch.distributed's own"
        )

    @classmethod
    def support_static_graph_mode(cls) -> bool:
        return CHIP.graph_wrapper is not None

    @classmethod
    def get_static_graph_wrapper_cls(cls) -> str:
        return (
            as_vllm_names(CHIP.graph_wrapper)
            if CHIP.graph_wrapper
            else super().get_static_graph_wrapper_cls()
        )

    @classmethod
    def get_pass_manager_cls(cls) -> str:
        return "vllm_fl.platform.passes.ChipPassManager"

    @classmethod
    def opaque_attention_op(cls) -> bool:
        return True

    @classmethod
    def support_hybrid_kv_cache(cls) -> bool:
        return True

    @classmethod
    def check_runner_kv_caches_multi_layer(cls) -> None:
        """Say nothing: vLLM's own runner, which is used, takes them."""

    @classmethod
    def check_max_model_len(cls, max_model_len: int) -> int:
        return max_model_len

    @classmethod
    def set_additional_forward_context(cls, *args: Any, **kwargs: Any) -> dict[str, Any]:
        return {}
