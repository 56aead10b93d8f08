package embedlog.spark;

/**
 * The size of a batch as Kafka counts it, which {@code max.message.bytes} limits.
 *
 * <p>As in {@code embedlog.batch.limits}: the size of Kafka's record batch of the same records; for
 * a compressed batch the compressed bytes count, since Kafka compresses another layout.
 */
final class KafkaSize {
  private static final int BATCH_OVERHEAD = 61;

  private KafkaSize() {}

  /**
   * Whether a batch is larger than a limit.
   *
   * @param batch the open batch, of which the rows [first, last) were encoded
   * @param body the length of the body as it was encoded
   * @param compressed whether the body is compressed
   */
  static boolean isOver(
      OpenBatch batch, int first, int last, long body, boolean compressed, long limit) {
    if (compressed) {
      return BATCH_OVERHEAD + body > limit && records(batch, first, last) > limit;
    }
    return bound(batch, first, last, body) > limit && records(batch, first, last) > limit;
  }

  /** Returns a size that is not smaller than that of the records, without a look at each. */
  private static long bound(OpenBatch batch, int first, int last, long body) {
    long count = last - first;
    // The timestamps and the offsets of keys and values are no data.
    long data = Math.max(body - 16 * count - 8, 0);
    long span = batch.maxTimestamp(first, last) - batch.minTimestamp(first, last);
    long record = 1 + varint(span) + varint(count) + 2L * varint(data);
    record += batch.hasHeaders() ? 5 : 1;
    // Besides its data a header takes eight bytes here, and two lengths in Kafka.
    long headers = batch.hasHeaders() ? data / 32 : 0;
    return BATCH_OVERHEAD + data + headers + count * (record + varint(record + data));
  }

  private static long records(OpenBatch batch, int first, int last) {
    long size = BATCH_OVERHEAD;
    for (int row = first; row < last; row++) {
      long delta = batch.timestamp(row) - batch.timestamp(first);
      int record = 1 + varint(delta) + varint(row - first);
      record += field(batch.keys().length(row)) + field(batch.values().length(row));
      record += batch.hasHeaders() ? headers(batch.headers(), row) : 1;
      size += varint(record) + record;
    }
    return size;
  }

  private static int headers(HeadersBuilder headers, int row) {
    int begin = headers.firstPair(row);
    int end = headers.firstPair(row + 1);
    int size = varint(end - begin);
    for (int pair = begin; pair < end; pair++) {
      size += field(headers.names().length(pair)) + field(headers.values().length(pair));
    }
    return size;
  }

  /** Returns the size of bytes with their length; that of null is the same as of none. */
  private static int field(int length) {
    return varint(length) + length;
  }

  /** Returns how many bytes Kafka's zigzag varint of a number takes. */
  private static int varint(long number) {
    int bits = Long.SIZE - Long.numberOfLeadingZeros(number << 1 ^ number >> 63);
    return Math.max(bits + 6, 7) / 7;
  }
}
