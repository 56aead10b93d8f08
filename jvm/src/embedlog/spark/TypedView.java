package embedlog.spark;

import java.util.ArrayList;
import java.util.LinkedHashSet;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.Set;
import org.apache.arrow.vector.types.pojo.ArrowType;
import org.apache.spark.sql.execution.vectorized.ConstantColumnVector;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.DateType;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnVector;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/** The columns of a query over the batches of a typed topic that all have the same columns. */
final class TypedView {
  private static final long MICROSECONDS = 1000;
  private static final long MILLISECONDS_OF_DAY = 86_400_000;

  private final Map<String, TopicColumn> topicColumns;
  private final SegmentColumns segment;
  private final int flags;
  private final DamagedValues damaged;
  private final List<Source> sources = new ArrayList<>();
  private final SegmentColumns.Column time;
  private final Optional<SegmentColumns.Column> tombstones;
  private final LongVector offset = new LongVector(DataTypes.LongType, 1);
  private final ConstantColumnVector timestampType =
      new ConstantColumnVector(1, DataTypes.IntegerType);
  private final HeadersVector headers;
  private final StoredColumn headersColumn;
  private final boolean hasOffset;
  private final ColumnarBatch batch;
  private final NullRows nullRows = new NullRows();
  private final boolean hasTombstones;
  private BatchHead head;
  private BatchBody body;
  private long tombstoneBits;

  /** A vector, and the column that it shows. */
  private record Source(StoredColumn column, StoredVector vector) {}

  /**
   * Makes the vectors.
   *
   * @param request what the query wants
   * @param topicColumns the columns of the topic, by their names in the query
   * @param segment the columns that are stored
   * @param flags the flags of the batches
   * @param topic the column with the topic
   * @param partition the column with the partition
   * @param damaged makes the error for a damaged value
   */
  TypedView(
      TypedRequest request,
      Map<String, TopicColumn> topicColumns,
      SegmentColumns segment,
      int flags,
      ConstantColumnVector topic,
      ConstantColumnVector partition,
      DamagedValues damaged) {
    this.topicColumns = topicColumns;
    this.segment = segment;
    this.flags = flags;
    this.damaged = damaged;
    hasTombstones = request.hasTombstones();
    time = segment.time(flags);
    tombstones = segment.tombstones(flags);
    Set<String> names = Set.of(request.columns().fieldNames());
    hasOffset = names.contains("offset");
    Optional<SegmentColumns.Column> stored = segment.headers(flags);
    boolean hasHeaders = names.contains("headers") && stored.isPresent();
    headersColumn = hasHeaders ? stored.get().place() : null;
    headers = new HeadersVector(damaged);
    ColumnVector[] vectors = new ColumnVector[request.columns().size()];
    for (int number = 0; number < vectors.length; number++) {
      StructField field = request.columns().fields()[number];
      vectors[number] =
          switch (field.name()) {
            case "topic" -> topic;
            case "partition" -> partition;
            case "offset" -> offset;
            case "timestamp" -> timestamp();
            case "timestampType" -> timestampType;
            case "headers" -> headers;
            case "_tombstone" -> tombstone();
            case "value" -> row((StructType) field.dataType());
            default -> own(field);
          };
    }
    batch = new ColumnarBatch(vectors);
  }

  private ColumnVector timestamp() {
    ArrowType.Timestamp type = (ArrowType.Timestamp) time.field().getType();
    VectorPlace place =
        new VectorPlace("timestamp", time.place().firstNode(), time.place().firstBuffer(), damaged);
    IntegerScale scale = VectorFactory.toMilliseconds(type.getUnit());
    return add(time, new IntegerVector(DataTypes.TimestampType, place, Long.BYTES, true, scale));
  }

  private ColumnVector row(StructType type) {
    ColumnVector[] fields = new ColumnVector[type.size()];
    for (int number = 0; number < fields.length; number++) {
      fields[number] = own(type.fields()[number]);
    }
    return new RowVector(type, fields);
  }

  private ColumnVector tombstone() {
    if (tombstones.isEmpty()) {
      ConstantColumnVector none = new ConstantColumnVector(1, DataTypes.BooleanType);
      none.setBoolean(false);
      return none;
    }
    StoredColumn place = tombstones.get().place();
    DataType type = DataTypes.BooleanType;
    return add(tombstones.get(), VectorFactory.of(place, tombstones.get().field(), type, damaged));
  }

  /** Makes the vector of a column of the topic's own. */
  private ColumnVector own(StructField field) {
    TopicColumn column = topicColumns.get(field.name());
    DataType type = field.dataType();
    if (column == null) {
      throw new EmbedlogException(
          "InvalidSchemaError",
          "The topic has no column " + field.name() + " any more. Restart the query.");
    }
    Optional<SegmentColumns.Column> stored = segment.byId(flags, column.id());
    if (stored.isEmpty()) {
      if (column.absent() == null) {
        return new AbsentVector(type);
      }
      ColumnVector value = DefaultValue.decode(column.absent(), field.name(), type, damaged);
      return new RepeatedVector(value, nullRows);
    }
    StoredColumn place = stored.get().place();
    return add(stored.get(), VectorFactory.of(place, stored.get().field(), type, damaged));
  }

  private ColumnVector add(SegmentColumns.Column column, StoredVector vector) {
    sources.add(new Source(column.place(), vector));
    return vector;
  }

  /** Returns the columns to read from a batch; {@code partial} if not all of its offsets. */
  StoredColumn[] stored(BatchHead head, boolean partial) {
    Set<StoredColumn> columns = new LinkedHashSet<>();
    for (Source source : sources) {
      if (!isOneTimestamp(head, source)) {
        columns.add(source.column());
      }
    }
    tombstones.ifPresent(column -> columns.add(column.place()));
    if (headersColumn != null) {
      columns.add(headersColumn);
    }
    if (head.hasOffsets() && (partial || hasOffset)) {
      columns.add(head.layout().last());
    }
    return columns.toArray(StoredColumn[]::new);
  }

  /** Whether a vector shows timestamps that the log has set, whatever is stored. */
  private boolean isOneTimestamp(BatchHead head, Source source) {
    return head.hasOneTimestamp() && source.column().equals(time.place());
  }

  /** Goes on with another batch. */
  void load(BatchHead head, BatchBody body) throws DamagedBatchException {
    this.head = head;
    this.body = body;
    for (Source source : sources) {
      if (isOneTimestamp(head, source)) {
        showTimestamp((IntegerVector) source.vector());
      } else {
        source.vector().load(body, head.count());
      }
    }
    tombstoneBits = 0;
    if (tombstones.isPresent()) {
      int buffer = tombstones.get().place().firstBuffer();
      tombstoneBits = body.address(buffer + 1, head.count() + 7 >> 3);
    }
  }

  private void showTimestamp(IntegerVector vector) {
    long time = head.maxTimestamp();
    if (vector.dataType() instanceof DateType) {
      vector.showConstant(Math.floorDiv(time, MILLISECONDS_OF_DAY));
    } else if (Math.abs(time) > Long.MAX_VALUE / MICROSECONDS) {
      throw vector.place.unfit(time + " ms", vector.dataType().sql());
    } else {
      vector.showConstant(time * MICROSECONDS);
    }
  }

  /** Returns the address of the bits of the tombstones that the query leaves out; 0 if none. */
  long leftOut() {
    return hasTombstones ? 0 : tombstoneBits;
  }

  /** Shows the rows [first, last) of the batch. */
  ColumnarBatch show(int first, int last) throws DamagedBatchException {
    for (Source source : sources) {
      source.vector().showFrom(first);
    }
    nullRows.show(tombstoneBits, first);
    timestampType.setInt(head.isLogAppendTime() ? 1 : 0);
    offset.showSequence(head.baseOffset() + first, 1);
    if (hasOffset && head.hasOffsets()) {
      offset.showStored(BatchColumns.longs(body, head.layout().last().firstBuffer(), head), first);
    }
    if (headersColumn == null) {
      headers.showNone();
    } else {
      headers.show(
          body, headersColumn.firstNode(), headersColumn.firstBuffer(), head.count(), first);
    }
    batch.setNumRows(last - first);
    return batch;
  }
}
