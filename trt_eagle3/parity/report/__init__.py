"""Report: what the checks found, as data, as a page, and as a JUnit file."""
