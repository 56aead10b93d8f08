package embedlog.spark;

import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.vectorized.ColumnVector;

/**
 * The columns of a topic as the fields of one column; those of the key say what a tombstone
 * deletes.
 */
final class RowVector extends LogVector {
  private final ColumnVector[] fields;

  RowVector(DataType type, ColumnVector[] fields) {
    super(type);
    this.fields = fields;
  }

  @Override
  public ColumnVector getChild(int ordinal) {
    return fields[ordinal];
  }
}
