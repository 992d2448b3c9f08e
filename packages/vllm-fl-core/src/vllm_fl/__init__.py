"""vllm-fl decides, per operator, which implementation vLLM runs."""
