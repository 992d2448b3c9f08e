"""FlagGems' Triton kernels as implementations of vllm-fl's operators.

The functions are under :mod:`vllm_fl_flaggems.impl`; the entry point is
:mod:`vllm_fl_flaggems.register_ops`. Importing this package imports neither torch
nor FlagGems.
"""
