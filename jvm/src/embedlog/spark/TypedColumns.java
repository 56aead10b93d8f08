package embedlog.spark;

import java.util.HashMap;
import java.util.Map;
import org.apache.spark.sql.execution.vectorized.ConstantColumnVector;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * The columns that a query wants of typed topics.
 *
 * <p>Batches with the same columns share a {@link TypedView}: a segment may have another version of
 * the schema than the one before it, or columns of embedlog's own besides.
 */
final class TypedColumns implements TaskColumns {
  private final TypedRequest request;
  private final Map<String, TopicSchemas> schemas;
  private final DamagedValues damaged;
  private final Map<ViewKey, TypedView> views = new HashMap<>();
  private final Map<SegmentKey, SegmentColumns> segments = new HashMap<>();
  private final ConstantColumnVector topic = new ConstantColumnVector(1, DataTypes.StringType);
  private final ConstantColumnVector partition = new ConstantColumnVector(1, DataTypes.IntegerType);
  private String topicName;
  private SegmentColumns segment;
  private TypedView view;

  /** A version of the schema of a topic. */
  private record SegmentKey(String topic, int version) {}

  /** The columns of batches: those of a segment, and those that flags add. */
  private record ViewKey(SegmentColumns segment, BatchLayout layout) {}

  /**
   * Makes the columns.
   *
   * @param request what the query wants
   * @param schemas the columns of the topics in the plan
   * @param damaged makes the error for a damaged value
   */
  TypedColumns(TypedRequest request, Map<String, TopicSchemas> schemas, DamagedValues damaged) {
    this.request = request;
    this.schemas = schemas;
    this.damaged = damaged;
  }

  @Override
  public void begin(PartitionSlice slice) {
    topicName = slice.topic();
    topic.setUtf8String(UTF8String.fromString(topicName));
    partition.setInt(slice.partition());
  }

  @Override
  public BatchLayouts layouts(PartitionSlice slice, FileChunk chunk) {
    SegmentKey key = new SegmentKey(slice.topic(), chunk.schemaVersion());
    TopicSchemas topic = schemas.get(key.topic());
    String schema = topic == null ? null : topic.segments().get(key.version());
    if (schema == null) {
      throw EmbedlogException.otherKindOfTopic(key.topic());
    }
    segment = segments.computeIfAbsent(key, absent -> SegmentColumns.parse(schema));
    return segment;
  }

  @Override
  public StoredColumn[] stored(BatchHead head, boolean partial) {
    view =
        views.computeIfAbsent(
            new ViewKey(segment, head.layout()),
            absent ->
                new TypedView(
                    request, topicColumns(), segment, head.flags(), topic, partition, damaged));
    return view.stored(head, partial);
  }

  /** Returns the topic's columns as the query knows them; a stream may meet new topics. */
  private Map<String, TopicColumn> topicColumns() {
    Map<String, TopicColumn> columns = request.topics().get(topicName);
    return columns == null ? schemas.get(topicName).columns() : columns;
  }

  @Override
  public void load(BatchHead head, BatchBody body) throws DamagedBatchException {
    view.load(head, body);
  }

  @Override
  public long leftOut() {
    return view.leftOut();
  }

  @Override
  public ColumnarBatch show(int first, int last) throws DamagedBatchException {
    return view.show(first, last);
  }
}
