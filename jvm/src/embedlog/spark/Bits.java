package embedlog.spark;

import org.apache.spark.unsafe.Platform;

/** Bits in memory, the lowest of each byte first, as Arrow has them. */
final class Bits {
  private Bits() {}

  /** Returns a bit. */
  static boolean get(long address, int number) {
    return (Platform.getByte(null, address + (number >> 3)) >> (number & 7) & 1) != 0;
  }

  /** Returns the number of the next bit with a value, from {@code number} on; the end if none. */
  static int next(long address, boolean value, int number, int end) {
    int nothing = value ? 0 : -1;
    int at = number;
    while (at < end) {
      boolean isByte = (at & 7) == 0 && end - at >= 8;
      if (isByte && Platform.getByte(null, address + (at >> 3)) == nothing) {
        at += 8;
      } else if (get(address, at) == value) {
        return at;
      } else {
        at++;
      }
    }
    return end;
  }
}
