"""Norms under torch.compile: the joint graph of forward and backward is rewritten before it is divided."""
