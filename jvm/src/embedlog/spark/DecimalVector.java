package embedlog.spark;

import java.math.BigDecimal;
import java.math.BigInteger;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.Decimal;
import org.apache.spark.unsafe.Platform;

/** A column of decimals, which are stored as integers of 16 or 32 bytes. */
final class DecimalVector extends StoredVector {
  /** How many digits every long has. */
  private static final int LONG_DIGITS = 18;

  private static final long LARGEST = 999_999_999_999_999_999L;

  private final int width;
  private final int storedScale;
  private final byte[] bytes;
  private long address;
  private long start;

  /**
   * Makes a vector.
   *
   * @param width how many bytes a value has
   * @param storedScale how many of its digits are behind the point
   */
  DecimalVector(DataType type, VectorPlace place, int width, int storedScale) {
    super(type, place);
    this.width = width;
    this.storedScale = storedScale;
    bytes = new byte[width];
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
  public Decimal getDecimal(int row, int precision, int scale) {
    if (isNullAt(row)) {
      return null;
    }
    long at = start + width * (long) row;
    if (scale == storedScale && precision <= LONG_DIGITS && width == 16) {
      long low = Platform.getLong(null, at);
      boolean isLong = Platform.getLong(null, at + Long.BYTES) == low >> 63;
      if (isLong && Math.abs(low) <= LARGEST && Math.abs(low) < POWERS[precision]) {
        return Decimal.createUnsafe(low, precision, scale);
      }
    }
    return Decimals.of(place, unscaled(at), storedScale, precision, scale);
  }

  // The column was of integers when the query began.

  @Override
  public long getLong(int row) {
    BigDecimal value = new BigDecimal(unscaled(start + width * (long) row), storedScale);
    try {
      return value.longValueExact();
    } catch (ArithmeticException error) {
      throw place.unfit(value, type.sql());
    }
  }

  private BigInteger unscaled(long at) {
    for (int number = 0; number < width; number++) {
      bytes[width - 1 - number] = Platform.getByte(null, at + number);
    }
    return new BigInteger(bytes);
  }

  private static final long[] POWERS = powers();

  private static long[] powers() {
    long[] powers = new long[LONG_DIGITS + 1];
    powers[0] = 1;
    for (int digits = 1; digits <= LONG_DIGITS; digits++) {
      powers[digits] = 10 * powers[digits - 1];
    }
    return powers;
  }
}
