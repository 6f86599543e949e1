"""Where communication memory goes, and what keeps it. Loaded only when something of it is asked for.

``record`` records in a process; ``snapshot`` and ``recording`` read files, which ``report`` puts into words and
``page`` into a page. Patching and tools may import it. What reads files runs without torch. Begin with ``record``.
"""
