package embedlog.spark;

import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarArray;
import org.apache.spark.unsafe.Platform;

/** The headers of records: a list of pairs, which is null for a record without any. */
final class HeadersVector extends LogVector {
  private static final StructType PAIR =
      new StructType().add("key", DataTypes.StringType).add("value", DataTypes.BinaryType);

  /** Spark's type of the column. */
  static final DataType TYPE = DataTypes.createArrayType(PAIR);

  private final Pairs pairs;
  private final DamagedValues damaged;
  private long offsets;
  private int pairCount;

  HeadersVector(DamagedValues damaged) {
    super(TYPE);
    this.damaged = damaged;
    pairs = new Pairs(damaged);
  }

  /** Shows records without headers. */
  void showNone() {
    offsets = 0;
  }

  /** Shows a batch, from the row {@code firstRow} on; the buffers begin at {@code first}. */
  void show(ArrowBody body, int node, int first, int values, int firstRow)
      throws DamagedBatchException {
    show(body.validity(node, first, values), firstRow);
    offsets = body.address(first + 1, Integer.BYTES * (values + 1L));
    pairCount = Platform.getInt(null, offsets + Integer.BYTES * (long) values);
    if (pairCount < 0) {
      throw new DamagedBatchException("its headers have a negative count");
    }
    offsets += Integer.BYTES * (long) firstRow;
    pairs.show(body, node + 1, first + 2, pairCount);
  }

  private int begin(int row) {
    return Platform.getInt(null, offsets + Integer.BYTES * (long) row);
  }

  @Override
  public boolean hasNull() {
    return true;
  }

  @Override
  public int numNulls() {
    return 1;
  }

  @Override
  public boolean isNullAt(int row) {
    return offsets == 0 || super.isNullAt(row) || begin(row) == begin(row + 1);
  }

  @Override
  public ColumnarArray getArray(int row) {
    int begin = begin(row);
    int length = begin(row + 1) - begin;
    if ((begin | length) < 0 || begin > pairCount - length) {
      throw damaged.error("headers are outside of their column, in row " + row);
    }
    return new ColumnarArray(pairs, begin, length);
  }

  /** The pairs of all records of a batch. */
  private static final class Pairs extends LogVector {
    private final BytesVector keys;
    private final BytesVector values;

    Pairs(DamagedValues damaged) {
      super(PAIR);
      keys = new BytesVector(DataTypes.StringType, damaged);
      values = new BytesVector(DataTypes.BinaryType, damaged);
    }

    /** Shows the pairs whose buffers begin at {@code first}. */
    void show(ArrowBody body, int node, int first, int count) throws DamagedBatchException {
      show(body.validity(node, first, count), 0);
      keys.show(body, node + 1, first + 1, count, 0);
      values.show(body, node + 2, first + 4, count, 0);
    }

    @Override
    public ColumnVector getChild(int ordinal) {
      return ordinal == 0 ? keys : values;
    }
  }
}
