package embedlog.spark;

import java.io.IOException;
import java.nio.file.Path;
import java.util.Iterator;
import org.apache.spark.sql.connector.metric.CustomTaskMetric;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.vectorized.ColumnarBatch;
import org.apache.spark.unsafe.Platform;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/**
 * Reads what one task was given, and shows each batch of the log to Spark as it is in memory.
 *
 * <p>It opens no database and takes no lock, so its process may be killed at any time.
 */
final class LogPartitionReader implements PartitionReader<ColumnarBatch> {
  private static final Logger LOGGER = LoggerFactory.getLogger("embedlog.spark");

  private final Path root;
  private final ReadRequest request;
  private final Iterator<PartitionSlice> slices;
  private final DirectMemory memory = new DirectMemory();
  private final BatchHead head = new BatchHead();
  private final BatchBody body = new BatchBody();
  private final BatchColumns columns;
  private final ReadMetrics metrics = new ReadMetrics();
  private PartitionSlice slice;
  private Iterator<FileChunk> chunks;
  private ChunkReader chunk;
  private ColumnarBatch batch;
  private long rows;

  LogPartitionReader(LogInputPartition partition, ReadRequest request) {
    this.root = Path.of(partition.root());
    this.request = request;
    this.slices = partition.slices().iterator();
    this.columns = new BatchColumns(request.columns(), reason -> chunk.damaged(reason));
  }

  @Override
  public boolean next() throws IOException {
    if (request.limit() >= 0 && rows >= request.limit()) {
      return false;
    }
    while (slice != null || nextSlice()) {
      try {
        if (nextBatch()) {
          rows += batch.numRows();
          return true;
        }
      } catch (DataLossException error) {
        if (request.failOnDataLoss()) {
          throw error;
        }
        LOGGER.warn(error.getMessage());
      }
      closeChunk();
      slice = null;
    }
    return false;
  }

  private boolean nextSlice() {
    if (!slices.hasNext()) {
      return false;
    }
    slice = slices.next();
    chunks = slice.chunks().iterator();
    columns.show(slice);
    return true;
  }

  /** Reads the next batch with rows of the slice; returns false at its end. */
  private boolean nextBatch() throws IOException {
    while (true) {
      if (chunk == null && !nextChunk()) {
        return false;
      }
      if (!chunk.nextHead()) {
        closeChunk();
        continue;
      }
      metrics.countBatch();
      if (head.leaderEpoch() > slice.leaderEpoch()) {
        throw new DataLossException(
            "The log was truncated and written again after the query was planned", slice);
      }
      if (head.baseOffset() >= slice.untilOffset()) {
        return false;
      }
      boolean hasRows = head.count() > 0 && head.nextOffset() > slice.fromOffset();
      if (hasRows && request.times().overlaps(head) && show()) {
        return true;
      }
    }
  }

  private boolean nextChunk() throws IOException {
    if (!chunks.hasNext()) {
      return false;
    }
    FileChunk next = chunks.next();
    chunk = new ChunkReader(root, slice, next, memory, head, body, request.readAhead());
    return true;
  }

  /** Shows the rows of the batch that are in the slice; returns false if there are none. */
  private boolean show() throws IOException {
    boolean partial =
        head.baseOffset() < slice.fromOffset() || head.nextOffset() > slice.untilOffset();
    LogColumn[] stored = columns.stored(head, partial);
    if (stored.length > 0) {
      chunk.readColumns(stored);
    }
    try {
      int first = partial ? firstRowAt(slice.fromOffset()) : 0;
      int last = partial ? firstRowAt(slice.untilOffset()) : head.count();
      if (first >= last) {
        return false;
      }
      if (request.columns().contains("timestamp")) {
        checkTimestamps();
      }
      batch = columns.show(head, body, stored, first, last);
      return true;
    } catch (DamagedBatchException error) {
      throw chunk.damaged(error.getMessage());
    }
  }

  /** Returns the first row of the batch at or after an offset. */
  private int firstRowAt(long offset) throws DamagedBatchException {
    if (!head.hasOffsets()) {
      return (int) Math.min(Math.max(offset - head.baseOffset(), 0), head.count());
    }
    long offsets = BatchColumns.longs(body, LogColumn.OFFSET.firstBuffer(head), head);
    int low = 0;
    int high = head.count();
    while (low < high) {
      int middle = (low + high) >>> 1;
      if (Platform.getLong(null, offsets + Long.BYTES * (long) middle) < offset) {
        low = middle + 1;
      } else {
        high = middle;
      }
    }
    return low;
  }

  private void checkTimestamps() {
    if (head.maxTimestamp() > Long.MAX_VALUE / 1000) {
      throw new EmbedlogException(
          "InvalidRecordError",
          String.format(
              "A record has a timestamp that Spark cannot hold: %d ms [%s-%d]. Leave the column"
                  + " out: .schema('key binary, value binary').",
              head.maxTimestamp(), slice.topic(), slice.partition()));
    }
  }

  @Override
  public ColumnarBatch get() {
    return batch;
  }

  @Override
  public CustomTaskMetric[] currentMetricsValues() {
    return metrics.values(chunk == null ? 0 : chunk.bytesRead());
  }

  private void closeChunk() throws IOException {
    if (chunk != null) {
      metrics.countBytes(chunk.bytesRead());
      chunk.close();
      chunk = null;
    }
  }

  @Override
  public void close() throws IOException {
    closeChunk();
    body.close();
    memory.close();
  }
}
