"""Norms under torch.compile: the joint graph of forward and backward is rewritten before it is divided.

direct, norms, rows     the ops that stand for layers
joint, search, spelled, layer_scale     find what can be one in the graph, and write it
inverses, inlining     plain ops in place of an activation's kernel, and of any op
trust     what a layer may be fused with
"""
