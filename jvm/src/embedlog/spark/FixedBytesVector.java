package embedlog.spark;

import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.unsafe.Platform;

/** A column of bytes that are all of one length. */
final class FixedBytesVector extends StoredVector {
  private final int width;
  private long address;
  private long start;

  FixedBytesVector(VectorPlace place, int width) {
    super(DataTypes.BinaryType, place);
    this.width = width;
  }

  @Override
  protected void load(ArrowBody body) throws DamagedBatchException {
    address = body.address(place.buffer() + 1, width * values());
  }

  @Override
  protected void moveTo(int row) {
    start = address + width * (long) row;
  }

  @Override
  public byte[] getBinary(int row) {
    byte[] value = new byte[width];
    long at = start + width * (long) row;
    Platform.copyMemory(null, at, value, Platform.BYTE_ARRAY_OFFSET, width);
    return value;
  }
}
