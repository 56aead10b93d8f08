"""Works on several records of a partition at once, and commits their offsets in order."""
