package embedlog.spark;

import java.nio.ByteBuffer;
import net.jpountz.lz4.LZ4Exception;
import net.jpountz.lz4.LZ4Factory;
import net.jpountz.lz4.LZ4SafeDecompressor;

/**
 * Decompresses frames of LZ4 as Arrow writes them: above 64 KiB their blocks refer to the blocks
 * before, which the library that Spark brings refuses.
 *
 * <p>The checksums of a frame are not compared: that of the column covers all of its bytes.
 */
final class Lz4Frame {
  private static final int MAGIC = 0x184D2204;
  private static final int MIN_BYTES = 7 + Integer.BYTES;
  private static final int VERSION_BITS = 0xC0;
  private static final int VERSION = 0x40;
  private static final int INDEPENDENT_BLOCKS = 0x20;
  private static final int BLOCK_CHECKSUMS = 0x10;
  private static final int CONTENT_SIZE = 0x08;
  private static final int CONTENT_CHECKSUM = 0x04;
  private static final int DICTIONARY = 0x01;
  private static final int STORED = 1 << 31;
  private static final int MIN_MATCH = 4;

  private final LZ4SafeDecompressor decompressor = LZ4Factory.fastestInstance().safeDecompressor();
  private byte[] compressed = new byte[0];
  private byte[] raw = new byte[0];
  private ByteBuffer source;
  private int position;
  private int end;
  private int flags;

  /** Where the next byte of the frame is in {@link #compressed}. */
  private int input;

  /** Where the next byte goes in {@link #raw}. */
  private int output;

  /**
   * Decompresses a frame.
   *
   * @param source the memory with the frame at [begin, begin + length)
   * @param target the memory for exactly {@code size} bytes from {@code at} on
   * @return whether the frame is a whole one of so many bytes
   */
  boolean decompress(
      ByteBuffer source, int begin, int length, ByteBuffer target, int at, int size) {
    this.source = source;
    position = begin;
    end = begin + length;
    if (!readHeader()) {
      return false;
    }
    boolean whole =
        (flags & INDEPENDENT_BLOCKS) != 0
            ? independentBlocks(target, at, at + size)
            : linkedBlocks(target, at, size);
    int trailer = (flags & CONTENT_CHECKSUM) == 0 ? 0 : Integer.BYTES;
    return whole && position == end - trailer;
  }

  private boolean readHeader() {
    if (end - position < MIN_BYTES || source.getInt(position) != MAGIC) {
      return false;
    }
    flags = source.get(position + 4);
    position += (flags & CONTENT_SIZE) == 0 ? 7 : 7 + Long.BYTES;
    return (flags & VERSION_BITS) == VERSION && (flags & DICTIONARY) == 0;
  }

  /**
   * Moves to the bytes of the next block.
   *
   * @return its length, with the highest bit if it is stored as it is; 0 at the end; -1 if the
   *     frame does not have it
   */
  private int nextBlock() {
    if (end - position < Integer.BYTES) {
      return -1;
    }
    int header = source.getInt(position);
    position += Integer.BYTES;
    return (header & ~STORED) > end - position ? -1 : header;
  }

  private void skip(int length) {
    position += length + ((flags & BLOCK_CHECKSUMS) == 0 ? 0 : Integer.BYTES);
  }

  private boolean independentBlocks(ByteBuffer target, int at, int until) {
    while (true) {
      int header = nextBlock();
      int length = header & ~STORED;
      if (header == -1) {
        return false;
      } else if (length == 0) {
        return at == until;
      } else if (header < 0) {
        if (length > until - at) {
          return false;
        }
        target.put(at, source, position, length);
        at += length;
      } else {
        try {
          at += decompressor.decompress(source, position, length, target, at, until - at);
        } catch (LZ4Exception error) {
          return false;
        }
      }
      skip(length);
    }
  }

  private boolean linkedBlocks(ByteBuffer target, int at, int size) {
    raw = atLeast(raw, size);
    output = 0;
    while (true) {
      int header = nextBlock();
      int length = header & ~STORED;
      if (header == -1) {
        return false;
      } else if (length == 0) {
        target.put(at, raw, 0, size);
        return output == size;
      } else if (header < 0) {
        if (length > size - output) {
          return false;
        }
        source.get(position, raw, output, length);
        output += length;
      } else {
        compressed = atLeast(compressed, length);
        source.get(position, compressed, 0, length);
        if (!linkedBlock(length, size)) {
          return false;
        }
      }
      skip(length);
    }
  }

  /** Decompresses a block, which may repeat any bytes before it; returns false if it cannot be. */
  private boolean linkedBlock(int length, int limit) {
    input = 0;
    while (input < length) {
      int token = compressed[input++] & 0xFF;
      int literals = extended(token >>> 4, length, limit);
      if (literals > length - input || literals > limit - output) {
        return false;
      }
      System.arraycopy(compressed, input, raw, output, literals);
      input += literals;
      output += literals;
      if (input == length) {
        // The last sequence has only literals.
        return true;
      }
      if (length - input < 2) {
        return false;
      }
      int distance = compressed[input] & 0xFF | (compressed[input + 1] & 0xFF) << 8;
      input += 2;
      int match = extended(token & 0xF, length, limit) + MIN_MATCH;
      if (distance == 0 || distance > output || match > limit - output) {
        return false;
      }
      repeat(distance, match);
    }
    return false;
  }

  /** Returns a length that continues in further bytes if it is 15; more than the limit if it is. */
  private int extended(int nibble, int length, int limit) {
    int number = nibble;
    if (nibble == 15) {
      int more = 255;
      while (more == 255 && number <= limit && input < length) {
        more = compressed[input++] & 0xFF;
        number += more;
      }
    }
    return number;
  }

  private void repeat(int distance, int length) {
    if (distance >= length) {
      System.arraycopy(raw, output - distance, raw, output, length);
    } else {
      for (int at = output; at < output + length; at++) {
        raw[at] = raw[at - distance];
      }
    }
    output += length;
  }

  private static byte[] atLeast(byte[] array, int length) {
    return array.length >= length ? array : new byte[Integer.highestOneBit(length) * 2];
  }
}
