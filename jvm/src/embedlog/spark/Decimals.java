package embedlog.spark;

import java.math.BigDecimal;
import java.math.BigInteger;
import org.apache.spark.sql.types.Decimal;

/** Makes Spark's decimals. */
final class Decimals {
  private Decimals() {}

  /**
   * Returns a decimal with the digits that a query's column has.
   *
   * @throws EmbedlogException if the number has more
   */
  static Decimal of(VectorPlace place, BigInteger unscaled, int stored, int precision, int scale) {
    BigDecimal number = new BigDecimal(unscaled, stored);
    if (scale > stored) {
      number = number.setScale(scale);
    } else if (scale < stored) {
      BigDecimal rounded = number.setScale(scale, java.math.RoundingMode.DOWN);
      if (rounded.compareTo(number) != 0) {
        throw unfit(place, number, precision, scale);
      }
      number = rounded;
    }
    if (number.precision() > precision) {
      throw unfit(place, number, precision, scale);
    }
    return Decimal.apply(number, precision, scale);
  }

  private static EmbedlogException unfit(
      VectorPlace place, BigDecimal number, int precision, int scale) {
    return place.unfit(number, "decimal(" + precision + "," + scale + ")");
  }
}
