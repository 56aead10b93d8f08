package embedlog.spark;

import java.nio.ByteBuffer;

/**
 * The buffers of the wanted columns of a batch: verified, decompressed, and given by address.
 *
 * <p>Columns are numbered as the log stores them: timestamp, key, value, headers, offset.
 */
final class BatchBody implements AutoCloseable {
  private static final int MAX_DECODED_BYTES = 64 << 20;
  private static final int MAX_BUFFERS = 19;
  private static final int STORED = -1;

  private final ArrowBuffers arrow = new ArrowBuffers();
  private final BufferDecompressor decompressor = new BufferDecompressor();
  private final DirectMemory decoded = new DirectMemory();
  private final int[] begins = new int[MAX_BUFFERS];
  private final int[] sizes = new int[MAX_BUFFERS];
  private final boolean[] isDecoded = new boolean[MAX_BUFFERS];
  private BatchHead head;
  private long windowAddress;

  /**
   * Verifies and decodes columns, whose bytes are in memory.
   *
   * @param head the head of the batch
   * @param window the memory with the batch
   * @param columns the numbers of the columns
   * @throws DamagedBatchException if a column is not as it was written
   */
  void read(BatchHead head, DirectMemory window, LogColumn[] columns) throws DamagedBatchException {
    this.head = head;
    windowAddress = window.address();
    arrow.read(window.buffer(), head);
    long total = 0;
    for (LogColumn column : columns) {
      head.checkColumn(column.number(head), column.columnName());
      arrow.checkRows(column);
      int first = column.firstBuffer(head);
      for (int number = first; number < first + column.buffers(); number++) {
        total += find(window.buffer(), number, column);
      }
    }
    if (total > MAX_DECODED_BYTES) {
      throw new DamagedBatchException(
          "it would decompress to more than " + MAX_DECODED_BYTES + " bytes");
    }
    if (head.isCompressed()) {
      decompress(window.buffer(), columns);
    }
  }

  /** Finds a buffer; returns how many bytes it takes decompressed. */
  private long find(ByteBuffer window, int number, LogColumn column) throws DamagedBatchException {
    arrow.find(number, column.number(head));
    begins[number] = arrow.begin();
    sizes[number] = arrow.length();
    isDecoded[number] = false;
    if (!head.isCompressed() || arrow.length() == 0) {
      return arrow.length();
    }
    long raw = arrow.length() < Long.BYTES ? -2 : window.getLong(arrow.begin());
    if (raw < STORED || raw > MAX_DECODED_BYTES) {
      throw new DamagedBatchException("a compressed buffer has no length");
    }
    if (raw == STORED) {
      begins[number] += Long.BYTES;
      sizes[number] -= Long.BYTES;
    } else {
      sizes[number] = (int) raw;
      isDecoded[number] = true;
    }
    return sizes[number];
  }

  private void decompress(ByteBuffer window, LogColumn[] columns) throws DamagedBatchException {
    int capacity = 0;
    for (LogColumn column : columns) {
      int first = column.firstBuffer(head);
      for (int number = first; number < first + column.buffers(); number++) {
        capacity += sizes[number] + 7 & ~7;
      }
    }
    decoded.reserve(capacity, 0);
    int at = 0;
    for (LogColumn column : columns) {
      int first = column.firstBuffer(head);
      for (int number = first; number < first + column.buffers(); number++) {
        if (isDecoded[number]) {
          arrow.find(number, column.number(head));
          decompressor.decompress(
              arrow.codec(),
              window,
              arrow.begin() + Long.BYTES,
              arrow.length() - Long.BYTES,
              decoded.buffer(),
              at,
              sizes[number]);
          begins[number] = at;
          at += sizes[number] + 7 & ~7;
        }
      }
    }
  }

  /** Returns the address of a buffer. */
  long address(int number) {
    return (isDecoded[number] ? decoded.address() : windowAddress) + begins[number];
  }

  /**
   * Returns the address of a buffer of at least so many bytes.
   *
   * @throws DamagedBatchException if it is shorter
   */
  long address(int number, long minimum) throws DamagedBatchException {
    if (sizes[number] < minimum) {
      throw new DamagedBatchException("a column is shorter than its rows");
    }
    return address(number);
  }

  /** Returns the length of a buffer in bytes. */
  int size(int number) {
    return sizes[number];
  }

  /**
   * Returns the address of the bits that tell which of so many values are not null.
   *
   * @return 0 if none is null
   */
  long validity(int number, long values) throws DamagedBatchException {
    return sizes[number] == 0 ? 0 : address(number, values + 7 >> 3);
  }

  @Override
  public void close() {
    decoded.close();
  }
}
