"""Results for people: a table for the terminal, one self-contained HTML page, progress while waiting."""
