package embedlog.spark;

import java.util.ArrayList;
import java.util.List;
import org.apache.spark.sql.execution.vectorized.ConstantColumnVector;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * The columns that a query wants, over the batch that is read; the same objects for all batches.
 */
final class BatchColumns {
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

  /** Sets what all batches of a slice have in common. */
  void show(PartitionSlice slice) {
    topic.setUtf8String(UTF8String.fromString(slice.topic()));
    partition.setInt(slice.partition());
  }

  /**
   * Returns the columns to read from a batch.
   *
   * @param head the batch
   * @param partial whether only some of its offsets are wanted
   */
  LogColumn[] stored(BatchHead head, boolean partial) {
    List<LogColumn> columns = new ArrayList<>(LogColumn.values().length);
    if (names.contains("timestamp") && !head.hasOneTimestamp()) {
      columns.add(LogColumn.TIMESTAMP);
    }
    if (names.contains("key")) {
      columns.add(LogColumn.KEY);
    }
    if (names.contains("value")) {
      columns.add(LogColumn.VALUE);
    }
    if (names.contains("headers") && head.hasHeaders()) {
      columns.add(LogColumn.HEADERS);
    }
    if (head.hasOffsets() && (partial || names.contains("offset"))) {
      columns.add(LogColumn.OFFSET);
    }
    return columns.toArray(LogColumn[]::new);
  }

  /**
   * Shows the rows [first, last) of a batch.
   *
   * @param head the batch
   * @param body its columns, of which at least {@code columns} were read
   * @throws DamagedBatchException if a column is not as it was written
   */
  ColumnarBatch show(BatchHead head, BatchBody body, LogColumn[] columns, int first, int last)
      throws DamagedBatchException {
    timestampType.setInt(head.isLogAppendTime() ? 1 : 0);
    timestamp.showSequence(head.maxTimestamp() * MICROSECONDS, 0);
    offset.showSequence(head.baseOffset() + first, 1);
    headers.showNone();
    for (LogColumn column : columns) {
      int buffer = column.firstBuffer(head);
      switch (column) {
        case TIMESTAMP -> timestamp.showStored(longs(body, buffer, head), first);
        case KEY -> key.show(body, buffer, head.count(), first);
        case VALUE -> value.show(body, buffer, head.count(), first);
        case HEADERS -> headers.show(body, buffer, head.count(), first);
        case OFFSET -> offset.showStored(longs(body, buffer, head), first);
        default -> throw new IllegalStateException(column.name());
      }
    }
    batch.setNumRows(last - first);
    return batch;
  }

  /** Returns the address of a column of longs without nulls, whose first buffer is given. */
  static long longs(BatchBody body, int buffer, BatchHead head) throws DamagedBatchException {
    return body.address(buffer + 1, Long.BYTES * (long) head.count());
  }
}
