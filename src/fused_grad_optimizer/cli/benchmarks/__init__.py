"""What `forge bench` measures: single kernels and whole training steps, and how results are kept and shown."""
