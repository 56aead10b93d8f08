package embedlog.spark;

import java.util.Arrays;
import org.apache.spark.sql.catalyst.util.ArrayData;

/** Rows of one partition that will be a batch; by columns, as the log stores them. */
final class OpenBatch {
  /** What a record takes besides key, value and headers: its timestamp, and two offsets. */
  private static final int ROW_BYTES = 16;

  private static final int FIRST_ROWS = 32;

  private final BytesBuilder keys = new BytesBuilder();
  private final BytesBuilder values = new BytesBuilder();
  private final HeadersBuilder headers = new HeadersBuilder();
  private long[] timestamps = new long[FIRST_ROWS];
  private int count;

  /** Adds a row. */
  void add(SinkRow row) {
    if (count == timestamps.length) {
      timestamps = Arrays.copyOf(timestamps, 2 * count);
    }
    timestamps[count] = row.timestamp();
    keys.add(row.key());
    values.add(row.value());
    ArrayData pairs = row.headers();
    // Most topics have no headers: then there is no column.
    if (pairs != null || headers.count() > 0) {
      while (headers.count() < count) {
        headers.add(null);
      }
      headers.add(pairs);
    }
    count++;
  }

  void clear() {
    count = 0;
    keys.clear();
    values.clear();
    headers.clear();
  }

  int count() {
    return count;
  }

  /** Returns how many bytes the rows take, about. */
  long bytes() {
    return (long) ROW_BYTES * count + keys.bytes() + values.bytes() + headers.bytes();
  }

  /** Whether a row can be added without making a batch of more than so many bytes. */
  boolean hasRoomFor(SinkRow row, long limit) {
    return count == 0 || bytes() + ROW_BYTES + row.key().length() + row.value().length() <= limit;
  }

  /** Returns how much memory it takes. */
  int capacity() {
    return keys.capacity()
        + values.capacity()
        + headers.capacity()
        + Long.BYTES * timestamps.length;
  }

  boolean hasHeaders() {
    return headers.pairs() > 0;
  }

  long timestamp(int row) {
    return timestamps[row];
  }

  long minTimestamp(int first, int last) {
    long minimum = timestamps[first];
    for (int row = first + 1; row < last; row++) {
      minimum = Math.min(minimum, timestamps[row]);
    }
    return minimum;
  }

  long maxTimestamp(int first, int last) {
    long maximum = timestamps[first];
    for (int row = first + 1; row < last; row++) {
      maximum = Math.max(maximum, timestamps[row]);
    }
    return maximum;
  }

  BytesBuilder keys() {
    return keys;
  }

  BytesBuilder values() {
    return values;
  }

  HeadersBuilder headers() {
    return headers;
  }

  /** Returns the length of a body of the rows [first, last), at most. */
  long bodyBytes(int first, int last) {
    long rows = last - first;
    long bytes = Long.BYTES * rows + binary(rows, keys.bytes(first, last));
    bytes += binary(rows, values.bytes(first, last));
    if (hasHeaders()) {
      long pairs = headers.pairs(first, last);
      bytes += binary(rows, 0) + 2 * binary(pairs, 0) + headers.bytes();
    }
    return bytes;
  }

  private static long binary(long count, long bytes) {
    long validity = BodyWriter.padded(count + 7 >> 3);
    return validity + BodyWriter.padded(Integer.BYTES * (count + 1)) + BodyWriter.padded(bytes + 8);
  }

  /** Writes the rows [first, last) as Arrow's buffers. */
  void write(BodyWriter body, int first, int last) {
    body.addEmpty();
    body.addLongs(timestamps, first, last);
    keys.write(body, first, last);
    values.write(body, first, last);
    if (hasHeaders()) {
      headers.write(body, first, last);
    }
  }
}
