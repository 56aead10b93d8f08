package embedlog.spark;

import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.vectorized.ColumnVector;

/** A column of structs: a vector for each field of the query, absent ones included. */
final class StructVector extends StoredVector {
  private final ColumnVector[] fields;

  StructVector(DataType type, VectorPlace place, ColumnVector[] fields) {
    super(type, place);
    this.fields = fields;
  }

  @Override
  protected void load(ArrowBody body) throws DamagedBatchException {
    for (ColumnVector field : fields) {
      if (field instanceof StoredVector stored) {
        stored.load(body, values());
      }
    }
  }

  @Override
  protected void moveTo(int row) {
    for (ColumnVector field : fields) {
      if (field instanceof StoredVector stored) {
        stored.showFrom(row);
      }
    }
  }

  @Override
  public ColumnVector getChild(int ordinal) {
    return fields[ordinal];
  }
}
