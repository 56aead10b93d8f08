package embedlog.spark;

import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.Base64;
import org.apache.arrow.flatbuf.Message;
import org.apache.arrow.flatbuf.RecordBatch;
import org.apache.arrow.vector.types.pojo.Field;
import org.apache.arrow.vector.types.pojo.Schema;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.vectorized.ColumnVector;

/** The value of a column in rows that do not have it: a stream of Arrow with one row. */
final class DefaultValue implements ArrowBody {
  private final DirectMemory memory = new DirectMemory();
  private final Field field;
  private final RecordBatch batch;

  private DefaultValue(ByteBuffer stream) {
    int schemaLength = 8 + stream.getInt(4);
    field = Schema.deserializeMessage(stream.slice(0, schemaLength)).getFields().get(0);
    int bodyBegin = schemaLength + 8 + stream.getInt(schemaLength + 4);
    Message message =
        Message.getRootAsMessage(
            stream
                .slice(schemaLength + 8, bodyBegin - schemaLength - 8)
                .order(ByteOrder.LITTLE_ENDIAN));
    batch = (RecordBatch) message.header(new RecordBatch());
    int length = (int) message.bodyLength();
    memory.reserve(Math.max(length, 1), 0);
    memory.buffer().put(0, stream, bodyBegin, length);
  }

  /**
   * Returns the value.
   *
   * @param stream the value, in Base64
   * @param name the column
   * @param type the type that the query has for it
   * @param damaged makes the error for a damaged value
   * @return a vector whose row 0 is the value
   */
  static ColumnVector decode(String stream, String name, DataType type, DamagedValues damaged) {
    ByteBuffer bytes = ByteBuffer.wrap(Base64.getDecoder().decode(stream));
    DefaultValue value = new DefaultValue(bytes.order(ByteOrder.LITTLE_ENDIAN));
    int nodes = VectorFactory.nodes(value.field);
    StoredColumn place = new StoredColumn(name, 0, 0, nodes, 0, VectorFactory.buffers(value.field));
    StoredVector vector = VectorFactory.of(place, value.field, type, damaged);
    try {
      vector.load(value, 1);
    } catch (DamagedBatchException error) {
      throw new EmbedlogException(
          "CorruptionError",
          "The default of column " + name + " is damaged: " + error.getMessage() + ". Run verify.");
    }
    return vector;
  }

  @Override
  public long address(int buffer) {
    return memory.address() + batch.buffers(buffer).offset();
  }

  @Override
  public int size(int buffer) {
    return (int) batch.buffers(buffer).length();
  }

  @Override
  public long values(int node) {
    return batch.nodes(node).length();
  }

  @Override
  public long nulls(int node) {
    return batch.nodes(node).nullCount();
  }
}
