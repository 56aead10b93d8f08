package embedlog.spark;

/**
 * How stored integers become Spark's: days, seconds and nanoseconds become microseconds.
 *
 * @param divisor what to divide by first, rounding down
 * @param multiplier what to multiply by then
 * @param exact whether a remainder is an error
 */
record IntegerScale(long divisor, long multiplier, boolean exact) {
  /** For integers that stay as they are. */
  static final IntegerScale NONE = new IntegerScale(1, 1, false);

  boolean isNone() {
    return divisor == 1 && multiplier == 1;
  }

  /**
   * Returns Spark's number for a stored one.
   *
   * @throws ArithmeticException if there is none
   */
  long apply(long stored) {
    if (exact && Math.floorMod(stored, divisor) != 0) {
      throw new ArithmeticException();
    }
    return Math.multiplyExact(Math.floorDiv(stored, divisor), multiplier);
  }
}
