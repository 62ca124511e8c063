"""The form of messages: three sentences, and lists of names that end."""

from __future__ import annotations

import pytest

from megafsdp.errors import MAX_NAMED, CheckpointError, expected, listed


def test_message_has_three_sentences() -> None:
    """What, where and how to mend it; a checkpoint's error has the same message."""
    wanted = "Expected 2, got 3. In 'w'. Give two."
    assert expected(2, 3, where="'w'", hint="Give two") == wanted
    assert str(CheckpointError.expected(2, 3, where="'w'", hint="Give two")) == wanted


@pytest.mark.parametrize("num_more", [-1, 0, 1, 7])
def test_long_list_is_cut_and_counted(num_more: int) -> None:
    """Up to the limit all are named, beyond it the others are counted."""
    names = [f"n{i}" for i in range(MAX_NAMED + num_more)]
    text = listed(names)
    assert text.partition(" and ")[0].split(", ") == names[:MAX_NAMED]
    assert text.partition(" and ")[2] == ("" if num_more <= 0 else f"{num_more} more")
    assert listed(names, separator="\n", limit=2) == f"n0\nn1 and {len(names) - 2} more"
