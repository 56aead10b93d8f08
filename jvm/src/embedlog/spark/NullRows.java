package embedlog.spark;

/** The rows of a batch in which columns are null that are not stored: those of tombstones. */
final class NullRows {
  private long bits;
  private int first;

  /**
   * Shows another batch.
   *
   * @param bits the address of a bit for each row; 0 if none is null
   * @param first the row of the batch that becomes row 0
   */
  void show(long bits, int first) {
    this.bits = bits;
    this.first = first;
  }

  boolean isEmpty() {
    return bits == 0;
  }

  boolean contains(int row) {
    return bits != 0 && Bits.get(bits, first + row);
  }
}
