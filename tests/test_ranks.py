"""The interpreters that ``launch`` forks end as those that are started do: the tests of ends rest on that."""

import subprocess
import sys

import pytest
from ranks import launch

PROGRAM = """
import atexit, os, sys, threading

class Last:
    def __del__(self):
        print("an object of a module is deleted", sys.is_finalizing(), flush=True)

kept = Last()  # taken down with its module, which is after what atexit calls
print("not flushed")
atexit.register(print, "atexit")
main = threading.current_thread()
threading.Thread(target=lambda: (main.join(), print("a thread ends"))).start()
if how == "exception":
    raise KeyError("of the program")
if how == "exit":
    sys.exit(7)
if how == "exit at once":
    os._exit(3)
"""


def _ends(_, how):
    globals()["how"] = how
    exec(PROGRAM, globals())  # so that what it keeps is this module's


@pytest.mark.parametrize("how", ["by itself", "exception", "exit", "exit at once"])
def test_a_forked_interpreter_ends_like_one_that_was_started(how):
    (forked,) = launch(0, _ends, how)
    started = subprocess.run(
        [sys.executable, "-c", f"how = {how!r}\n{PROGRAM}"], capture_output=True, text=True, check=False, timeout=60
    )
    assert (forked.status, forked.out) == (started.returncode, started.stdout)
    assert forked.err.splitlines()[-1:] == started.stderr.splitlines()[-1:]
    assert ("an object of a module is deleted True" in forked.out) == (how != "exit at once")
