"""all_to_all and all_to_all_single."""

from __future__ import annotations

from safecomm.collectives.call import forwarded

all_to_all = forwarded("all_to_all", "output_tensor_list", "input_tensor_list")
all_to_all_single = forwarded("all_to_all_single", "output", "input")
