package embedlog.spark;

import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.sql.vectorized.ColumnarMap;
import org.apache.spark.unsafe.Platform;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * A column of a batch in Arrow's layout; one object shows one batch after the other to Spark.
 *
 * <p>Spark's own vectors over Arrow need an allocator and an Arrow vector for each batch.
 */
abstract class LogVector extends ColumnVector {
  private long validity;
  private int firstRow;

  LogVector(DataType type) {
    super(type);
  }

  /**
   * Shows another batch.
   *
   * @param validity the address of the bits of the values that are not null; 0 if none is
   * @param firstRow the row of the batch that becomes row 0
   */
  final void show(long validity, int firstRow) {
    this.validity = validity;
    this.firstRow = firstRow;
  }

  @Override
  public void close() {}

  @Override
  public boolean hasNull() {
    return validity != 0;
  }

  @Override
  public int numNulls() {
    return validity == 0 ? 0 : 1;
  }

  @Override
  public boolean isNullAt(int row) {
    if (validity == 0) {
      return false;
    }
    int bit = row + firstRow;
    return (Platform.getByte(null, validity + (bit >> 3)) >> (bit & 7) & 1) == 0;
  }

  @Override
  public boolean getBoolean(int row) {
    throw unsupported();
  }

  @Override
  public byte getByte(int row) {
    throw unsupported();
  }

  @Override
  public short getShort(int row) {
    throw unsupported();
  }

  @Override
  public int getInt(int row) {
    throw unsupported();
  }

  @Override
  public long getLong(int row) {
    throw unsupported();
  }

  @Override
  public float getFloat(int row) {
    throw unsupported();
  }

  @Override
  public double getDouble(int row) {
    throw unsupported();
  }

  @Override
  public ColumnarArray getArray(int row) {
    throw unsupported();
  }

  @Override
  public ColumnarMap getMap(int row) {
    throw unsupported();
  }

  /**
   * Returns a decimal; null if the row has none.
   *
   * <p>Spark's interpreted projections ask for decimals of more than 18 digits without looking for
   * nulls first, unlike for any other type.
   */
  @Override
  public Decimal getDecimal(int row, int precision, int scale) {
    throw unsupported();
  }

  @Override
  public UTF8String getUTF8String(int row) {
    throw unsupported();
  }

  @Override
  public byte[] getBinary(int row) {
    throw unsupported();
  }

  @Override
  public ColumnVector getChild(int ordinal) {
    throw unsupported();
  }

  private UnsupportedOperationException unsupported() {
    return new UnsupportedOperationException(
        "A column of type " + type.sql() + " has no such value");
  }
}
