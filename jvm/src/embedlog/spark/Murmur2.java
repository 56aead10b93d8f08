package embedlog.spark;

import org.apache.spark.unsafe.Platform;

/** Kafka's hash of a key, by which the same key gets the same partition as with Kafka. */
final class Murmur2 {
  private static final int SEED = 0x9747b28c;
  private static final int MIX = 0x5bd1e995;
  private static final int SHIFT = 24;

  private Murmur2() {}

  /**
   * Returns the partition of a key.
   *
   * @param base the array of the key; null if it is outside of Java's heap
   * @param offset where it begins, as {@code Platform} counts
   * @param length how many bytes it has
   * @param partitions how many partitions there are
   */
  static int partition(Object base, long offset, int length, int partitions) {
    return (hash(base, offset, length) & Integer.MAX_VALUE) % partitions;
  }

  private static int hash(Object base, long offset, int length) {
    int hash = SEED ^ length;
    int words = length & ~3;
    for (int i = 0; i < words; i += 4) {
      int word = littleEndian(base, offset + i) * MIX;
      hash = hash * MIX ^ (word ^ word >>> SHIFT) * MIX;
    }
    if (words < length) {
      int tail = 0;
      for (int i = length - 1; i >= words; i--) {
        tail = tail << 8 | Platform.getByte(base, offset + i) & 0xff;
      }
      hash = (hash ^ tail) * MIX;
    }
    hash = (hash ^ hash >>> 13) * MIX;
    return hash ^ hash >>> 15;
  }

  private static int littleEndian(Object base, long offset) {
    int word = Platform.getInt(base, offset);
    return java.nio.ByteOrder.nativeOrder() == java.nio.ByteOrder.BIG_ENDIAN
        ? Integer.reverseBytes(word)
        : word;
  }
}
