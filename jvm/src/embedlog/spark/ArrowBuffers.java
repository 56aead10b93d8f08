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
      if (batch.buffersLength() != head.layout().buffers()
          || batch.nodesLength() != head.layout().nodes()
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

  /** Returns Arrow's number of the compression. */
  byte codec() throws DamagedBatchException {
    try {
      return batch.compression().codec();
    } catch (IndexOutOfBoundsException error) {
      throw new DamagedBatchException("its metadata leads outside of it");
    }
  }

  /**
   * Checks how many values a column is said to have, and that it says which of them are null.
   *
   * @throws DamagedBatchException if it is not one for each row, or nulls are not told
   */
  void checkRows(StoredColumn column) throws DamagedBatchException {
    long rows;
    boolean tellsNulls;
    try {
      rows = batch.nodes(node, column.firstNode()).length();
      tellsNulls =
          node.nullCount() == 0 || batch.buffers(buffer, column.firstBuffer()).length() > 0;
    } catch (IndexOutOfBoundsException error) {
      throw new DamagedBatchException("its metadata leads outside of it");
    }
    if (rows != head.count()) {
      throw new DamagedBatchException("column " + column.name() + " has " + rows + " rows");
    }
    if (!tellsNulls) {
      throw new DamagedBatchException(
          "column " + column.name() + " has nulls, and does not tell where");
    }
  }

  /** Returns how many values a node is said to have. */
  long values(int number) throws DamagedBatchException {
    return fieldNode(number).length();
  }

  /** Returns how many values of a node are said to be null. */
  long nulls(int number) throws DamagedBatchException {
    return fieldNode(number).nullCount();
  }

  private FieldNode fieldNode(int number) throws DamagedBatchException {
    try {
      return batch.nodes(node, number);
    } catch (IndexOutOfBoundsException error) {
      throw new DamagedBatchException("its metadata leads outside of it");
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
    if (size > 0 && (offset & 7) != 0) {
      throw new DamagedBatchException(
          "a buffer begins at " + offset + ", which is no multiple of 8");
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
