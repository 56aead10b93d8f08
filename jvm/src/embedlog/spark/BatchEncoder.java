package embedlog.spark;

import com.google.flatbuffers.FlatBufferBuilder;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import java.util.HashMap;
import java.util.Map;
import java.util.zip.CRC32C;
import org.apache.arrow.flatbuf.BodyCompression;
import org.apache.arrow.flatbuf.BodyCompressionMethod;
import org.apache.arrow.flatbuf.Buffer;
import org.apache.arrow.flatbuf.FieldNode;
import org.apache.arrow.flatbuf.Message;
import org.apache.arrow.flatbuf.MessageHeader;
import org.apache.arrow.flatbuf.MetadataVersion;
import org.apache.arrow.flatbuf.RecordBatch;

/**
 * Encodes open batches as the log stores them, for offsets from 0 on: the publication sets others.
 *
 * <p>docs/format.md describes the bytes. One object is used for all batches of a task.
 */
final class BatchEncoder implements AutoCloseable {
  private static final int MAX_BODY_BYTES = 64 << 20;
  private static final int[] FIRST_BUFFERS = {0, 2, 5, 8};

  private static final long NONE = -1;

  private final Map<String, BufferCompressor> compressors = new HashMap<>();
  private final BodyWriter raw = new BodyWriter();
  private final BodyWriter compressed = new BodyWriter();
  private final FlatBufferBuilder flatbuffer = new FlatBufferBuilder(1024);
  private final CRC32C crc = new CRC32C();
  private TargetTopic topic;

  /** The compressor for the topic; null if its batches are not compressed. */
  private BufferCompressor compressor;

  /** Takes finished batches. */
  @FunctionalInterface
  interface Output {
    void add(ByteBuffer head, ByteBuffer body, boolean headers, int records);
  }

  /** Encodes rows as one batch, or as several if one would be over the limits of the topic. */
  void encode(TargetTopic topic, OpenBatch batch, Output output) {
    this.topic = topic;
    compressor =
        topic.compression().equals("none")
            ? null
            : compressors.computeIfAbsent(topic.compression(), BufferCompressor::of);
    encode(batch, 0, batch.count(), output);
  }

  private void encode(OpenBatch batch, int first, int last, Output output) {
    BodyWriter body = encodeBody(batch, first, last);
    ByteBuffer head = encodeHead(batch, first, last, body);
    if (last - first == 1 || isWithinLimits(batch, first, last, head, body)) {
      output.add(head, body.bytes(), batch.hasHeaders(), last - first);
      return;
    }
    int middle = first + last >>> 1;
    encode(batch, first, middle, output);
    encode(batch, middle, last, output);
  }

  private boolean isWithinLimits(
      OpenBatch batch, int first, int last, ByteBuffer head, BodyWriter body) {
    boolean isOver =
        KafkaSize.isOver(batch, first, last, body.size(), compressor != null, topic.messageLimit());
    return !isOver && (long) head.remaining() + body.size() <= topic.segmentLimit();
  }

  private BodyWriter encodeBody(OpenBatch batch, int first, int last) {
    checkSize(batch.bodyBytes(first, last));
    raw.start((int) batch.bodyBytes(first, last));
    batch.write(raw, first, last);
    if (compressor == null) {
      return raw;
    }
    long capacity = 0;
    for (int i = 0; i < raw.count(); i++) {
      capacity += BodyWriter.padded(compressor.maxSize(raw.length(i)));
    }
    compressed.start(Math.toIntExact(capacity));
    compressed.addCompressed(raw, compressor);
    return compressed;
  }

  /**
   * Checks how many bytes the columns of a batch take.
   *
   * @throws EmbedlogException if no batch can have so many
   */
  static void checkSize(long bytes) {
    if (bytes > MAX_BODY_BYTES) {
      throw new EmbedlogException(
          "RecordTooLargeError",
          "A batch of "
              + bytes
              + " bytes is larger than "
              + MAX_BODY_BYTES
              + ". Send smaller batches.");
    }
  }

  /** Returns everything before the body: Arrow's metadata, and embedlog's block. */
  private ByteBuffer encodeHead(OpenBatch batch, int first, int last, BodyWriter body) {
    int columns = batch.hasHeaders() ? 4 : 3;
    int[] nulls = {
      0, batch.keys().nulls(first, last), batch.values().nulls(first, last), 0,
    };
    ByteBuffer metadata = encodeMetadata(batch, first, last, nulls, body);
    int block = BatchFormat.PREFIX_BYTES + (int) BodyWriter.padded(metadata.remaining());
    int blockLength =
        BatchFormat.HEADER_BYTES
            + BatchFormat.COLUMN_ENTRY_BYTES * columns
            + BatchFormat.TRAILER_BYTES;
    int length = block + blockLength;
    ByteBuffer head = ByteBuffer.allocate(length).order(ByteOrder.LITTLE_ENDIAN);
    head.putInt(BatchFormat.CONTINUATION).putInt(length - BatchFormat.PREFIX_BYTES).put(metadata);
    putHeader(head.position(block), batch, first, last, columns, (long) length + body.size());
    for (int column = 0; column < columns; column++) {
      int begin = body.begin(FIRST_BUFFERS[column]);
      int end = body.begin(column + 1 < columns ? FIRST_BUFFERS[column + 1] : body.count());
      head.putLong(end).putInt(checksum(body.bytes(), begin, end)).putInt(nulls[column]);
    }
    head.putInt(blockLength).putInt(BatchFormat.END_MAGIC);
    head.putInt(block + 8, checksum(head, 0, block));
    head.putInt(block + 4, checksum(head, block + 8, length));
    return head.flip();
  }

  /** Writes the header of the block, without checksums. */
  private void putHeader(
      ByteBuffer head, OpenBatch batch, int first, int last, int columns, long message) {
    int flags =
        (compressor == null ? 0 : BatchFormat.COMPRESSED)
            | (batch.hasHeaders() ? BatchFormat.HEADERS : 0);
    int blockLength =
        BatchFormat.HEADER_BYTES
            + BatchFormat.COLUMN_ENTRY_BYTES * columns
            + BatchFormat.TRAILER_BYTES;
    head.putInt(BatchFormat.MAGIC).putInt(0).putInt(0);
    head.putShort((short) BatchFormat.VERSION).putShort((short) flags).putInt(last - first);
    head.putShort((short) columns).putShort((short) 0).putInt(blockLength).putLong(message);
    // Base offset, next offset, leader epoch.
    head.putLong(0).putLong(last - first).putInt(0);
    // Producer epoch, reserved, base sequence.
    head.putShort((short) NONE).putShort((short) 0).putInt((int) NONE);
    head.putLong(batch.minTimestamp(first, last)).putLong(batch.maxTimestamp(first, last));
    // Producer id, delete horizon.
    head.putLong(NONE).putLong(NONE);
  }

  private ByteBuffer encodeMetadata(
      OpenBatch batch, int first, int last, int[] nulls, BodyWriter body) {
    flatbuffer.clear();
    int rows = last - first;
    int pairs = batch.headers().pairs() == 0 ? 0 : batch.headers().pairs(first, last);
    RecordBatch.startNodesVector(flatbuffer, batch.hasHeaders() ? 7 : 3);
    // From the last to the first: a flatbuffer is written backwards.
    if (batch.hasHeaders()) {
      int from = batch.headers().firstPair(first);
      int to = batch.headers().firstPair(last);
      FieldNode.createFieldNode(flatbuffer, pairs, batch.headers().values().nulls(from, to));
      FieldNode.createFieldNode(flatbuffer, pairs, 0);
      FieldNode.createFieldNode(flatbuffer, pairs, 0);
      FieldNode.createFieldNode(flatbuffer, rows, 0);
    }
    for (int column = 2; column >= 0; column--) {
      FieldNode.createFieldNode(flatbuffer, rows, nulls[column]);
    }
    final int nodes = flatbuffer.endVector();
    RecordBatch.startBuffersVector(flatbuffer, body.count());
    for (int i = body.count() - 1; i >= 0; i--) {
      Buffer.createBuffer(flatbuffer, body.begin(i), body.length(i));
    }
    final int buffers = flatbuffer.endVector();
    int compression = 0;
    if (compressor != null) {
      compression =
          BodyCompression.createBodyCompression(
              flatbuffer, compressor.codec(), BodyCompressionMethod.BUFFER);
    }
    int table = RecordBatch.createRecordBatch(flatbuffer, rows, nodes, buffers, compression, 0);
    flatbuffer.finish(
        Message.createMessage(
            flatbuffer, MetadataVersion.V5, MessageHeader.RecordBatch, table, body.size(), 0));
    return flatbuffer.dataBuffer();
  }

  /** Returns the CRC-32C of the bytes [from, until). */
  private int checksum(ByteBuffer bytes, int from, int until) {
    crc.reset();
    crc.update(bytes.duplicate().limit(until).position(from));
    return (int) crc.getValue();
  }

  @Override
  public void close() {
    raw.close();
    compressed.close();
    compressors.values().forEach(BufferCompressor::close);
  }
}
