package embedlog.spark;

/** The columns of a batch, as the log stores them. */
enum LogColumn {
  TIMESTAMP("timestamp", 0, 0, 2),
  KEY("key", 1, 2, 3),
  VALUE("value", 2, 5, 3),
  HEADERS("headers", 3, 8, 9),
  /** Only in compacted segments; its place depends on whether there are headers. */
  OFFSET("offset", 3, 8, 2);

  private final String columnName;
  private final int number;
  private final int firstBuffer;
  private final int buffers;

  LogColumn(String columnName, int number, int firstBuffer, int buffers) {
    this.columnName = columnName;
    this.number = number;
    this.firstBuffer = firstBuffer;
    this.buffers = buffers;
  }

  String columnName() {
    return columnName;
  }

  /** Returns how many buffers of Arrow the column has. */
  int buffers() {
    return buffers;
  }

  /** Returns which column of a batch it is. */
  int number(BatchHead head) {
    return isBehindHeaders(head) ? number + 1 : number;
  }

  /** Returns which buffer of a batch is its first. */
  int firstBuffer(BatchHead head) {
    return isBehindHeaders(head) ? firstBuffer + HEADERS.buffers : firstBuffer;
  }

  private boolean isBehindHeaders(BatchHead head) {
    return this == OFFSET && head.hasHeaders();
  }
}
