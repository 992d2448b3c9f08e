"""The operators, by kind: each module calls torch_npu, which it imports."""
