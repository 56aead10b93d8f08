package embedlog.spark;

import org.apache.arrow.memory.util.Float16;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.unsafe.Platform;

/** A column of floats of two, four or eight bytes. */
final class FloatVector extends StoredVector {
  private final int width;
  private long address;
  private long start;

  FloatVector(DataType type, VectorPlace place, int width) {
    super(type, place);
    this.width = width;
  }

  @Override
  protected void load(ArrowBody body) throws DamagedBatchException {
    address = body.address(place.buffer() + 1, width * values());
  }

  @Override
  protected void moveTo(int row) {
    start = address + width * (long) row;
  }

  @Override
  public double getDouble(int row) {
    long at = start + width * (long) row;
    return width == Double.BYTES ? Platform.getDouble(null, at) : single(at);
  }

  /** Returns the value, which is wider if the column was widened since the query began. */
  @Override
  public float getFloat(int row) {
    long at = start + width * (long) row;
    if (width != Double.BYTES) {
      return single(at);
    }
    double value = Platform.getDouble(null, at);
    if (value != (float) value && !Double.isNaN(value)) {
      throw place.unfit(value, type.sql());
    }
    return (float) value;
  }

  private float single(long at) {
    return width == Float.BYTES
        ? Platform.getFloat(null, at)
        : Float16.toFloat(Platform.getShort(null, at));
  }

  // The column was of integers when the query began.

  @Override
  public long getLong(int row) {
    double value = getDouble(row);
    if (value != (long) value || value == Long.MAX_VALUE) {
      throw place.unfit(value, type.sql());
    }
    return (long) value;
  }
}
