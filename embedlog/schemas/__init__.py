"""The schemas of typed topics: their columns, how they change, and rows in both directions."""
