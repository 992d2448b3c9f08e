"""The command ``vllm-fl``."""
