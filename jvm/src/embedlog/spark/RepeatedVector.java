package embedlog.spark;

import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.sql.vectorized.ColumnarMap;
import org.apache.spark.unsafe.types.UTF8String;

/** A column with the same value in all rows: the default of rows that do not have the column. */
final class RepeatedVector extends LogVector {
  private final ColumnVector values;
  private final NullRows nullRows;

  /**
   * Makes a vector.
   *
   * @param values a vector whose row 0 is the value
   * @param nullRows the rows that do not have it
   */
  RepeatedVector(ColumnVector values, NullRows nullRows) {
    super(values.dataType());
    this.values = values;
    this.nullRows = nullRows;
  }

  @Override
  public boolean hasNull() {
    return values.isNullAt(0) || !nullRows.isEmpty();
  }

  @Override
  public int numNulls() {
    return hasNull() ? 1 : 0;
  }

  @Override
  public boolean isNullAt(int row) {
    return values.isNullAt(0) || nullRows.contains(row);
  }

  @Override
  public boolean getBoolean(int row) {
    return values.getBoolean(0);
  }

  @Override
  public byte getByte(int row) {
    return values.getByte(0);
  }

  @Override
  public short getShort(int row) {
    return values.getShort(0);
  }

  @Override
  public int getInt(int row) {
    return values.getInt(0);
  }

  @Override
  public long getLong(int row) {
    return values.getLong(0);
  }

  @Override
  public float getFloat(int row) {
    return values.getFloat(0);
  }

  @Override
  public double getDouble(int row) {
    return values.getDouble(0);
  }

  @Override
  public ColumnarArray getArray(int row) {
    return values.getArray(0);
  }

  @Override
  public ColumnarMap getMap(int row) {
    return values.getMap(0);
  }

  @Override
  public Decimal getDecimal(int row, int precision, int scale) {
    return isNullAt(row) ? null : values.getDecimal(0, precision, scale);
  }

  @Override
  public UTF8String getUTF8String(int row) {
    return values.getUTF8String(0);
  }

  @Override
  public byte[] getBinary(int row) {
    return values.getBinary(0);
  }

  @Override
  public ColumnVector getChild(int ordinal) {
    return new RepeatedVector(values.getChild(ordinal), nullRows);
  }
}
