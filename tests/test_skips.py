"""The lines at the end of a run that name what tests were skipped for lack of."""

from __future__ import annotations

from tests.skips import skipped_for_lack


def test_skipped_for_lack_counts_tests_by_what_is_missing() -> None:
    reasons = [
        "Skipped: no CUDA device",
        "no Chromium (apt install chromium)",
        "Skipped: torch sees no CUDA device",
        "Skipped: no CUDA device, or the kernel library is not built: make plugins",
        "Skipped: could not import 'av': No module named 'av'",
        "Skipped: no such path on this chip",
    ]
    assert skipped_for_lack(reasons) == [
        "skipped for lack of a GPU: 3 tests",
        "skipped for lack of a browser: 1 test",
        "skipped for lack of av: 1 test",
        "skipped (no such path on this chip): 1 test",
    ]


def test_skipped_for_lack_of_nothing_is_empty() -> None:
    assert skipped_for_lack([]) == []
