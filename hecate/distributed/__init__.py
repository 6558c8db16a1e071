"""Training on several processes, on `torch.distributed`."""
