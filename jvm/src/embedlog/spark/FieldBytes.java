package embedlog.spark;

import org.apache.spark.sql.catalyst.expressions.SpecializedGetters;
import org.apache.spark.sql.catalyst.expressions.UnsafeRow;
import org.apache.spark.unsafe.Platform;
import org.apache.spark.unsafe.types.UTF8String;

/** Text or bytes of a row, where they are: the row is copied once, into a batch. */
final class FieldBytes {
  private static final int NULL = -1;

  private Object base;
  private long offset;
  private int length = NULL;

  /** Shows nothing. */
  void showNull() {
    base = null;
    length = NULL;
  }

  /** Shows a field, until the row changes. */
  void show(SpecializedGetters row, int ordinal, boolean isText) {
    if (row.isNullAt(ordinal)) {
      showNull();
    } else if (isText || row instanceof UnsafeRow) {
      // An unsafe row holds bytes as it holds text, and copies them if it is asked for bytes.
      UTF8String text = row.getUTF8String(ordinal);
      base = text.getBaseObject();
      offset = text.getBaseOffset();
      length = text.numBytes();
    } else {
      byte[] bytes = row.getBinary(ordinal);
      base = bytes;
      offset = Platform.BYTE_ARRAY_OFFSET;
      length = bytes.length;
    }
  }

  boolean isNull() {
    return length == NULL;
  }

  /** Returns how many bytes it has; 0 for null. */
  int length() {
    return Math.max(length, 0);
  }

  /** Copies the bytes into an array. */
  void copyTo(byte[] target, int begin) {
    Platform.copyMemory(base, offset, target, Platform.BYTE_ARRAY_OFFSET + (long) begin, length);
  }

  /** Returns the partition of the bytes as a key. */
  int partition(int partitions) {
    return Murmur2.partition(base, offset, length, partitions);
  }
}
