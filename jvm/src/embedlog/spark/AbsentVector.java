package embedlog.spark;

import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnVector;

/** A column that the batches of a segment do not have: all of it is null. */
final class AbsentVector extends LogVector {
  AbsentVector(DataType type) {
    super(type);
  }

  @Override
  public boolean hasNull() {
    return true;
  }

  @Override
  public int numNulls() {
    return 1;
  }

  @Override
  public boolean isNullAt(int row) {
    return true;
  }

  @Override
  public Decimal getDecimal(int row, int precision, int scale) {
    return null;
  }

  /** Returns a field of a struct, which generated code may ask for before it looks for nulls. */
  @Override
  public ColumnVector getChild(int ordinal) {
    StructField field = ((StructType) dataType()).fields()[ordinal];
    return new AbsentVector(field.dataType());
  }
}
