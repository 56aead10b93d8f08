package embedlog.spark;

import java.util.Arrays;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.util.ArrayData;

/** The headers of records, as a column that grows: lists of pairs, empty for no headers. */
final class HeadersBuilder {
  private static final int FIRST_VALUES = 32;

  private final BytesBuilder names = new BytesBuilder();
  private final BytesBuilder values = new BytesBuilder();
  private final FieldBytes field = new FieldBytes();
  private int[] offsets = new int[FIRST_VALUES + 1];
  private int count;

  /**
   * Adds the headers of a record, or null if it has none.
   *
   * @throws EmbedlogException if a header is null, or has no key
   */
  void add(ArrayData headers) {
    if (count + 1 == offsets.length) {
      offsets = Arrays.copyOf(offsets, 2 * count + 1);
    }
    int pairs = headers == null ? 0 : headers.numElements();
    for (int i = 0; i < pairs; i++) {
      InternalRow pair = headers.isNullAt(i) ? null : headers.getStruct(i, 2);
      if (pair == null || pair.isNullAt(0)) {
        throw new EmbedlogException(
            "SerializationError",
            "A header has no key. Give each header a key, or leave the header out.");
      }
      field.show(pair, 0, true);
      names.add(field);
      field.show(pair, 1, false);
      values.add(field);
    }
    offsets[count + 1] = offsets[count] + pairs;
    count++;
  }

  void clear() {
    count = 0;
    names.clear();
    values.clear();
  }

  /** Returns how many records have been added. */
  int count() {
    return count;
  }

  /** Returns how many headers there are. */
  int pairs() {
    return offsets[count];
  }

  /** Returns how many headers the records [first, last) have. */
  int pairs(int first, int last) {
    return offsets[last] - offsets[first];
  }

  /** Returns how many bytes all names and values take. */
  int bytes() {
    return names.bytes() + values.bytes();
  }

  BytesBuilder names() {
    return names;
  }

  BytesBuilder values() {
    return values;
  }

  /** Returns the index of the first header of a record. */
  int firstPair(int record) {
    return offsets[record];
  }

  /** Returns how much memory it takes. */
  int capacity() {
    return names.capacity() + values.capacity() + Integer.BYTES * offsets.length;
  }

  /** Writes the headers of the records [first, last) as the nine buffers of Arrow. */
  void write(BodyWriter body, int first, int last) {
    body.addEmpty();
    body.addOffsets(offsets, first, last);
    body.addEmpty();
    names.write(body, offsets[first], offsets[last]);
    values.write(body, offsets[first], offsets[last]);
  }
}
