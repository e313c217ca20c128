"""What happens at a call, once for every norm: forward and backward, their graph nodes, and who owns which memory."""
