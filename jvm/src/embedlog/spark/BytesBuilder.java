package embedlog.spark;

import java.util.Arrays;
import java.util.BitSet;

/** A column of bytes that grows: Arrow's offsets, the bytes, and which values are null. */
final class BytesBuilder {
  private static final int FIRST_VALUES = 32;
  private static final int FIRST_BYTES = 256;

  /** The largest array that every JVM can make. */
  private static final int MAX_ARRAY = Integer.MAX_VALUE - 8;

  private int[] offsets = new int[FIRST_VALUES + 1];
  private byte[] data = new byte[FIRST_BYTES];
  private final BitSet nulls = new BitSet();
  private int count;

  /** Adds a copy of the bytes, or null. */
  void add(FieldBytes bytes) {
    if (count + 1 == offsets.length) {
      offsets = Arrays.copyOf(offsets, 2 * count + 1);
    }
    int begin = offsets[count];
    int end = begin + bytes.length();
    if (bytes.isNull()) {
      nulls.set(count);
    } else {
      if (end > data.length) {
        data = Arrays.copyOf(data, (int) Math.min(Math.max(2L * data.length, end), MAX_ARRAY));
      }
      bytes.copyTo(data, begin);
    }
    offsets[++count] = end;
  }

  void clear() {
    count = 0;
    nulls.clear();
  }

  int count() {
    return count;
  }

  /** Returns how many bytes all values have. */
  int bytes() {
    return offsets[count];
  }

  /** Returns how many bytes the values [first, last) have. */
  int bytes(int first, int last) {
    return offsets[last] - offsets[first];
  }

  /** Returns how many bytes a value has; 0 for null. */
  int length(int index) {
    return offsets[index + 1] - offsets[index];
  }

  /** Returns how many of the values [first, last) are null. */
  int nulls(int first, int last) {
    return nulls.isEmpty() ? 0 : nulls.get(first, last).cardinality();
  }

  /** Returns how much memory it takes. */
  int capacity() {
    return data.length + Integer.BYTES * offsets.length;
  }

  /** Writes the values [first, last) as three buffers of Arrow. */
  void write(BodyWriter body, int first, int last) {
    if (nulls(first, last) == 0) {
      body.addEmpty();
    } else {
      body.addValidity(nulls, first, last);
    }
    body.addOffsets(offsets, first, last);
    body.addBytes(data, offsets[first], bytes(first, last));
  }
}
