package embedlog.spark;

import org.apache.spark.sql.types.DataType;

/**
 * A column of a typed topic, or what is inside of one, over the bytes of the batch.
 *
 * <p>The type is that of the query; what is stored may be of another version of the schema. Counts
 * and lengths are compared with the buffers once for each batch, positions inside of a buffer when
 * a value is asked for.
 */
abstract class StoredVector extends LogVector {
  protected final VectorPlace place;
  private long validity;
  private long values;

  StoredVector(DataType type, VectorPlace place) {
    super(type);
    this.place = place;
  }

  /**
   * Goes on with another batch.
   *
   * @param least how many values it must have at least
   * @throws DamagedBatchException if its nodes and buffers contradict each other
   */
  final void load(ArrowBody body, long least) throws DamagedBatchException {
    values = body.values(place.node());
    if (values < least || values > Integer.MAX_VALUE) {
      throw new DamagedBatchException("column " + place.column() + " has " + values + " values");
    }
    validity = body.validity(place.node(), place.buffer(), values);
    if (validity == 0 && body.nulls(place.node()) != 0) {
      throw new DamagedBatchException(
          "column " + place.column() + " has nulls, and does not tell where");
    }
    load(body);
    showFrom(0);
  }

  /** Finds the buffers, which must have {@link #values} values. */
  protected abstract void load(ArrowBody body) throws DamagedBatchException;

  /** Shows values of which none is null, whatever is stored. */
  protected final void hasNoNulls() {
    validity = 0;
    show(0, 0);
  }

  /** Returns how many values the batch has. */
  protected final long values() {
    return values;
  }

  /** Makes a row of the batch row 0. */
  final void showFrom(int row) {
    show(validity, row);
    moveTo(row);
  }

  /** Makes a row of the batch row 0: adds it to what rows are counted from. */
  protected abstract void moveTo(int row);

  // An integer that was widened since the query began fits where its value does.

  @Override
  public int getInt(int row) {
    long value = getLong(row);
    if (value != (int) value) {
      throw place.unfit(value, type.sql());
    }
    return (int) value;
  }

  @Override
  public short getShort(int row) {
    long value = getLong(row);
    if (value != (short) value) {
      throw place.unfit(value, type.sql());
    }
    return (short) value;
  }

  @Override
  public byte getByte(int row) {
    long value = getLong(row);
    if (value != (byte) value) {
      throw place.unfit(value, type.sql());
    }
    return (byte) value;
  }
}
