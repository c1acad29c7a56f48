"""The compiled CPU kernel: `kernel.cpp` and its parts, `binding` to tensors, `compiled` for torch.compile."""
