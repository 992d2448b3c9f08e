"""vllm-fl's operators on Ascend NPUs.

The functions are under :mod:`vllm_fl_ascend.impl`; the entry point is
:mod:`vllm_fl_ascend.register_ops`. Importing this package imports no torch and
no torch_npu.
"""
