package embedlog.spark;

import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.vectorized.ColumnVector;

/** The columns of a topic as the fields of one column. */
final class RowVector extends LogVector {
  private final ColumnVector[] fields;
  private final NullRows nullRows;

  RowVector(DataType type, ColumnVector[] fields, NullRows nullRows) {
    super(type);
    this.fields = fields;
    this.nullRows = nullRows;
  }

  @Override
  public boolean hasNull() {
    return !nullRows.isEmpty();
  }

  @Override
  public int numNulls() {
    return hasNull() ? 1 : 0;
  }

  @Override
  public boolean isNullAt(int row) {
    return nullRows.contains(row);
  }

  @Override
  public ColumnVector getChild(int ordinal) {
    return fields[ordinal];
  }
}
