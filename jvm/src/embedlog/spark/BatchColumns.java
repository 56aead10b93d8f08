package embedlog.spark;

import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.execution.vectorized.ConstantColumnVector;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.unsafe.types.UTF8String;

/** The columns that a query wants of a topic of bytes; the same objects for all batches. */
final class BatchColumns implements TaskColumns {
  private static final long MICROSECONDS = 1000;

  private final LongVector timestamp;
  private final BytesVector key;
  private final BytesVector value;
  private final HeadersVector headers;
  private final LongVector offset = new LongVector(DataTypes.LongType, 1);
  private final ConstantColumnVector topic = new ConstantColumnVector(1, DataTypes.StringType);
  private final ConstantColumnVector partition = new ConstantColumnVector(1, DataTypes.IntegerType);
  private final ConstantColumnVector timestampType =
      new ConstantColumnVector(1, DataTypes.IntegerType);
  private final List<String> names;
  private final ColumnarBatch batch;

  /** The columns that are read from the batch. */
  private final List<LogColumn> wanted = new ArrayList<>(LogColumn.values().length);

  private String where;
  private BatchHead head;
  private BatchBody body;

  /**
   * Makes the columns.
   *
   * @param names the columns of the source that are wanted, in Spark's order
   * @param damaged makes the error for a damaged value
   */
  BatchColumns(List<String> names, DamagedValues damaged) {
    this.names = names;
    timestamp = new LongVector(DataTypes.TimestampType, MICROSECONDS);
    key = new BytesVector(DataTypes.BinaryType, damaged);
    value = new BytesVector(DataTypes.BinaryType, damaged);
    headers = new HeadersVector(damaged);
    batch = new ColumnarBatch(names.stream().map(this::vector).toArray(ColumnVector[]::new));
  }

  private ColumnVector vector(String name) {
    return switch (name) {
      case "key" -> key;
      case "value" -> value;
      case "topic" -> topic;
      case "partition" -> partition;
      case "offset" -> offset;
      case "timestamp" -> timestamp;
      case "timestampType" -> timestampType;
      case "headers" -> headers;
      default -> throw new IllegalArgumentException("There is no column " + name);
    };
  }

  @Override
  public void begin(PartitionSlice slice) {
    topic.setUtf8String(UTF8String.fromString(slice.topic()));
    partition.setInt(slice.partition());
    where = slice.topic() + "-" + slice.partition();
  }

  @Override
  public BatchLayouts layouts(PartitionSlice slice, FileChunk chunk) {
    if (chunk.schemaVersion() != 0) {
      throw EmbedlogException.otherKindOfTopic(slice.topic());
    }
    return BytesLayouts.INSTANCE;
  }

  @Override
  public StoredColumn[] stored(BatchHead head, boolean partial) {
    wanted.clear();
    if (names.contains("timestamp") && !head.hasOneTimestamp()) {
      wanted.add(LogColumn.TIMESTAMP);
    }
    if (names.contains("key")) {
      wanted.add(LogColumn.KEY);
    }
    if (names.contains("value")) {
      wanted.add(LogColumn.VALUE);
    }
    if (names.contains("headers") && head.hasHeaders()) {
      wanted.add(LogColumn.HEADERS);
    }
    if (head.hasOffsets() && (partial || names.contains("offset"))) {
      wanted.add(LogColumn.OFFSET);
    }
    StoredColumn[] columns = new StoredColumn[wanted.size()];
    for (int number = 0; number < columns.length; number++) {
      columns[number] = wanted.get(number).of(head);
    }
    return columns;
  }

  @Override
  public void load(BatchHead head, BatchBody body) {
    this.head = head;
    this.body = body;
  }

  @Override
  public long leftOut() {
    return 0;
  }

  @Override
  public ColumnarBatch show(int first, int last) throws DamagedBatchException {
    if (names.contains("timestamp")) {
      checkTimestamps();
    }
    timestampType.setInt(head.isLogAppendTime() ? 1 : 0);
    timestamp.showSequence(head.maxTimestamp() * MICROSECONDS, 0);
    offset.showSequence(head.baseOffset() + first, 1);
    headers.showNone();
    for (LogColumn column : wanted) {
      int node = column.of(head).firstNode();
      int buffer = column.of(head).firstBuffer();
      switch (column) {
        case TIMESTAMP -> timestamp.showStored(longs(body, buffer, head), first);
        case KEY -> key.show(body, node, buffer, head.count(), first);
        case VALUE -> value.show(body, node, buffer, head.count(), first);
        case HEADERS -> headers.show(body, node, buffer, head.count(), first);
        case OFFSET -> offset.showStored(longs(body, buffer, head), first);
        default -> throw new IllegalStateException(column.name());
      }
    }
    batch.setNumRows(last - first);
    return batch;
  }

  private void checkTimestamps() {
    if (head.maxTimestamp() > Long.MAX_VALUE / MICROSECONDS) {
      throw new EmbedlogException(
          "InvalidRecordError",
          String.format(
              "A record has a timestamp that Spark cannot hold: %d ms [%s]. Leave the column"
                  + " out: .schema('key binary, value binary').",
              head.maxTimestamp(), where));
    }
  }

  /** Returns the address of a column of longs without nulls, whose first buffer is given. */
  static long longs(ArrowBody body, int buffer, BatchHead head) throws DamagedBatchException {
    return body.address(buffer + 1, Long.BYTES * (long) head.count());
  }
}
