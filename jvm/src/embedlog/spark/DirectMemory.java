package embedlog.spark;

import java.lang.reflect.Field;
import java.lang.reflect.Method;
import java.nio.Buffer;
import java.nio.ByteBuffer;
import java.nio.ByteOrder;

/**
 * Bytes outside of Java's heap, which the kernel reads into and Spark reads by address.
 *
 * <p>Files are read and not mapped: a map of a file that is truncated meanwhile would kill the JVM
 * when a checksum or a decompressor touches it. A read that stays in the processor's cache costs no
 * more than the page faults of a map.
 */
final class DirectMemory implements AutoCloseable {
  private static final Object UNSAFE;
  private static final Method INVOKE_CLEANER;
  private static final long ADDRESS_FIELD;

  static {
    // By reflection: the compiler warns of this class, and Java has no other way to free memory.
    try {
      Class<?> unsafe = Class.forName("sun.misc.Unsafe");
      Field instance = unsafe.getDeclaredField("theUnsafe");
      instance.setAccessible(true);
      UNSAFE = instance.get(null);
      INVOKE_CLEANER = unsafe.getMethod("invokeCleaner", ByteBuffer.class);
      Method fieldOffset = unsafe.getMethod("objectFieldOffset", Field.class);
      ADDRESS_FIELD = (long) fieldOffset.invoke(UNSAFE, Buffer.class.getDeclaredField("address"));
    } catch (ReflectiveOperationException error) {
      throw new ExceptionInInitializerError(error);
    }
  }

  private ByteBuffer buffer = ByteBuffer.allocateDirect(0);
  private long address;

  /** Makes it hold at least so many bytes; moves the first {@code keep} bytes if it must grow. */
  void reserve(int capacity, int keep) {
    if (capacity <= buffer.capacity()) {
      return;
    }
    ByteBuffer larger = ByteBuffer.allocateDirect(capacity).order(ByteOrder.LITTLE_ENDIAN);
    larger.put(0, buffer, 0, keep);
    close();
    buffer = larger;
    address = org.apache.spark.unsafe.Platform.getLong(buffer, ADDRESS_FIELD);
  }

  /** Returns the bytes; valid until they grow. */
  ByteBuffer buffer() {
    return buffer;
  }

  /** Returns the address of the first byte; valid until they grow. */
  long address() {
    return address;
  }

  /** Frees the memory now; the garbage collector might do it much later. */
  @Override
  public void close() {
    if (buffer.capacity() > 0) {
      try {
        INVOKE_CLEANER.invoke(UNSAFE, buffer);
      } catch (ReflectiveOperationException error) {
        throw new IllegalStateException(error);
      }
    }
    buffer = ByteBuffer.allocateDirect(0);
    address = 0;
  }
}
