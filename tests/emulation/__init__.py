"""The CUDA kernels, run on the CPU: see README.md."""
