package embedlog.spark;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.file.Path;
import java.util.List;

/** Reads a part of a segment file, batch by batch: first the head, then the wanted columns. */
final class ChunkReader implements AutoCloseable {
  private final PartitionSlice slice;
  private final FileChunk chunk;
  private final BatchLayouts layouts;
  private final DirectMemory memory;
  private final BatchHead head;
  private final BatchBody body;
  private final SegmentFile file;
  private final FileWindow window;
  private long position;

  /** Where the batch of the head begins. */
  private long current;

  /** The next batch begins at this offset, or later: a repair leaves gaps. */
  private long leastOffset;

  /**
   * Opens the file.
   *
   * @param roots the log roots that have it, in the order to try them
   * @param slice what the chunk is part of
   * @param chunk what to read
   * @param layouts the columns of its batches
   * @param memory where to read it to
   * @param head what to read the heads into
   * @param body what to read the columns into
   * @param readAhead how many bytes to read at once
   * @throws DataLossException if the file was deleted
   */
  ChunkReader(
      List<Path> roots,
      PartitionSlice slice,
      FileChunk chunk,
      BatchLayouts layouts,
      DirectMemory memory,
      BatchHead head,
      BatchBody body,
      int readAhead)
      throws IOException {
    this.slice = slice;
    this.chunk = chunk;
    this.layouts = layouts;
    this.memory = memory;
    this.head = head;
    this.body = body;
    this.file = new SegmentFile(roots, slice, chunk);
    this.position = chunk.position();
    this.window = new FileWindow(memory, file, position, chunk.endPosition(), readAhead);
  }

  /** Returns how many bytes were read. */
  long bytesRead() {
    return window.bytesRead();
  }

  /** Returns an error for the batch of the head. */
  EmbedlogException damaged(String reason) {
    return EmbedlogException.damagedBatch(reason, chunk.path(), current);
  }

  /**
   * Reads the next head.
   *
   * @return false if there is none
   * @throws EmbedlogException if the file is damaged or ends too early
   */
  boolean nextHead() throws IOException {
    if (position == 0) {
      position = schemaLength();
    }
    if (position == chunk.endPosition()) {
      return false;
    }
    readHeadOfAnyCopy();
    return true;
  }

  /** Reads the head at the position, and moves on. */
  private void readHeadOfAnyCopy() throws IOException {
    current = position;
    while (true) {
      try {
        readHead();
        position += head.messageLength();
        leastOffset = head.nextOffset();
        return;
      } catch (NewerFormatException error) {
        throw EmbedlogException.newerFormat(error.getMessage(), chunk.path(), current);
      } catch (DamagedBatchException error) {
        useAnotherCopy(error);
      }
    }
  }

  /** Reads the batch of the head in the next directory; throws the error if there is none. */
  private void useAnotherCopy(DamagedBatchException error) throws IOException {
    EmbedlogException damaged = damaged(error.getMessage());
    if (!file.openAnother(damaged, current)) {
      throw damaged;
    }
    window.begin(current);
  }

  private void readHead() throws IOException, DamagedBatchException {
    int begin = require(BatchFormat.PREFIX_BYTES);
    int length = BatchHead.length(window.buffer(), begin);
    if (length == 0) {
      throw new DamagedBatchException("the stream ends before the batches that were written");
    }
    begin = require(length);
    head.read(window.buffer(), begin, length, layouts);
    if (head.baseOffset() < leastOffset) {
      throw new DamagedBatchException(
          "offset " + head.baseOffset() + " follows offset " + (leastOffset - 1));
    }
    if (head.messageLength() > chunk.endPosition() - current) {
      throw new DamagedBatchException("truncated");
    }
  }

  /** Returns the index of the next bytes of the file in memory. */
  private int require(int size) throws IOException {
    int begin = window.require(position, size);
    if (begin < 0) {
      throw truncated();
    }
    return begin;
  }

  /** Returns where the first batch begins, behind the Arrow schema. */
  private int schemaLength() throws IOException {
    ByteBuffer bytes = window.buffer();
    int begin = require(8);
    bytes = window.buffer();
    int length = bytes.getInt(begin + 4);
    if (bytes.getInt(begin) != -1 || length <= 0 || length > chunk.endPosition() - 8) {
      String problem = "Not a segment of this log: it does not begin with an Arrow schema";
      String todo = "Run `embedlog verify`.";
      throw EmbedlogException.inFile("CorruptionError", problem, chunk.path(), 0, todo);
    }
    return 8 + length;
  }

  /**
   * Reads columns of the batch of the head.
   *
   * @throws EmbedlogException if a column is damaged or the file ends too early
   */
  void readColumns(StoredColumn[] columns) throws IOException {
    while (true) {
      try {
        head.checkColumnRanges();
        int begin = window.reserve(current, head.messageLength());
        head.move(window.buffer(), begin);
        load(columns);
        body.read(head, memory, columns);
        return;
      } catch (DamagedBatchException error) {
        useAnotherCopy(error);
        position = current;
        leastOffset = head.baseOffset();
        readHeadOfAnyCopy();
      }
    }
  }

  /** Reads the columns into memory, in one piece if there is little between them. */
  private void load(StoredColumn[] columns) throws IOException {
    int wanted = 0;
    for (StoredColumn column : columns) {
      int number = column.number();
      wanted += head.columnEnd(number) - head.columnBegin(number);
    }
    boolean complete = true;
    if (wanted > head.messageLength() / 2) {
      complete = window.load(head.begin(), head.begin() + head.messageLength());
    } else {
      for (StoredColumn column : columns) {
        int number = column.number();
        complete &= window.load(head.columnBegin(number), head.columnEnd(number));
      }
    }
    if (!complete) {
      throw truncated();
    }
  }

  private EmbedlogException truncated() throws IOException {
    long size = file.size();
    if (size >= chunk.endPosition()) {
      return damaged("truncated");
    }
    if (chunk.sealed()) {
      return EmbedlogException.truncatedFile(chunk.path(), size, chunk.endPosition());
    }
    return new DataLossException("The file " + chunk.path() + " was truncated", slice);
  }

  @Override
  public void close() throws IOException {
    file.close();
  }
}
