"""What only the shell runs: its commands, the demo, the doctor and the tuning. No part of the library imports it."""
