package embedlog.spark;

/** The nodes and buffers of columns in Arrow's layout, by their numbers; decompressed. */
interface ArrowBody {
  /** Returns the address of a buffer. */
  long address(int buffer);

  /** Returns the length of a buffer in bytes. */
  int size(int buffer);

  /** Returns how many values a node is said to have. */
  long values(int node) throws DamagedBatchException;

  /** Returns how many values of a node are said to be null. */
  long nulls(int node) throws DamagedBatchException;

  /**
   * Returns the address of a buffer of at least so many bytes.
   *
   * @throws DamagedBatchException if it is shorter
   */
  default long address(int buffer, long minimum) throws DamagedBatchException {
    if (size(buffer) < minimum) {
      throw new DamagedBatchException("a column is shorter than its rows");
    }
    return address(buffer);
  }

  /**
   * Returns the address of the bits that tell which of so many values are not null.
   *
   * <p>As in Arrow, they count only if the node says that there are nulls.
   *
   * @return 0 if none is null
   */
  default long validity(int node, int buffer, long values) throws DamagedBatchException {
    return nulls(node) == 0 || size(buffer) == 0 ? 0 : address(buffer, values + 7 >> 3);
  }
}
