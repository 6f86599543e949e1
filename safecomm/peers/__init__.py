"""low_latency(): small collectives as one kernel over the memory of the peers. Kernels, staging, limits."""
