"""What is held, by which call, and until when: all that decides about memory, and nothing else.

The core imports torch's private names (``safecomm._torch``) and the errors, and nothing else of the package. It knows
nothing of collectives, arenas or patches: those come here to have memory held. To read it in one sitting, read from
``holds`` upwards, and ``captures`` last.
"""

# The direction of dependency, top to bottom; nothing imports upwards (``tests/test_structure.py`` keeps it):
#
#     captures        what CUDA graphs own
#     drain, work     what is held, and waiting until nothing is; the handle, with all of wait()
#     ledger          the three rules, for works
#     recorded_uses   what record_stream was called for
#     handoffs        what was used on another stream than its allocation stream
#     rules           the one release(), and what is asked before it
#     holds           what a hold is, and the queues that holds wait in
#     streams         what a device answers
#     allocation      which stream memory was allocated on
#     refcounts       who else refers to an object
#     call_site       the line of the program that a call came from
