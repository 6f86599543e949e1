"""Where communication memory goes, and what keeps it. Loaded only when something of it is asked for."""
