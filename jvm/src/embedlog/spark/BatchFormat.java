package embedlog.spark;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.nio.charset.StandardCharsets;

/** The constants of the head of a batch, which docs/format.md describes. */
final class BatchFormat {
  /** How many bytes tell how long the head is. */
  static final int PREFIX_BYTES = 8;

  /** The first bytes of a message of Arrow. */
  static final int CONTINUATION = 0xFFFFFFFF;

  static final int VERSION = 1;

  /** The first and the last bytes of the block. */
  static final int MAGIC = littleEndian("EMBL");

  static final int END_MAGIC = littleEndian("embl");

  /** The parts of the block: its header, an entry for each column, its trailer. */
  static final int HEADER_BYTES = 96;

  static final int COLUMN_ENTRY_BYTES = 16;
  static final int TRAILER_BYTES = 8;

  /** Flags in the header. */
  static final int COMPRESSED = 1;

  static final int HEADERS = 2;
  static final int EXPLICIT_OFFSETS = 4;
  static final int LOG_APPEND_TIME = 8;
  static final int CONTROL = 16;

  /** The batch has the columns of a typed topic. */
  static final int TYPED = 32;

  /** It has a column that says which rows are tombstones. */
  static final int TOMBSTONES = 64;

  /** A mirror that merges wrote its records. */
  static final int MERGED = 128;

  /** Flags that do not follow from the columns of a batch. */
  static final int FREE_FLAGS = COMPRESSED | LOG_APPEND_TIME | CONTROL | MERGED;

  private BatchFormat() {}

  private static int littleEndian(String text) {
    return ByteBuffer.wrap(text.getBytes(StandardCharsets.US_ASCII))
        .order(ByteOrder.LITTLE_ENDIAN)
        .getInt();
  }
}
