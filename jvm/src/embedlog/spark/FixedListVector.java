package embedlog.spark;

import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.vectorized.ColumnarArray;

/** A column of lists that are all of one length. */
final class FixedListVector extends StoredVector {
  private final StoredVector items;
  private final int length;
  private int first;

  FixedListVector(DataType type, VectorPlace place, StoredVector items, int length) {
    super(type, place);
    this.items = items;
    this.length = length;
  }

  @Override
  protected void load(ArrowBody body) throws DamagedBatchException {
    items.load(body, length * values());
  }

  @Override
  protected void moveTo(int row) {
    first = row;
  }

  @Override
  public ColumnarArray getArray(int row) {
    // The items of all rows are as many as an int can count: `load` has seen to it.
    return new ColumnarArray(items, (first + row) * length, length);
  }
}
