package embedlog.spark;

import java.io.IOException;
import java.nio.ByteBuffer;

/**
 * The bytes of a segment file that are in memory: some of a batch, or many small batches.
 *
 * <p>Memory mirrors the file from {@link #start} on. Of a large batch only the columns that are
 * wanted are read, each to its place.
 */
final class FileWindow {
  private final DirectMemory memory;
  private final SegmentFile file;
  private final long end;
  private final int readAhead;
  private long start;

  /** How many bytes from the start on are in memory without a gap. */
  private int filled;

  private long bytesRead;

  /**
   * Begins at a position of a file.
   *
   * @param memory what to read into
   * @param file the file
   * @param position where the first batch begins
   * @param end the position that nothing is read beyond
   * @param readAhead how many bytes to read at once for the head of a batch
   */
  FileWindow(DirectMemory memory, SegmentFile file, long position, long end, int readAhead) {
    this.memory = memory;
    this.file = file;
    this.start = position;
    this.end = end;
    this.readAhead = readAhead;
  }

  /** Returns how many bytes were read from the file. */
  long bytesRead() {
    return bytesRead;
  }

  /** Returns the memory, whose first byte is the file's byte at {@link #start}. */
  ByteBuffer buffer() {
    return memory.buffer();
  }

  /** Returns the address of the file's byte at {@link #start}. */
  long address() {
    return memory.address();
  }

  /**
   * Makes the bytes from a position on available, and perhaps some more.
   *
   * @param position where in the file; not before the start of the window
   * @param size how many bytes are needed
   * @return their index in {@link #buffer}, or -1 if the file ends before them
   */
  int require(long position, int size) throws IOException {
    if (position + size > start + filled) {
      moveTo(position);
      long wanted = Math.min(Math.max(size, readAhead), end - start);
      memory.reserve((int) wanted, filled);
      filled += read(filled, (int) wanted);
      if (size > filled) {
        return -1;
      }
    }
    return (int) (position - start);
  }

  /**
   * Makes room for a batch, whose bytes beyond those in memory are read by {@link #load}.
   *
   * @return the index of the batch in {@link #buffer}
   */
  int reserve(long position, int size) {
    if (position + size > start + filled) {
      moveTo(position);
      memory.reserve(size, filled);
    }
    return (int) (position - start);
  }

  /**
   * Reads a part of the file to its place, unless it is in memory.
   *
   * @return whether the file has all of it
   */
  boolean load(int from, int until) throws IOException {
    if (until <= filled) {
      return true;
    }
    int begin = Math.max(from, filled);
    int count = read(begin, until);
    if (begin == filled) {
      filled += count;
    }
    return begin + count >= until;
  }

  /** Forgets the bytes in memory: from this position on they are read from the file again. */
  void begin(long position) {
    start = position;
    filled = 0;
  }

  private void moveTo(long position) {
    int kept = (int) Math.max(start + filled - position, 0);
    if (kept > 0 && position > start) {
      memory.buffer().put(0, memory.buffer(), (int) (position - start), kept);
    }
    start = position;
    filled = kept;
  }

  /** Reads the bytes [from, until) of the window; returns how many the file has. */
  private int read(int from, int until) throws IOException {
    ByteBuffer target = memory.buffer().duplicate().limit(until).position(from);
    while (target.hasRemaining()) {
      int count = file.read(target, start + target.position());
      if (count < 0) {
        break;
      }
      bytesRead += count;
    }
    return target.position() - from;
  }
}
