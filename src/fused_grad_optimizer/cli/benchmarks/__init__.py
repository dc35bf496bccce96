"""What `forge bench` measures: single kernels, whole training steps, host time; how results are kept and shown."""
