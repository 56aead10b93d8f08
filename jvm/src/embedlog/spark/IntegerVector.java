package embedlog.spark;

import java.math.BigInteger;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.unsafe.Platform;

/** A column of integers of any width; also of dates, times, timestamps and durations. */
final class IntegerVector extends StoredVector {
  private final int width;
  private final boolean signed;
  private final IntegerScale scale;
  private long address;
  private long start;
  private boolean isConstant;
  private long constant;

  /**
   * Makes a vector.
   *
   * @param width how many bytes a stored value has
   * @param signed whether stored values have a sign
   * @param scale how they become Spark's
   */
  IntegerVector(DataType type, VectorPlace place, int width, boolean signed, IntegerScale scale) {
    super(type, place);
    this.width = width;
    this.signed = signed;
    this.scale = scale;
  }

  /** Shows one value in all rows, as Spark has it. */
  void showConstant(long value) {
    hasNoNulls();
    isConstant = true;
    constant = value;
  }

  @Override
  protected void load(ArrowBody body) throws DamagedBatchException {
    isConstant = false;
    address = body.address(place.buffer() + 1, width * values());
  }

  @Override
  protected void moveTo(int row) {
    start = address + width * (long) row;
  }

  private long stored(int row) {
    long at = start + width * (long) row;
    return switch (width) {
      case 1 -> signed ? Platform.getByte(null, at) : Platform.getByte(null, at) & 0xFF;
      case 2 -> signed ? Platform.getShort(null, at) : Platform.getShort(null, at) & 0xFFFF;
      case 4 -> signed ? Platform.getInt(null, at) : Platform.getInt(null, at) & 0xFFFFFFFFL;
      default -> Platform.getLong(null, at);
    };
  }

  @Override
  public long getLong(int row) {
    if (isConstant) {
      return constant;
    }
    long value = stored(row);
    if (scale.isNone()) {
      if (value < 0 && !signed) {
        throw place.unfit(Long.toUnsignedString(value), type.sql());
      }
      return value;
    }
    try {
      return scale.apply(value);
    } catch (ArithmeticException error) {
      throw place.unfit(value, type.sql());
    }
  }

  @Override
  public float getFloat(int row) {
    return getLong(row);
  }

  @Override
  public double getDouble(int row) {
    return getLong(row);
  }

  @Override
  public Decimal getDecimal(int row, int precision, int scale) {
    if (isNullAt(row)) {
      return null;
    }
    long value = stored(row);
    BigInteger number = BigInteger.valueOf(value);
    if (value < 0 && !signed) {
      number = new BigInteger(Long.toUnsignedString(value));
    }
    return Decimals.of(place, number, 0, precision, scale);
  }
}
