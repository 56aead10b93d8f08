"""Lets Spark find `format("embedlog")` by itself: it imports all modules of such names.

One of them that raises disables all Python data sources, so this one never does.
"""

try:
    from embedlog.spark.datasource import EmbedlogDataSource as DefaultSource  # noqa: F401
except Exception:  # noqa: BLE001 - see above; `embedlog.spark.register` tells what is wrong
    pass
