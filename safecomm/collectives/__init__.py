"""The wrapped collectives, a file a family, and what they know of groups, tensors and backends.

All above may import it; it imports the arena and the core. Begin with ``table``, which has a row for each collective,
then ``gate.py.in``, from which ``generate`` makes the ways of synchronous calls in ``gates``. What these do not take
goes through ``general``, lists through ``lists``. ``holding`` and ``ending`` have what each call does at its end.
"""
