"""Examples are packages with tests of their own; tests/unit/test_scaffold.py runs them as such."""

collect_ignore_glob = ["*"]
