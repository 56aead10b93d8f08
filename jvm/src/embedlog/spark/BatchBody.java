package embedlog.spark;

import java.nio.ByteBuffer;

/** The buffers of the wanted columns of a batch: verified, decompressed, and given by address. */
final class BatchBody implements ArrowBody, AutoCloseable {
  private static final int MAX_DECODED_BYTES = 64 << 20;
  private static final int STORED = -1;

  private final ArrowBuffers arrow = new ArrowBuffers();
  private final BufferDecompressor decompressor = new BufferDecompressor();
  private final DirectMemory decoded = new DirectMemory();
  private int[] begins = {};
  private int[] sizes = {};
  private boolean[] isDecoded = {};
  private BatchHead head;
  private long windowAddress;

  /**
   * Verifies and decodes columns, whose bytes are in memory.
   *
   * @param head the head of the batch
   * @param window the memory with the batch
   * @param columns the columns
   * @throws DamagedBatchException if a column is not as it was written
   */
  void read(BatchHead head, DirectMemory window, StoredColumn[] columns)
      throws DamagedBatchException {
    this.head = head;
    windowAddress = window.address();
    arrow.read(window.buffer(), head);
    reserve(head.layout().buffers());
    long total = 0;
    for (StoredColumn column : columns) {
      head.checkColumn(column.number(), column.name());
      arrow.checkRows(column);
      int first = column.firstBuffer();
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

  private void reserve(int buffers) {
    if (begins.length < buffers) {
      begins = new int[buffers];
      sizes = new int[buffers];
      isDecoded = new boolean[buffers];
    }
  }

  /** Finds a buffer; returns how many bytes it takes decompressed. */
  private long find(ByteBuffer window, int number, StoredColumn column)
      throws DamagedBatchException {
    arrow.find(number, column.number());
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

  private void decompress(ByteBuffer window, StoredColumn[] columns) throws DamagedBatchException {
    int capacity = 0;
    for (StoredColumn column : columns) {
      int first = column.firstBuffer();
      for (int number = first; number < first + column.buffers(); number++) {
        capacity += sizes[number] + 7 & ~7;
      }
    }
    decoded.reserve(capacity, 0);
    int at = 0;
    for (StoredColumn column : columns) {
      int first = column.firstBuffer();
      for (int number = first; number < first + column.buffers(); number++) {
        if (isDecoded[number]) {
          arrow.find(number, column.number());
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

  @Override
  public long address(int number) {
    return (isDecoded[number] ? decoded.address() : windowAddress) + begins[number];
  }

  @Override
  public int size(int number) {
    return sizes[number];
  }

  @Override
  public long values(int node) throws DamagedBatchException {
    return arrow.values(node);
  }

  @Override
  public long nulls(int node) throws DamagedBatchException {
    return arrow.nulls(node);
  }

  @Override
  public void close() {
    decoded.close();
  }
}
