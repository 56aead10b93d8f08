package embedlog.spark;

import java.nio.ByteBuffer;
import java.util.zip.CRC32C;

/**
 * What comes before the columns of a batch: Arrow's metadata and embedlog's block, both checked.
 *
 * <p>docs/format.md describes the bytes and the order of the checks. One object is used for all
 * batches of a task.
 */
final class BatchHead {
  private static final int MAX_HEAD_BYTES = 1 << 20;
  private static final int MAX_BATCH_BYTES = 64 << 20;
  private static final int MAX_MESSAGE_BYTES =
      MAX_BATCH_BYTES + MAX_BATCH_BYTES / 64 + MAX_HEAD_BYTES;

  private final CRC32C crc = new CRC32C();
  private ByteBuffer bytes;
  private int begin;
  private int block;
  private int body;
  private int flags;
  private BatchLayout layout;
  private int count;
  private int columns;
  private int messageLength;
  private long baseOffset;
  private long nextOffset;

  /**
   * Returns the length of a head, from its first bytes; 0 at the end of the stream.
   *
   * @throws DamagedBatchException if no batch begins here
   */
  static int length(ByteBuffer bytes, int begin) throws DamagedBatchException {
    int marker = bytes.getInt(begin);
    int extent = bytes.getInt(begin + 4);
    if (marker == BatchFormat.CONTINUATION && extent == 0) {
      return 0;
    }
    boolean plausible =
        extent > BatchFormat.HEADER_BYTES + BatchFormat.TRAILER_BYTES
            && extent <= MAX_HEAD_BYTES
            && (extent & 7) == 0;
    if (marker != BatchFormat.CONTINUATION || !plausible) {
      throw new DamagedBatchException("no batch begins here");
    }
    return BatchFormat.PREFIX_BYTES + extent;
  }

  /**
   * Checks a head and takes its fields.
   *
   * @param bytes bytes of the file, in little-endian order
   * @param begin where the batch begins in them
   * @param length the length of the head, all of which is in the bytes
   * @param layouts the columns that batches of the file may have
   * @throws DamagedBatchException if the head is not as it was written
   */
  void read(ByteBuffer bytes, int begin, int length, BatchLayouts layouts)
      throws DamagedBatchException {
    this.bytes = bytes;
    this.begin = begin;
    body = begin + length;
    int blockLength = bytes.getInt(body - BatchFormat.TRAILER_BYTES);
    if (bytes.getInt(body - 4) != BatchFormat.END_MAGIC
        || blockLength < BatchFormat.HEADER_BYTES + BatchFormat.TRAILER_BYTES
        || blockLength > length - 16) {
      throw new DamagedBatchException("the block has no end");
    }
    block = body - blockLength;
    if (bytes.getInt(block) != BatchFormat.MAGIC
        || bytes.getInt(block + 4) != checksum(block + 8, body)) {
      throw new DamagedBatchException("the block's CRC is wrong");
    }
    if (bytes.getInt(block + 8) != checksum(begin, block)) {
      throw new DamagedBatchException("the metadata's CRC is wrong");
    }
    flags = bytes.getShort(block + 14);
    count = bytes.getInt(block + 16);
    columns = bytes.getShort(block + 20);
    baseOffset = bytes.getLong(block + 36);
    nextOffset = bytes.getLong(block + 44);
    layout = layouts.of(flags);
    checkFields(
        bytes.getLong(block + 28), bytes.getInt(block + 24), blockLength, layouts.accepts(flags));
  }

  private void checkFields(long message, int blockLength, int trailerLength, boolean accepted)
      throws DamagedBatchException {
    int version = bytes.getShort(block + 12);
    if (version > BatchFormat.VERSION) {
      throw new NewerFormatException(version);
    }
    long span = nextOffset - baseOffset;
    boolean plausible =
        version == BatchFormat.VERSION
            && blockLength == trailerLength
            && columns == layout.size()
            && blockLength
                >= BatchFormat.HEADER_BYTES
                    + BatchFormat.COLUMN_ENTRY_BYTES * columns
                    + BatchFormat.TRAILER_BYTES
            && count >= 0
            && baseOffset >= 0
            && span >= 0
            // Only compaction leaves gaps, or an empty batch.
            && (count == span || hasOffsets() && count <= span)
            && message >= body - begin
            && message <= MAX_MESSAGE_BYTES
            && (message & 7) == 0
            && accepted;
    if (!plausible) {
      throw new DamagedBatchException("its counts and lengths contradict each other");
    }
    messageLength = (int) message;
  }

  /** Goes on in other memory, to which the same bytes were moved. */
  void move(ByteBuffer bytes, int begin) {
    block += begin - this.begin;
    body += begin - this.begin;
    this.begin = begin;
    this.bytes = bytes;
  }

  /** Returns the CRC-32C of the bytes [from, until). */
  private int checksum(int from, int until) {
    crc.reset();
    int limit = bytes.limit();
    crc.update(bytes.limit(until).position(from));
    bytes.limit(limit);
    return (int) crc.getValue();
  }

  /**
   * Compares the checksum of a column, whose bytes are in memory.
   *
   * @throws DamagedBatchException if they are not as they were written
   */
  void checkColumn(int column, String name) throws DamagedBatchException {
    if (checksum(columnBegin(column), columnEnd(column)) != bytes.getInt(entry(column) + 8)) {
      throw new DamagedBatchException("the CRC of column " + name + " is wrong");
    }
  }

  /**
   * Checks where the columns are said to be.
   *
   * @throws DamagedBatchException if they are outside of the batch
   */
  void checkColumnRanges() throws DamagedBatchException {
    long previous = 0;
    for (int column = 0; column < columns; column++) {
      long end = bytes.getLong(entry(column));
      if (end < previous || end > messageLength - (body - begin)) {
        throw new DamagedBatchException("its columns are outside of it");
      }
      previous = end;
    }
  }

  private int entry(int column) {
    return block + BatchFormat.HEADER_BYTES + BatchFormat.COLUMN_ENTRY_BYTES * column;
  }

  /** Returns where the bytes of a column begin in memory. */
  int columnBegin(int column) {
    return column == 0 ? body : columnEnd(column - 1);
  }

  /** Returns where the bytes of a column end in memory. */
  int columnEnd(int column) {
    return body + (int) bytes.getLong(entry(column));
  }

  /** Returns where the batch begins in memory. */
  int begin() {
    return begin;
  }

  /** Returns where the first column begins in memory. */
  int body() {
    return body;
  }

  /** Returns the length of the whole batch; the next one begins there. */
  int messageLength() {
    return messageLength;
  }

  int count() {
    return count;
  }

  /** Returns the columns of the batch. */
  BatchLayout layout() {
    return layout;
  }

  long baseOffset() {
    return baseOffset;
  }

  /** Returns the offset of the next batch. */
  long nextOffset() {
    return nextOffset;
  }

  long leaderEpoch() {
    return bytes.getInt(block + 52) & 0xFFFFFFFFL;
  }

  /** Returns the least timestamp in milliseconds; -1 if no record has one. */
  long minTimestamp() {
    return bytes.getLong(block + 64);
  }

  /** Returns the greatest timestamp in milliseconds; -1 if no record has one. */
  long maxTimestamp() {
    return bytes.getLong(block + 72);
  }

  boolean isCompressed() {
    return (flags & BatchFormat.COMPRESSED) != 0;
  }

  boolean hasHeaders() {
    return (flags & BatchFormat.HEADERS) != 0;
  }

  /** Whether the last column holds the offsets, as in compacted segments. */
  boolean hasOffsets() {
    return (flags & BatchFormat.EXPLICIT_OFFSETS) != 0;
  }

  /** Whether a column says which rows are tombstones. */
  boolean hasTombstones() {
    return (flags & BatchFormat.TOMBSTONES) != 0;
  }

  /** Returns the flags of the batch. */
  int flags() {
    return flags;
  }

  /** Whether the log, not the producer, set the timestamps. */
  boolean isLogAppendTime() {
    return (flags & BatchFormat.LOG_APPEND_TIME) != 0;
  }

  /** Whether all records have the greatest timestamp, whatever their column says. */
  boolean hasOneTimestamp() {
    // A compacted batch has records of several appends, so its column counts.
    return isLogAppendTime() && !hasOffsets();
  }
}
