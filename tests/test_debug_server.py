"""The page in torch's debug server: what each rank holds, with real ranks and a real server."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from unittest import mock

import pytest

from safecomm import _torch
from safecomm.diagnostics import debug_server

pytest.importorskip(
    "torch.distributed.debug._frontend", reason="this torch has no debug server, or lacks what it needs"
)

SCRIPT = """
import os, socket, sys, time, urllib.request
import torch
from torch.distributed.debug import start_debug_server, stop_debug_server
import safecomm as dist
from safecomm.diagnostics.debug_server import HeldHandler

if __name__ == "__main__":
    with socket.socket() as free:
        free.bind(("", 0))
        port = free.getsockname()[1]
    start_debug_server(port=port, handlers=[HeldHandler()], start_method="spawn")
    dist.init_process_group("gloo")
    tensor = torch.ones(1 << 20)
    work = dist.all_reduce(tensor, async_op=True)
    dist.barrier()
    if dist.get_rank() == 0:
        while True:
            try:
                page = urllib.request.urlopen(f"http://localhost:{port}/safecomm").read().decode()
                break
            except OSError:
                time.sleep(0.05)
        print(page, flush=True)
    dist.barrier()
    work.wait()
    if dist.get_rank() == 0:
        stop_debug_server()
    os._exit(0)
"""


def run(*arguments, cwd):
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[1])}
    return subprocess.run(
        [sys.executable, *arguments], cwd=cwd, env=environment, check=True, capture_output=True, text=True, timeout=120
    ).stdout


def test_the_page_has_what_each_rank_holds_and_by_which_line(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    page = run("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "script.py", cwd=tmp_path)
    assert "what collectives hold" in page
    assert [f"Rank {rank}:" in page for rank in range(2)] == [True, True]
    assert page.count("4.0 MiB") >= 2
    assert page.count("script.py:15") == 2


def test_its_dumps_have_the_texts_of_all_ranks():
    answers = [mock.Mock(text="one"), mock.Mock(text="two")]
    with mock.patch.object(_torch, "ask_all_ranks", return_value=(["a", "b"], answers)):
        handler, _ = debug_server.HeldHandler(), debug_server.HeldHandler()
        assert handler.dump() == "rank 0\none\n\nrank 1\ntwo"
    assert handler.dump_filename() == "safecomm"


def test_a_process_that_has_the_handler_ends_as_others_do(tmp_path):
    """Torch's map of handlers goes after Python has ended: nothing of Python may end with it."""
    program = """
import sys
from safecomm import _torch
assert "safecomm.diagnostics.debug_server" not in sys.modules
_torch.register_debug_handler("mine", lambda request, response: None)
print("registered")
"""
    assert run("-c", program, cwd=tmp_path) == "registered\n"
