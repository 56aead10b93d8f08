package embedlog.spark;

import com.github.luben.zstd.Zstd;
import java.io.ByteArrayInputStream;
import java.io.IOException;
import java.io.InputStream;
import java.nio.ByteBuffer;
import net.jpountz.lz4.LZ4FrameInputStream;
import org.apache.arrow.flatbuf.CompressionType;

/** Decompresses buffers with the codecs of Arrow, by the libraries that Spark brings. */
final class BufferDecompressor {
  private byte[] compressed = new byte[0];
  private byte[] raw = new byte[0];

  /**
   * Decompresses one buffer.
   *
   * @param codec Arrow's number of the codec
   * @param source the memory with the compressed bytes [begin, begin + length)
   * @param target the memory for exactly {@code size} bytes from {@code at} on
   * @throws DamagedBatchException if the bytes decompress to anything else
   */
  void decompress(
      byte codec, ByteBuffer source, int begin, int length, ByteBuffer target, int at, int size)
      throws DamagedBatchException {
    boolean complete;
    switch (codec) {
      case CompressionType.ZSTD ->
          complete =
              Zstd.decompressDirectByteBuffer(target, at, size, source, begin, length) == size;
      case CompressionType.LZ4_FRAME -> complete = lz4(source, begin, length, target, at, size);
      default -> throw new DamagedBatchException("it has the unknown compression " + codec);
    }
    if (!complete) {
      throw new DamagedBatchException("a buffer does not decompress to its " + size + " bytes");
    }
  }

  private boolean lz4(
      ByteBuffer source, int begin, int length, ByteBuffer target, int at, int size) {
    compressed = atLeast(compressed, length);
    raw = atLeast(raw, size);
    source.get(begin, compressed, 0, length);
    try (InputStream frame =
        new LZ4FrameInputStream(new ByteArrayInputStream(compressed, 0, length))) {
      if (frame.readNBytes(raw, 0, size) != size || frame.read() >= 0) {
        return false;
      }
    } catch (IOException | RuntimeException error) {
      return false;
    }
    target.put(at, raw, 0, size);
    return true;
  }

  private static byte[] atLeast(byte[] array, int length) {
    return array.length >= length ? array : new byte[Integer.highestOneBit(length) * 2];
  }
}
