"""Call sites: the line of the program, whatever the program's globals are."""

import sys

from safecomm.core.call_site import outside, place

OURS = (f"{__name__}.",)


def inner(packages):
    return outside(packages)


def test_the_innermost_frame_outside_of_the_packages():
    assert inner(("nothing.of.the.kind.",)).f_code is inner.__code__
    frame = inner(OURS)
    assert frame.f_globals["__name__"] != __name__
    # A package is not all that its name is the beginning of.
    assert inner((f"{__name__[:-1]}.",)).f_code is inner.__code__


def test_a_program_without_a_name():
    for name in ({}, {"__name__": None}):
        namespace = {"inner": inner, "packages": OURS, **name}
        exec(compile("frame = inner(packages)", "a program", "exec"), namespace)
        assert namespace["frame"].f_code.co_filename == "a program"


def test_where_a_frame_is():
    frame = sys._getframe()
    assert place(frame) == f"{__file__}:{frame.f_lineno} in test_where_a_frame_is"
