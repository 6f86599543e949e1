"""What is held, by which call, and until when: all that decides about memory, and nothing else.

The core imports torch's private names (``safecomm._torch``), the checks of arguments and the errors, and nothing else
of the package. Collectives, arenas and patches come here to have memory held. To read it in one sitting, read the head
of ``ledger`` first, which has the three rules, then ``holds``, ``uses``, ``stream_order``, the rest of ``ledger``,
``work``, ``drain``, and ``captures`` last. ``streams``, ``allocation``, ``refcounts`` and ``call_site`` answer
questions of these.

The promises that the comments name, in a line each (``docs/contract.md`` has all ten):

- S1: memory is never given out again while something may touch it.
- S2: after a wait on the allocation stream the memory is free at once.
- S3: what is never waited for is released at a later call, once it is complete.
- S4: what has failed is kept until nothing can touch it, and nothing is freed in a destructor or a callback.
- S5: inside a CUDA graph capture nothing is polled, and no capture is broken by safecomm.
- S6: what a graph's collectives use is the graph's until it is reset or dies.

What keeps these promises when an exception comes in between, also of a signal handler, and between threads:

- Memory is held before what made it safe is given up, and released after it is safe. An exception may so keep memory
  held, never release it.
- A hold stays in its queue until its streams are ordered, so that the next sweep finds it. Releasing twice does
  nothing.
- Works need no lock: each thread orders what it needs, and one of them takes the hold out. Events need one, because an
  event that was recycled is recorded again elsewhere: code that polls or waits for the event of a hold, or records one,
  has ``Holds.lock`` and finds the hold still in its queue. The lock keeps other threads away. It is reentrant, so a
  signal handler that calls safecomm can get in between.
"""

# The direction of dependency, top to bottom; nothing imports upwards (``tests/test_structure.py`` keeps it):
#
#     captures        what CUDA graphs own
#     drain, work     what is held, and waiting until nothing is; the handle, with all of wait()
#     ledger          the three rules, for works
#     stream_order    what the program's own events order
#     uses            what was used on another stream than its allocation stream
#     holds           what a hold is, the queues that holds wait in, and the one release()
#     streams         what a device answers
#     allocation      which stream memory was allocated on
#     refcounts       who else refers to an object
#     call_site       the line of the program that a call came from
