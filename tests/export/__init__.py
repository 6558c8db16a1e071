"""Models for other runtimes: programs of torch.export and files of ONNX."""
