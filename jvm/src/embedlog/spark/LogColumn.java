package embedlog.spark;

/** The columns of a batch whose keys and values are bytes, in the order of the log. */
enum LogColumn {
  TIMESTAMP,
  KEY,
  VALUE,
  HEADERS,
  /** Only in compacted segments; its place depends on whether there are headers. */
  OFFSET;

  /** Returns where a batch has the column. */
  StoredColumn of(BatchHead head) {
    return this == OFFSET ? head.layout().last() : head.layout().column(ordinal());
  }
}
