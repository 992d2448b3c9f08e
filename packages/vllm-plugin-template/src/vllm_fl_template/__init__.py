"""vllm-fl's operators on the CPU.

The functions are under :mod:`vllm_fl_template.impl`; the entry point is
:mod:`vllm_fl_template.register_ops`. Importing this package imports no torch.
"""
