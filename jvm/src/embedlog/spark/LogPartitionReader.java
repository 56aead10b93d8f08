package embedlog.spark;

import java.io.IOException;
import java.nio.file.Path;
import java.util.Iterator;
import java.util.List;
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
  private static final StoredColumn[] NO_COLUMNS = {};

  private final Path logRoot;
  private final ReadRequest request;
  private final Iterator<PartitionSlice> slices;
  private final DirectMemory memory = new DirectMemory();
  private final BatchHead head = new BatchHead();
  private final BatchBody body = new BatchBody();
  private final TaskColumns columns;
  private final ReadMetrics metrics = new ReadMetrics();
  private PartitionSlice slice;
  private Iterator<FileChunk> chunks;

  /** The log roots that have the files of the slice. */
  private List<Path> roots;

  /** The offset after the last batch that was read of the slice. */
  private long nextOffset;

  /** Why the files that were read last lack records from the next offset on; null if none do. */
  private DataLossException loss;

  private ChunkReader chunk;
  private ColumnarBatch batch;
  private long rows;

  /** The rows of the batch that are not shown yet: [nextRow, lastRow). */
  private int nextRow;

  private int lastRow;

  LogPartitionReader(LogInputPartition partition, ReadRequest request) {
    this.logRoot = Path.of(partition.root());
    this.request = request;
    this.slices = partition.slices().iterator();
    DamagedValues damaged = reason -> chunk.damaged(reason);
    this.columns =
        request.typed() == null
            ? new BatchColumns(request.columns(), damaged)
            : new TypedColumns(request.typed(), partition.schemas(), damaged);
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
        warnOfLoss(slice.untilOffset());
        slice = null;
      } catch (DataLossException error) {
        if (request.failOnDataLoss()) {
          throw error;
        }
        loss = loss == null ? error : loss;
      }
      closeChunk();
      nextRow = lastRow = 0;
    }
    return false;
  }

  /** Warns of the records that are missing before an offset, if there are any. */
  private void warnOfLoss(long offset) {
    if (loss != null && nextOffset < offset) {
      LOGGER.warn(
          "Skipped offsets [{}, {}) of {}-{}, which are lost: {}",
          nextOffset,
          offset,
          slice.topic(),
          slice.partition(),
          loss.problem());
    }
    loss = null;
  }

  private boolean nextSlice() {
    if (!slices.hasNext()) {
      return false;
    }
    slice = slices.next();
    chunks = slice.chunks().iterator();
    nextOffset = slice.fromOffset();
    List<String> directories = slice.directories();
    roots = directories.isEmpty() ? List.of(logRoot) : directories.stream().map(Path::of).toList();
    columns.begin(slice);
    return true;
  }

  /** Reads the next batch with rows of the slice; returns false at its end. */
  private boolean nextBatch() throws IOException {
    while (true) {
      if (nextRow < lastRow && nextRows()) {
        return true;
      }
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
      warnOfLoss(head.baseOffset());
      if (head.nextOffset() > slice.fromOffset()) {
        if (head.count() == 0) {
          chunk.readColumns(NO_COLUMNS); // Its metadata must not have rows either.
        } else if (request.times().overlaps(head)) {
          load();
        }
      }
      nextOffset = Math.max(nextOffset, head.nextOffset());
    }
  }

  private boolean nextChunk() throws IOException {
    if (!chunks.hasNext()) {
      return false;
    }
    FileChunk next = chunks.next();
    chunk =
        new ChunkReader(
            roots,
            slice,
            next,
            columns.layouts(slice, next),
            memory,
            head,
            body,
            request.readAhead());
    return true;
  }

  /** Reads the columns of the batch, and finds its rows that are in the slice. */
  private void load() throws IOException {
    boolean partial =
        head.baseOffset() < slice.fromOffset() || head.nextOffset() > slice.untilOffset();
    StoredColumn[] stored = columns.stored(head, partial);
    if (stored.length > 0) {
      chunk.readColumns(stored);
    }
    try {
      columns.load(head, body);
      nextRow = partial ? firstRowAt(slice.fromOffset()) : 0;
      lastRow = partial ? firstRowAt(slice.untilOffset()) : head.count();
    } catch (DamagedBatchException error) {
      throw chunk.damaged(error.getMessage());
    }
  }

  /** Shows the next rows that the query does not leave out; returns false if there are none. */
  private boolean nextRows() {
    long leftOut = columns.leftOut();
    int first = leftOut == 0 ? nextRow : Bits.next(leftOut, false, nextRow, lastRow);
    int end = leftOut == 0 ? lastRow : Bits.next(leftOut, true, first, lastRow);
    nextRow = end;
    if (first >= end) {
      return false;
    }
    try {
      batch = columns.show(first, end);
    } catch (DamagedBatchException error) {
      throw chunk.damaged(error.getMessage());
    }
    return true;
  }

  /** Returns the first row of the batch at or after an offset. */
  private int firstRowAt(long offset) throws DamagedBatchException {
    if (!head.hasOffsets()) {
      return (int) Math.min(Math.max(offset - head.baseOffset(), 0), head.count());
    }
    long offsets = BatchColumns.longs(body, head.layout().last().firstBuffer(), head);
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
