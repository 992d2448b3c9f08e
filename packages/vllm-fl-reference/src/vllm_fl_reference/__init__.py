"""vllm-fl's operators in plain PyTorch.

The functions are under :mod:`vllm_fl_reference.impl`; the entry point is
:mod:`vllm_fl_reference.register_ops`. Importing this package imports no torch.
"""
