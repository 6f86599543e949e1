"""low_latency(): small collectives as one kernel over the memory of the peers.

``engine`` decides what it takes and launches it, ``staging`` and ``room`` have the memory that peers write to,
``kernels``, ``ring`` and ``bulk`` are the kernels, ``limits`` the sizes at which they pay. Patching
and tools may import it; it is loaded when it is asked for. Begin with ``low_latency``, then ``engine``.
"""
