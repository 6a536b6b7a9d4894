"""DeepSeek-V4 in torch: configuration, checkpoints, forward pass. Knows tensors, not pages."""
