"""vLLM's own worker and model runner, on the chip of the active description.

vLLM names this class in its configuration, so that this module is the first of ours
that is imported in a worker and nowhere else: here names are bound, before the modules
that call them are imported.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import inspect
from typing import Any

import torch

from vllm_fl.dispatch.calling.fatal import is_fatal
from vllm_fl.dispatch.common.foreign import describe
from vllm_fl.integration.log import logger
from vllm_fl.platform import schemas
from vllm_fl.platform import settings
from vllm_fl.platform.active_chip import CHIP
from vllm_fl.platform.active_chip import DESCRIPTION
from vllm_fl.platform.bind import bind
from vllm_fl.platform.errors import PlatformError

settings.enter_worker()
bind(DESCRIPTION)
if CHIP.graph_wrapper:
    schemas.define_weak_reference(CHIP.dispatch_key)

from vllm.platforms import current_platform  # noqa: E402
from vllm.utils import torch_utils  # noqa: E402
from vllm.utils.mem_utils import MemorySnapshot  # noqa: E402
from vllm.utils.torch_utils import set_random_seed  # noqa: E402
from vllm.v1.worker import gpu_worker  # noqa: E402
from vllm.v1.worker.utils import request_memory  # noqa: E402


def _guarded(warm_up: Any) -> Any:
    """Return vLLM's warm-up of kernels, without which a server starts too."""

    @functools.wraps(warm_up)
    def kernel_warmup(worker: Any) -> None:
        try:
            warm_up(worker)
        except Exception as error:  # it imports what is for other chips
            if is_fatal(error):
                raise
            logger.warning(
                "vllm-fl: vLLM's warm-up of kernels ends with %s; the first requests may be slow",
                describe(error),
            )

    return kernel_warmup


gpu_worker.kernel_warmup = _guarded(gpu_worker.kernel_warmup)


class _CurrentStream:
    """This thread's stream, in the place of vLLM's note of it.

    vLLM notes what its wrap of ``torch.cuda.set_stream`` is given. A chip's ``stream(...)``
    makes another one current without calling that, and vLLM would go on with the old one.
    """

    @property
    def value(self) -> Any:
        ask = current_platform.current_stream
        return ask() if ask is not None else None

    @value.setter
    def value(self, stream: Any) -> None:
        pass


torch_utils._current_stream_tls = _CurrentStream()


class ChipWorker(gpu_worker.Worker):  # type: ignore[misc]
    """vLLM's worker, but for what it does for CUDA by name."""

    def _maybe_get_memory_pool_context(self, tag: str) -> contextlib.AbstractContextManager[None]:
        # Its pools are CUDA's, for the mode in which a server sleeps.
        return contextlib.nullcontext()

    def init_device(self) -> None:
        """Open the device, join the other ranks, measure memory, and make the runner.

        Raises:
            PlatformError: there are fewer devices than ranks.
        """
        self._shift_local_rank()
        self.device = torch.device(self._device())
        current_platform.set_device(self.device)
        current_platform.check_if_supports_dtype(self.model_config.dtype)
        # What the backend of the ranks takes is measured too.
        gpu_worker.init_worker_distributed_environment(
            self.vllm_config,
            self.rank,
            self.distributed_init_method,
            self.local_rank,
            current_platform.dist_backend,
        )
        set_random_seed(self.model_config.seed)
        gc.collect()
        torch.accelerator.empty_cache()
        self.init_snapshot = MemorySnapshot(device=self.device)
        self.requested_memory = request_memory(
            self.init_snapshot, self.cache_config, *self._external_weights()
        )
        self._make_runner()

    def _shift_local_rank(self) -> None:
        """Count the devices of the replicas that share this machine, as vLLM does for CUDA."""
        parallel = self.parallel_config
        is_placed = (
            parallel.distributed_executor_backend in ("ray", "external_launcher")
            or parallel.data_parallel_backend == "ray"
            or getattr(parallel, "nnodes_within_dp", 1) != 1
        )
        if is_placed:
            return
        replica = parallel.data_parallel_rank_local
        if replica is None:
            replica = getattr(parallel, "data_parallel_index", parallel.data_parallel_rank)
        ranks = parallel.pipeline_parallel_size * parallel.tensor_parallel_size
        self.local_rank += replica * ranks * getattr(parallel, "prefill_context_parallel_size", 1)

    def _device(self) -> str:
        assigned = getattr(self.parallel_config, "assigned_physical_gpu_ids", None)
        if assigned is not None:
            from vllm.platforms.interface import set_assigned_physical_gpu_ids

            set_assigned_physical_gpu_ids(assigned)
        count = len(assigned) if assigned is not None else current_platform.device_count()
        if self.local_rank >= count:
            variable = CHIP.visible_devices or "no variable"
            raise PlatformError(
                f"{DESCRIPTION}: rank {self.local_rank} of this machine needs a device of its own, and "
                f"{CHIP.torch_module} counts {count} ({variable} limits them)"
            )
        if not CHIP.indexed:
            return CHIP.device_type
        # Not through the instance, which looks for what it lacks in the chip's module.
        visible = getattr(type(current_platform), "logical_device_id_to_visible_device_id", int)
        return f"{CHIP.device_type}:{visible(self.local_rank)}"

    def _external_weights(self) -> tuple[int, ...]:
        """Return what vLLM counts of weights that another process holds (0.32 and later)."""
        if "external_weight_memory" not in inspect.signature(request_memory).parameters:
            return ()
        return (gpu_worker.get_model_loader(self.load_config).get_external_weight_memory(self.vllm_config),)

    def _make_runner(self) -> None:
        make = getattr(self, "_init_workspace_and_model_runner", None)
        if make is not None:
            make()
            return
        from vllm.v1.worker.workspace import init_workspace_manager

        init_workspace_manager(self.device, 2 if self.parallel_config.enable_dbo else 1)
        self.model_runner = self._make_model_runner()
        if self.rank == 0:
            gpu_worker.report_usage_stats(self.vllm_config)

    def _make_model_runner(self) -> Any:
        """Return the description's runner, or vLLM's."""
        if CHIP.runner:
            return DESCRIPTION.load("runner", CHIP.runner)(self.vllm_config, self.device)
        if hasattr(gpu_worker.Worker, "_make_model_runner"):
            return super()._make_model_runner()
        from vllm.v1.worker.gpu_model_runner import GPUModelRunner

        return GPUModelRunner(self.vllm_config, self.device)
