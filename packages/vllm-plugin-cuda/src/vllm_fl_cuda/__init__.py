"""vllm-fl's operators by vLLM's own compiled kernels.

The backend is :class:`vllm_fl_cuda.cuda.CudaBackend`; the entry point is
:mod:`vllm_fl_cuda.register_ops`. Importing this package imports no torch and no vLLM.
"""
