"""Report: the results of the checks, as data, as a page, and as a JUnit file."""
