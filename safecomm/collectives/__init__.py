"""The wrapped collectives, a file a family; ``call.py`` has what they share."""
