package embedlog.spark;

import com.github.luben.zstd.ZstdCompressCtx;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;
import net.jpountz.lz4.LZ4Compressor;
import net.jpountz.lz4.LZ4Factory;
import net.jpountz.xxhash.XXHashFactory;
import org.apache.arrow.flatbuf.CompressionType;

/**
 * Compresses buffers as Arrow does: the length, and a frame; or -1 and the bytes as they are, if a
 * frame would not be smaller.
 */
abstract class BufferCompressor implements AutoCloseable {
  private static final long STORED = -1;

  /**
   * Makes a compressor.
   *
   * @param compression "lz4" or "zstd"
   */
  static BufferCompressor of(String compression) {
    return switch (compression) {
      case "lz4" -> new Lz4();
      case "zstd" -> new Zstandard();
      default -> throw new IllegalArgumentException("There is no compression " + compression);
    };
  }

  /** Returns Arrow's number of the compression. */
  abstract byte codec();

  /** Returns how many bytes a frame of so many bytes takes at most. */
  protected abstract long maxFrame(int length);

  /** Writes a frame to target from {@code at} on, and returns its length. */
  protected abstract int writeFrame(
      ByteBuffer source, int begin, int length, ByteBuffer target, int at);

  @Override
  public abstract void close();

  /** Returns how many bytes a buffer of so many bytes takes at most while it is compressed. */
  final long maxSize(int length) {
    return length == 0 ? 0 : Long.BYTES + Math.max(maxFrame(length), length);
  }

  /**
   * Compresses the bytes [begin, begin + length) of memory to target from {@code at} on.
   *
   * @return how many bytes that takes
   */
  final int compress(ByteBuffer source, int begin, int length, ByteBuffer target, int at) {
    int frame = writeFrame(source, begin, length, target, at + Long.BYTES);
    if (frame < length) {
      target.putLong(at, length);
      return Long.BYTES + frame;
    }
    target.putLong(at, STORED);
    target.put(at + Long.BYTES, source, begin, length);
    return Long.BYTES + length;
  }

  private static final class Zstandard extends BufferCompressor {
    /** Arrow's level, too: the fastest. */
    private static final int LEVEL = 1;

    private final ZstdCompressCtx context = new ZstdCompressCtx().setLevel(LEVEL);

    @Override
    byte codec() {
      return CompressionType.ZSTD;
    }

    @Override
    protected long maxFrame(int length) {
      return com.github.luben.zstd.Zstd.compressBound(length);
    }

    @Override
    protected int writeFrame(ByteBuffer source, int begin, int length, ByteBuffer target, int at) {
      int room = target.capacity() - at;
      return context.compressDirectByteBuffer(target, at, room, source, begin, length);
    }

    @Override
    public void close() {
      context.close();
    }
  }

  /**
   * Frames of independent blocks.
   *
   * <p>Spark's own stream of frames allocates megabytes for each of them; so would a reader for
   * blocks that are as large as they may be.
   */
  private static final class Lz4 extends BufferCompressor {
    private static final int MAGIC = 0x184D2204;
    private static final byte VERSION_AND_INDEPENDENT_BLOCKS = 0x60;

    /** Four bits: blocks of up to 64 KiB, or of up to 256 KiB. */
    private static final byte SMALL_BLOCKS = 0x40;

    private static final byte LARGE_BLOCKS = 0x50;
    private static final int SMALL_BLOCK = 1 << 16;
    private static final int LARGE_BLOCK = 1 << 18;
    private static final int STORED_BLOCK = 1 << 31;
    private static final int HEADER_BYTES = 7;

    private final LZ4Compressor compressor = LZ4Factory.fastestInstance().fastCompressor();

    @Override
    byte codec() {
      return CompressionType.LZ4_FRAME;
    }

    @Override
    protected long maxFrame(int length) {
      long blocks = length / LARGE_BLOCK + 1L;
      return HEADER_BYTES
          + blocks * (Integer.BYTES + compressor.maxCompressedLength(Math.min(length, LARGE_BLOCK)))
          + Integer.BYTES;
    }

    @Override
    protected int writeFrame(ByteBuffer source, int begin, int length, ByteBuffer target, int at) {
      boolean small = length <= SMALL_BLOCK;
      byte[] descriptor = {VERSION_AND_INDEPENDENT_BLOCKS, small ? SMALL_BLOCKS : LARGE_BLOCKS};
      int hash = XXHashFactory.fastestInstance().hash32().hash(descriptor, 0, 2, 0);
      ByteBuffer frame = target.duplicate().order(ByteOrder.LITTLE_ENDIAN).position(at);
      frame.putInt(MAGIC).put(descriptor).put((byte) (hash >> 8));
      int block = small ? SMALL_BLOCK : LARGE_BLOCK;
      for (int done = 0; done < length; done += block) {
        writeBlock(source, begin + done, Math.min(block, length - done), frame);
      }
      frame.putInt(0);
      return frame.position() - at;
    }

    private void writeBlock(ByteBuffer source, int begin, int length, ByteBuffer frame) {
      int data = frame.position() + Integer.BYTES;
      int room = frame.capacity() - data;
      int size = compressor.compress(source, begin, length, frame, data, room);
      if (size < length) {
        frame.putInt(size);
      } else {
        frame.putInt(length | STORED_BLOCK).put(data, source, begin, length);
        size = length;
      }
      frame.position(data + size);
    }

    @Override
    public void close() {}
  }
}
