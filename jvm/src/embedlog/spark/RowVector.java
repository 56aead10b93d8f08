package embedlog.spark;

import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.vectorized.ColumnVector;

/** The columns of a topic as the fields of one column; it is never null: a tombstone has a key. */
final class RowVector extends LogVector {
  private final ColumnVector[] fields;

  RowVector(DataType type, ColumnVector[] fields) {
    super(type);
    this.fields = fields;
  }

  @Override
  public boolean hasNull() {
    return false;
  }

  @Override
  public int numNulls() {
    return 0;
  }

  @Override
  public boolean isNullAt(int row) {
    return false;
  }

  @Override
  public ColumnVector getChild(int ordinal) {
    return fields[ordinal];
  }
}
