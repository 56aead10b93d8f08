package embedlog.spark;

import java.nio.ByteBuffer;
import org.apache.arrow.flatbuf.Buffer;
import org.apache.arrow.flatbuf.FieldNode;
import org.apache.arrow.flatbuf.Message;
import org.apache.arrow.flatbuf.MessageHeader;
import org.apache.arrow.flatbuf.RecordBatch;

/**
 * Where the buffers of a batch are in its body, from Arrow's metadata.
 *
 * <p>The metadata has a checksum, but bytes with a right checksum may be hostile all the same:
 * every position is compared with the column that the buffer belongs to.
 */
final class ArrowBuffers {
  private final Message message = new Message();
  private final RecordBatch batch = new RecordBatch();
  private final Buffer buffer = new Buffer();
  private final FieldNode node = new FieldNode();
  private BatchHead head;
  private int begin;
  private int length;

  /**
   * Reads the metadata of a batch.
   *
   * @throws DamagedBatchException if it does not describe the batch
   */
  void read(ByteBuffer bytes, BatchHead head) throws DamagedBatchException {
    this.head = head;
    ByteBuffer metadata = bytes.duplicate().order(bytes.order());
    metadata.limit(head.body()).position(head.begin() + BatchFormat.PREFIX_BYTES);
    try {
      Message.getRootAsMessage(metadata, message);
      if (message.headerType() != MessageHeader.RecordBatch || message.header(batch) == null) {
        throw new DamagedBatchException("its metadata is not that of a batch");
      }
      if (batch.length() != head.count()) {
        throw new DamagedBatchException("it has " + batch.length() + " rows, not " + head.count());
      }
      if (batch.buffersLength() != bufferCount()
          || batch.nodesLength() != head.columns() + (head.hasHeaders() ? 3 : 0)
          || isCompressed() != head.isCompressed()) {
        throw new DamagedBatchException("its metadata is that of another batch");
      }
    } catch (IndexOutOfBoundsException | IllegalArgumentException error) {
      throw new DamagedBatchException("its metadata leads outside of it");
    }
  }

  private boolean isCompressed() {
    return batch.compression() != null;
  }

  /** Returns how many buffers timestamp, key, value, headers and offset have. */
  private int bufferCount() {
    return 8 + (head.hasHeaders() ? 9 : 0) + (head.hasOffsets() ? 2 : 0);
  }

  /** Returns Arrow's number of the compression. */
  byte codec() {
    return batch.compression().codec();
  }

  /**
   * Checks how many values a column is said to have, and that it says which of them are null.
   *
   * @throws DamagedBatchException if it is not one for each row, or nulls are not told
   */
  void checkRows(LogColumn column) throws DamagedBatchException {
    long rows;
    boolean tellsNulls;
    try {
      // Only the headers have nodes below their own.
      int behindHeaders = column == LogColumn.OFFSET && head.hasHeaders() ? 3 : 0;
      rows = batch.nodes(node, column.number(head) + behindHeaders).length();
      tellsNulls =
          node.nullCount() == 0 || batch.buffers(buffer, column.firstBuffer(head)).length() > 0;
    } catch (IndexOutOfBoundsException error) {
      throw new DamagedBatchException("its metadata leads outside of it");
    }
    if (rows != head.count()) {
      throw new DamagedBatchException("column " + column.columnName() + " has " + rows + " rows");
    }
    if (!tellsNulls) {
      throw new DamagedBatchException(
          "column " + column.columnName() + " has nulls, and does not tell where");
    }
  }

  /**
   * Finds a buffer of a column.
   *
   * @throws DamagedBatchException if the buffer is outside of the column
   */
  void find(int number, int column) throws DamagedBatchException {
    long offset;
    long size;
    try {
      batch.buffers(buffer, number);
      offset = buffer.offset();
      size = buffer.length();
    } catch (IndexOutOfBoundsException error) {
      throw new DamagedBatchException("its metadata leads outside of it");
    }
    long room = head.columnEnd(column) - head.body();
    long first = head.columnBegin(column) - head.body();
    if (size < 0 || size > room || size > 0 && (offset < first || offset > room - size)) {
      throw new DamagedBatchException("a buffer is outside of its column");
    }
    begin = size == 0 ? head.columnBegin(column) : head.body() + (int) offset;
    length = (int) size;
  }

  /** Returns where the buffer that was found begins in memory. */
  int begin() {
    return begin;
  }

  /** Returns the length of the buffer that was found. */
  int length() {
    return length;
  }
}
