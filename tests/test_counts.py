"""The numbers on the page that says how safecomm is tested are those of the tree."""

from __future__ import annotations

import re

import counts
import pytest


@pytest.fixture(scope="module")
def page():
    return counts.PAGE.read_text(encoding="utf-8")


def test_the_numbers_of_the_page_are_those_of_the_tree(page):
    assert counts.written(page) == page, "python tests/counts.py writes them"


@pytest.mark.parametrize("phrase", counts.PHRASES)
def test_each_number_is_counted(phrase):
    assert counts.PHRASES[phrase]() > 0


def test_a_number_that_is_wrong_is_mended_and_words_that_are_gone_are_told(page):
    wrong, changed = re.subn(r"\d+(?= wrong ledgers)", "1,007", page)
    assert changed == 1
    assert counts.written(wrong) == page
    with pytest.raises(ValueError, match="wrong ledgers"):
        counts.written(page.replace("wrong ledgers", "ledgers"))


def test_it_says_what_is_not_tested_and_how_to_run_what_is(page):
    assert "## What is not tested" in page
    for command in re.findall(r"`(?:python )?(tests/\w+(?:\.py)?)", page):
        assert counts.HERE.parent.joinpath(command).exists(), command
