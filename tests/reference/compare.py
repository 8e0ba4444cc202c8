"""The one tolerance of the float32 tests of graphs and ops."""

FLOAT32_TOLERANCE = 1e-5
"""Largest difference over largest reference value. Origin: float32 sums of some hundred terms in
another order; the worst over all graph tests, measured on x86-64 with four hypothesis seeds, is
1.7e-6."""

FAULT_FLOOR = 20 * FLOAT32_TOLERANCE
"""A planted fault must miss by at least this much, so that it is caught with room to spare."""
