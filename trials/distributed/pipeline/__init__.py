"""Pipelines: a model's layers one after another on several ranks, by `torch.distributed.pipelining`."""
