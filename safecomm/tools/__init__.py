"""What only the shell runs: its commands, the demo, the doctor and the tuning. No part of the library imports it.

The arguments are in ``safecomm_shell.py``, which needs no torch. Begin with ``commands``, a function for each command.
"""
