"""Lets Spark find `format("embedlog")` on its own: it imports every module named ``pyspark_…``.

If one of them raises, Spark finds no Python data source at all, so this one never does.
"""

try:
    from embedlog.spark.datasource import EmbedlogDataSource as DefaultSource  # noqa: F401
except Exception:  # noqa: BLE001 - see above; `embedlog.spark.register` reports what is wrong
    pass
