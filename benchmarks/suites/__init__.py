"""The suites: each makes a row of results for a case."""
