"""What sees and changes torch's own calls, other than collectives: record_stream, events and streams, captures.

``replacing`` is the switch that forbids all of it; ``_torch.replaced`` is how it is done and undone. All above
collectives may import it; it imports the core, of which ``core.captures`` sees the begin and the end of each capture.
Begin with ``stream_methods``, then ``record_stream``.
"""
