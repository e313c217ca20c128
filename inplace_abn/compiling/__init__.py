"""Norms under torch.compile: the graph of forward and backward, rewritten before it is divided."""
