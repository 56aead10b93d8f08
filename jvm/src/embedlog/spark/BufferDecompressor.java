package embedlog.spark;

import com.github.luben.zstd.Zstd;
import com.github.luben.zstd.ZstdException;
import java.nio.ByteBuffer;
import org.apache.arrow.flatbuf.CompressionType;

/** Decompresses buffers with the codecs of Arrow, by the libraries that Spark brings. */
final class BufferDecompressor {
  /** Made when it is needed: it loads a native library. */
  private Lz4Frame lz4;

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
      case CompressionType.ZSTD -> complete = zstd(source, begin, length, target, at, size);
      case CompressionType.LZ4_FRAME ->
          complete = lz4().decompress(source, begin, length, target, at, size);
      default -> throw new DamagedBatchException("it has the unknown compression " + codec);
    }
    if (!complete) {
      throw new DamagedBatchException("a buffer does not decompress to its " + size + " bytes");
    }
  }

  private static boolean zstd(
      ByteBuffer source, int begin, int length, ByteBuffer target, int at, int size) {
    try {
      return Zstd.decompressDirectByteBuffer(target, at, size, source, begin, length) == size;
    } catch (ZstdException error) {
      // Which versions of the library throw, and which return a code, differs.
      return false;
    }
  }

  private Lz4Frame lz4() {
    if (lz4 == null) {
      lz4 = new Lz4Frame();
    }
    return lz4;
  }
}
