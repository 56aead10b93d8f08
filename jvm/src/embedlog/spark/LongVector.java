package embedlog.spark;

import org.apache.spark.sql.types.DataType;
import org.apache.spark.unsafe.Platform;

/**
 * A column of longs: stored ones, or a sequence.
 *
 * <p>One class for both, so that Spark's compiled code calls one method.
 */
final class LongVector extends LogVector {
  private final long scale;
  private long address;
  private long base;
  private long step;

  /**
   * Makes a vector.
   *
   * @param type Spark's type of the column
   * @param scale what to multiply stored values by
   */
  LongVector(DataType type, long scale) {
    super(type);
    this.scale = scale;
  }

  /** Shows the values stored at an address, from the row {@code firstRow} on. */
  void showStored(long address, int firstRow) {
    show(0, 0);
    this.address = address + Long.BYTES * (long) firstRow;
  }

  /** Shows base, base + step, …; as they are, without the scale. */
  void showSequence(long base, long step) {
    show(0, 0);
    this.address = 0;
    this.base = base;
    this.step = step;
  }

  @Override
  public long getLong(int row) {
    if (address == 0) {
      return base + step * row;
    }
    return Platform.getLong(null, address + Long.BYTES * (long) row) * scale;
  }
}
