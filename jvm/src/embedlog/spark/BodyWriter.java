package embedlog.spark;

import java.nio.ByteBuffer;
import java.util.BitSet;
import org.apache.spark.unsafe.Platform;

/** Writes the buffers of a batch into memory, one after the other, each padded to eight bytes. */
final class BodyWriter implements AutoCloseable {
  /** The buffers of timestamp, key, value and headers. */
  private static final int MAX_BUFFERS = 2 + 3 + 3 + 9;

  private final DirectMemory memory = new DirectMemory();
  private final int[] begins = new int[MAX_BUFFERS];
  private final int[] lengths = new int[MAX_BUFFERS];
  private int count;
  private int size;

  /** Returns the length of a buffer with its padding. */
  static long padded(long length) {
    return length + 7 & ~7L;
  }

  /** Starts another body, which needs at most so many bytes. */
  void start(int capacity) {
    memory.reserve(capacity, 0);
    count = 0;
    size = 0;
  }

  /** Adds a buffer that is left out, such as the validity of a column without nulls. */
  void addEmpty() {
    end(0);
  }

  /** Adds the longs [first, last). */
  void addLongs(long[] values, int first, int last) {
    int bytes = Long.BYTES * (last - first);
    long begin = Platform.LONG_ARRAY_OFFSET + Long.BYTES * (long) first;
    Platform.copyMemory(values, begin, null, memory.address() + size, bytes);
    end(bytes);
  }

  /** Adds the offsets of the values [first, last), counted from the first one. */
  void addOffsets(int[] offsets, int first, int last) {
    long address = memory.address() + size;
    int bytes = Integer.BYTES * (last - first + 1);
    if (offsets[first] == 0) {
      long begin = Platform.INT_ARRAY_OFFSET + Integer.BYTES * (long) first;
      Platform.copyMemory(offsets, begin, null, address, bytes);
    } else {
      for (int i = first; i <= last; i++) {
        int offset = offsets[i] - offsets[first];
        Platform.putInt(null, address + Integer.BYTES * (long) (i - first), offset);
      }
    }
    end(bytes);
  }

  /** Adds bytes. */
  void addBytes(byte[] bytes, int begin, int length) {
    long from = Platform.BYTE_ARRAY_OFFSET + (long) begin;
    Platform.copyMemory(bytes, from, null, memory.address() + size, length);
    end(length);
  }

  /** Adds a bit for each of the values [first, last): whether it is not null. */
  void addValidity(BitSet nulls, int first, int last) {
    long address = memory.address() + size;
    int bytes = last - first + 7 >> 3;
    for (int i = 0; i < bytes; i++) {
      int bits = 0;
      int begin = first + 8 * i;
      for (int row = begin; row < last && row < begin + 8; row++) {
        bits |= nulls.get(row) ? 0 : 1 << row - begin;
      }
      Platform.putByte(null, address + i, (byte) bits);
    }
    end(bytes);
  }

  /** Adds the buffers of another body, compressed. */
  void addCompressed(BodyWriter raw, BufferCompressor compressor) {
    for (int i = 0; i < raw.count; i++) {
      int length = raw.lengths[i];
      if (length == 0) {
        end(0);
      } else {
        ByteBuffer source = raw.memory.buffer();
        end(compressor.compress(source, raw.begins[i], length, memory.buffer(), size));
      }
    }
  }

  /** Ends a buffer of so many bytes, which are in memory. */
  private void end(int length) {
    begins[count] = size;
    lengths[count] = length;
    count++;
    int end = (int) padded(size + (long) length);
    for (int i = size + length; i < end; i++) {
      Platform.putByte(null, memory.address() + i, (byte) 0);
    }
    size = end;
  }

  /** Returns how many buffers there are. */
  int count() {
    return count;
  }

  /** Returns how many bytes all buffers take. */
  int size() {
    return size;
  }

  /** Returns where a buffer begins; where the last one ends for the number of buffers. */
  int begin(int buffer) {
    return buffer == count ? size : begins[buffer];
  }

  /** Returns the length of a buffer without its padding. */
  int length(int buffer) {
    return lengths[buffer];
  }

  /** Returns the bytes [0, size). */
  ByteBuffer bytes() {
    return memory.buffer().duplicate().position(0).limit(size);
  }

  @Override
  public void close() {
    memory.close();
  }
}
