package embedlog.spark;

import org.apache.spark.sql.types.DataType;
import org.apache.spark.unsafe.Platform;
import org.apache.spark.unsafe.types.UTF8String;

/** A column of bytes or text: Arrow's offsets into Arrow's data. */
final class BytesVector extends StoredVector {
  private long firstOffset;
  private long offsets;
  private long data;
  private int size;

  /**
   * Makes a vector.
   *
   * @param type binary or string
   */
  BytesVector(DataType type, VectorPlace place) {
    super(type, place);
  }

  /**
   * Makes a vector of a topic of bytes, whose columns are shown by their buffers.
   *
   * @param damaged makes the error for a value that is outside of the data
   */
  BytesVector(DataType type, DamagedValues damaged) {
    this(type, new VectorPlace("", 0, 0, damaged));
  }

  /**
   * Shows another batch.
   *
   * @param body its buffers
   * @param node the number of its node
   * @param first the number of the first of three: validity, offsets and data
   * @param values how many values there are
   * @param firstRow the row of the batch that becomes row 0
   */
  void show(ArrowBody body, int node, int first, int values, int firstRow)
      throws DamagedBatchException {
    show(body.validity(node, first, values), firstRow);
    find(body, first, values);
    moveTo(firstRow);
  }

  private void find(ArrowBody body, int first, long values) throws DamagedBatchException {
    // Arrow may leave out the offsets of no values.
    firstOffset = body.address(first + 1, values == 0 ? 0 : Integer.BYTES * (values + 1));
    data = body.address(first + 2);
    size = body.size(first + 2);
  }

  @Override
  protected void load(ArrowBody body) throws DamagedBatchException {
    find(body, place.buffer(), values());
  }

  @Override
  protected void moveTo(int row) {
    offsets = firstOffset + Integer.BYTES * (long) row;
  }

  @Override
  public byte[] getBinary(int row) {
    return getUTF8String(row).getBytes();
  }

  /**
   * Returns a text that is valid until the next batch is shown, as in Spark's own vectors.
   *
   * <p>It is not copied: Spark copies what it keeps.
   */
  @Override
  public UTF8String getUTF8String(int row) {
    long place = offsets + Integer.BYTES * (long) row;
    int begin = Platform.getInt(null, place);
    int length = Platform.getInt(null, place + Integer.BYTES) - begin;
    check(begin, length, row);
    return UTF8String.fromAddress(null, data + begin, length);
  }

  /** A checksum does not stop a hostile writer, and memory beyond the data is not ours. */
  private void check(int begin, int length, int row) {
    if ((begin | length) < 0 || begin > size - length) {
      throw place.damaged("a value is outside of its column, in row " + row);
    }
  }
}
