"""What is found out about a case: `equivalence`, `performance`, `memory`, each a row of its results."""
