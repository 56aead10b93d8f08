package embedlog.spark;

import org.apache.spark.sql.types.DataTypes;

/** A column of booleans. */
final class BooleanVector extends StoredVector {
  private long bits;
  private int first;

  BooleanVector(VectorPlace place) {
    super(DataTypes.BooleanType, place);
  }

  @Override
  protected void load(ArrowBody body) throws DamagedBatchException {
    bits = body.address(place.buffer() + 1, values() + 7 >> 3);
  }

  @Override
  protected void moveTo(int row) {
    first = row;
  }

  @Override
  public boolean getBoolean(int row) {
    return Bits.get(bits, first + row);
  }
}
