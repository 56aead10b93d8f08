package embedlog.spark;

import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.sql.vectorized.ColumnarMap;
import org.apache.spark.unsafe.Platform;

/** A column of lists or maps: Arrow's offsets into the items of all rows. */
final class ListVector extends StoredVector {
  private final StoredVector items;
  private long firstOffset;
  private long offsets;

  /**
   * Makes a vector.
   *
   * @param items the items; for maps, structs of key and value
   */
  ListVector(DataType type, VectorPlace place, StoredVector items) {
    super(type, place);
    this.items = items;
  }

  @Override
  protected void load(ArrowBody body) throws DamagedBatchException {
    items.load(body, 0);
    long bytes = values() == 0 ? 0 : Integer.BYTES * (values() + 1);
    firstOffset = body.address(place.buffer() + 1, bytes);
  }

  @Override
  protected void moveTo(int row) {
    offsets = firstOffset + Integer.BYTES * (long) row;
  }

  private int begin(int row) {
    return Platform.getInt(null, offsets + Integer.BYTES * (long) row);
  }

  /** Returns the number of items in a row; a checksum does not stop a hostile writer. */
  private int length(int row) {
    int begin = begin(row);
    int length = begin(row + 1) - begin;
    if ((begin | length) < 0 || begin > items.values() - length) {
      throw place.damaged("a list is outside of its column, in row " + row);
    }
    return length;
  }

  @Override
  public ColumnarArray getArray(int row) {
    return new ColumnarArray(items, begin(row), length(row));
  }

  @Override
  public ColumnarMap getMap(int row) {
    return new ColumnarMap(items.getChild(0), items.getChild(1), begin(row), length(row));
  }
}
