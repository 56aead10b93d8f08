package embedlog.spark;

import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.util.ArrayData;
import org.apache.spark.sql.types.NullType;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.unsafe.types.UTF8String;

/** The row that a task writes, by the columns of a record; the planner has checked their types. */
final class SinkRow {
  private static final int MISSING = -1;
  private static final long MICROSECONDS_PER_MILLISECOND = 1000;

  private final int topicColumn;
  private final int partitionColumn;
  private final int keyColumn;
  private final int valueColumn;
  private final int headersColumn;
  private final int timestampColumn;
  private final boolean keyIsText;
  private final boolean valueIsText;
  private final FieldBytes key = new FieldBytes();
  private final FieldBytes value = new FieldBytes();
  private InternalRow row;

  /** Makes a view of rows of these columns; other columns are left out. */
  SinkRow(StructType schema) {
    topicColumn = find(schema, "topic");
    partitionColumn = find(schema, "partition");
    keyColumn = find(schema, "key");
    valueColumn = find(schema, "value");
    headersColumn = find(schema, "headers");
    timestampColumn = find(schema, "timestamp");
    keyIsText = isText(schema, keyColumn);
    valueIsText = isText(schema, valueColumn);
  }

  /** Returns the number of a column; those that have no type are all null, so they are missing. */
  private static int find(StructType schema, String name) {
    StructField[] fields = schema.fields();
    for (int i = 0; i < fields.length; i++) {
      if (fields[i].name().equals(name)) {
        return fields[i].dataType() instanceof NullType ? MISSING : i;
      }
    }
    return MISSING;
  }

  private static boolean isText(StructType schema, int column) {
    return column != MISSING && schema.fields()[column].dataType() instanceof StringType;
  }

  /** Shows a row, until Spark changes it. */
  void show(InternalRow row) {
    this.row = row;
    if (keyColumn != MISSING) {
      key.show(row, keyColumn, keyIsText);
    }
    if (valueColumn != MISSING) {
      value.show(row, valueColumn, valueIsText);
    }
  }

  FieldBytes key() {
    return key;
  }

  FieldBytes value() {
    return value;
  }

  /** Returns the name of the topic; null if the row has none. */
  UTF8String topic() {
    return has(topicColumn) ? row.getUTF8String(topicColumn) : null;
  }

  boolean hasPartition() {
    return has(partitionColumn);
  }

  int partition() {
    return row.getInt(partitionColumn);
  }

  /** Returns the timestamp in milliseconds; the current time if the row has none. */
  long timestamp() {
    return has(timestampColumn)
        ? row.getLong(timestampColumn) / MICROSECONDS_PER_MILLISECOND
        : System.currentTimeMillis();
  }

  /** Returns the headers; null if the row has none. */
  ArrayData headers() {
    if (!has(headersColumn)) {
      return null;
    }
    ArrayData headers = row.getArray(headersColumn);
    return headers.numElements() == 0 ? null : headers;
  }

  private boolean has(int column) {
    return column != MISSING && !row.isNullAt(column);
  }
}
