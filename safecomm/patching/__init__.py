"""patch(): the same for programs that import ``torch.distributed`` themselves.

``table`` has the names that are replaced, ``aliases`` finds the functions that programs have imported by name, and
``runner`` is ``python -m safecomm run``. Only the face and the tools import it. Begin with ``patch``.
"""
