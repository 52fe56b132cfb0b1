"""Names of inputs: no two keys share one, and a name gives back the path it was made from."""

from __future__ import annotations

import itertools
import re

from hypothesis import given
from hypothesis import strategies as st

from weft.core.names import original, part, readable

ODD = ["user-id", "user_id", "user id", "user.id", "user_0x2d_id", "_0x2d", "_0x2d-", "_0x_0", "0", "", "é", "a/b", "(0)", "_", "__0x"]


def test_keys_never_share_a_name():
    keys = [*ODD, 0, 1.5, None, (0,), ("0",)]
    for a, b in itertools.combinations(keys, 2):
        assert part(a) != part(b), (a, b)


def test_a_path_is_given_back():
    assert readable("heads.user-id.weight") == "heads.user_0x2d_id.weight"
    assert all(original(readable(key)) == key for key in ODD)


@given(st.text(max_size=12), st.text(max_size=12))
def test_any_text(a, b):
    assert original(part(a)) == a and re.fullmatch(r"\w*", part(a))
    assert (part(a) == part(b)) == (a == b)
