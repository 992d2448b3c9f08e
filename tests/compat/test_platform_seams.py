"""What the platform of a described chip relies on in vLLM, read in the sources of the installed one."""

from __future__ import annotations

import ast
import importlib.util
from pathlib import Path
from typing import TYPE_CHECKING

import pytest

import vllm_fl
from vllm_fl.platform.bind import CUDA_NAMES

if TYPE_CHECKING:
    from collections.abc import Iterator

OURS = Path(vllm_fl.__file__).parent / "platform"

#: The modules that vLLM's first model runner runs through, whatever the model.
RUNNER = (
    "v1/worker/gpu_model_runner.py",
    "v1/worker/gpu_worker.py",
    "v1/worker/worker_base.py",
    "v1/worker/utils.py",
    "v1/worker/gpu_input_batch.py",
    "v1/worker/block_table.py",
    "v1/worker/workspace.py",
    "v1/worker/ubatching.py",
    "v1/worker/gpu_ubatch_wrapper.py",
    "v1/outputs.py",
    "v1/utils.py",
    "compilation/cuda_graph.py",
    "distributed/parallel_state.py",
    "forward_context.py",
    "utils/mem_utils.py",
    "utils/platform_utils.py",
    "utils/torch_utils.py",
)

#: Names of ``torch.cuda`` that are there in every build of PyTorch, or stand behind a question.
HARMLESS = {
    "OutOfMemoryError": "a class of every build",
    "memory": "asked for CUDA and ROCm alone",
    "current_blas_handle": "overlapped batches on CUDA alone",
    "is_initialized": "False where there is no CUDA",
    "_is_compiled": "False where there is no CUDA",
    "get_device_properties": "asked by name of CUDA and ROCm alone",
}


def _folder() -> Path:
    spec = importlib.util.find_spec("vllm")
    if spec is None or not spec.submodule_search_locations:
        pytest.skip("vLLM is not installed")
    return Path(next(iter(spec.submodule_search_locations)))


def _version() -> tuple[int, ...]:
    import vllm

    return tuple(map(int, str(vllm.__version__).split(".")[:2]))


def _tree(path: Path) -> ast.Module:
    return ast.parse(path.read_text("utf-8"))


def _cuda_names(tree: ast.AST) -> set[str]:
    """Return the names of ``torch.cuda`` outside of annotations."""
    for node in ast.walk(tree):
        for part in ("annotation", "returns"):
            if getattr(node, part, None) is not None:
                setattr(node, part, None)
    return {
        node.attr
        for node in ast.walk(tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node.value) == "torch.cuda"
    }


def _class(tree: ast.AST, name: str) -> ast.ClassDef:
    return next(node for node in ast.walk(tree) if isinstance(node, ast.ClassDef) and node.name == name)


def _functions(cls: ast.ClassDef) -> Iterator[ast.FunctionDef]:
    yield from (node for node in cls.body if isinstance(node, ast.FunctionDef))


@pytest.fixture(scope="module")
def platform() -> dict[str, ast.FunctionDef]:
    tree = _tree(_folder() / "platforms" / "interface.py")
    return {one.name: one for one in _functions(_class(tree, "Platform"))}


@pytest.fixture(scope="module")
def ours() -> dict[str, ast.FunctionDef]:
    return {one.name: one for one in _functions(_class(_tree(OURS / "build.py"), "ChipPlatform"))}


def test_every_name_that_vllm_calls_is_known() -> None:
    version = _version()
    called = {name for file in RUNNER for name in _cuda_names(_tree(_folder() / file))}
    known = {name for name, entry in CUDA_NAMES.items() if entry.is_called_by(version)}
    assert called - known - set(HARMLESS) == set()
    # A list of what nobody calls any more would hide what is called next.
    assert known <= called
    assert set(HARMLESS) <= called


def _only_raises(function: ast.FunctionDef) -> bool:
    last = function.body[-1]
    return isinstance(last, ast.Raise) and "NotImplementedError" in ast.unparse(last)


#: What vLLM answers well enough itself where a chip has it not.
LEFT = {"get_all_gpu_pci_bus_ids"}


def test_what_vllm_leaves_open_is_answered(
    platform: dict[str, ast.FunctionDef], ours: dict[str, ast.FunctionDef]
) -> None:
    left_open = {name for name, function in platform.items() if _only_raises(function)}
    assert len(left_open) > 8
    assert left_open - set(ours) == LEFT


def test_what_is_answered_is_asked(
    platform: dict[str, ast.FunctionDef], ours: dict[str, ast.FunctionDef]
) -> None:
    """A method that vLLM has renamed would never be called."""
    asked = {name: function for name, function in ours.items() if name != "__init__"}
    assert set(asked) - set(platform) == set()
    for name, function in asked.items():
        takes = [one.arg for one in function.args.args]
        theirs = [one.arg for one in platform[name].args.args]
        assert function.args.vararg or takes == theirs, name


def test_the_worker_has_the_seams() -> None:
    tree = _tree(_folder() / "v1" / "worker" / "gpu_worker.py")
    worker = {one.name for one in _functions(_class(tree, "Worker"))}
    assert {"init_device", "_maybe_get_memory_pool_context"} <= worker
    calls = {ast.unparse(node.func) for node in ast.walk(tree) if isinstance(node, ast.Call)}
    # Replaced in the module, and called in the worker's.
    assert {"kernel_warmup", "init_worker_distributed_environment", "request_memory"} <= calls
    # The original, which is written anew, has no part that is not known.
    (init,) = [one for one in _functions(_class(tree, "Worker")) if one.name == "init_device"]
    known = {
        "_init_workspace_and_model_runner",
        "current_platform.check_if_supports_dtype",
        "current_platform.logical_device_id_to_visible_device_id",
        "gc.collect",
        "get_model_loader",
        "init_worker_distributed_environment",
        "request_memory",
        "set_assigned_physical_gpu_ids",
        "set_random_seed",
        "torch.accelerator.device_count",
        "torch.accelerator.empty_cache",
        "torch.accelerator.set_device_index",
        "torch.device",
        "MemorySnapshot",
        # Before 0.32, in the place of the first one.
        "GPUModelRunnerV1",
        "GPUModelRunnerV2",
        "_num_workspace_lanes",
        "init_workspace_manager",
        "report_usage_stats",
        # What is said or asked of CUDA alone.
        "format_gib",
        "instrument",
        "len",
        "logger.debug",
        "logger.info_once",
        "os.environ.pop",
        "warn_if_flashinfer_kernels_missing",
        "RuntimeError",
    }
    inside = {ast.unparse(node.func) for node in ast.walk(init) if isinstance(node, ast.Call)}
    assert {name.removeprefix("self.") for name in inside if "get_external" not in name} - known == set()


def test_a_kernel_without_triton_takes_what_vllms_takes() -> None:
    """vLLM hands on the arguments by their order."""
    if _version() < (0, 32):
        pytest.skip("this vLLM lets no platform replace a kernel")
    tree = _tree(_folder() / "v1" / "worker" / "block_table.py")
    (theirs,) = [one for one in _functions(_class(tree, "ComputeSlotMappingKernel")) if one.name == "kernel"]
    (ours,) = [
        node
        for node in ast.walk(_tree(OURS / "kernels.py"))
        if isinstance(node, ast.FunctionDef) and node.name == "slot_mapping"
    ]
    names = [one.arg.removesuffix("_ptr") for one in theirs.args.args]
    assert [one.arg for one in ours.args.args] == names


def test_vllms_note_of_the_current_stream_is_there() -> None:
    tree = _tree(_folder() / "utils" / "torch_utils.py")
    (asked,) = [n for n in tree.body if isinstance(n, ast.FunctionDef) and n.name == "current_stream"]
    assert isinstance(asked.body[-1], ast.Return)
    assert ast.unparse(asked.body[-1]) == "return _current_stream_tls.value"


def test_the_pass_that_is_left_out_is_there() -> None:
    text = (_folder() / "compilation" / "passes" / "pass_manager.py").read_text("utf-8")
    assert "self.fix_functionalization = FixFunctionalizationPass(config)" in text
