package embedlog.spark;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.channels.ClosedChannelException;
import java.nio.channels.FileChannel;
import java.nio.file.AccessDeniedException;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.util.List;
import org.slf4j.Logger;
import org.slf4j.LoggerFactory;

/** A segment file, which is read in the next directory that has it if one fails. */
final class SegmentFile implements AutoCloseable {
  private static final Logger LOGGER = LoggerFactory.getLogger("embedlog.spark");

  private final PartitionSlice slice;
  private final FileChunk chunk;
  private final List<Path> roots;

  /** The number of the root that is read. */
  private int number = -1;

  /** How many roots are left to try. */
  private int left;

  /** Where damage was found last. */
  private long damagedAt = -1;

  private Exception failure;
  private Path root;
  private FileChannel channel;

  /**
   * Opens the file.
   *
   * @param roots the log roots that have it, in the order to try them
   * @param slice what is read of the partition
   * @param chunk what is read of the file
   * @throws DataLossException if it was deleted
   */
  SegmentFile(List<Path> roots, PartitionSlice slice, FileChunk chunk) throws IOException {
    this.slice = slice;
    this.chunk = chunk;
    this.roots = roots;
    this.left = roots.size();
    openNext();
  }

  /** Opens the file in the next directory where that is possible. */
  private void openNext() throws IOException {
    while (left > 0) {
      left--;
      number = (number + 1) % roots.size();
      root = roots.get(number);
      try {
        channel = FileChannel.open(root.resolve(chunk.path()), StandardOpenOption.READ);
        long size = channel.size();
        if (size >= chunk.endPosition() || left == 0) {
          return;
        }
        channel.close();
        note(new IOException("The copy is being made again, and ends at byte " + size));
      } catch (IOException error) {
        note(problem(error));
      }
    }
    if (failure instanceof IOException error) {
      throw error;
    }
    throw (RuntimeException) failure;
  }

  /**
   * Goes on in the next directory, because the bytes here are damaged.
   *
   * @param damage what is wrong
   * @param position where; the directories before this one may be whole there
   * @return false if there is no other directory
   */
  boolean openAnother(EmbedlogException damage, long position) throws IOException {
    if (position != damagedAt) {
      damagedAt = position;
      left = roots.size() - 1;
    }
    if (left == 0) {
      return false;
    }
    note(damage);
    channel.close();
    openNext();
    return true;
  }

  /** Returns what an error of the system means. */
  private Exception problem(IOException error) {
    Path path = root.resolve(chunk.path());
    if (error instanceof AccessDeniedException) {
      return EmbedlogException.noPermission(path);
    }
    // A remote file system has other errors for a file that the log's host deletes.
    boolean isGone =
        error instanceof NoSuchFileException
            || String.valueOf(error.getMessage()).contains("Stale file handle")
            || Files.notExists(path);
    if (!isGone) {
      return error;
    }
    return Files.exists(root.resolve("embedlog.toml"))
        ? new DataLossException(
            "The file " + chunk.path() + " was deleted after the query was planned", slice)
        : EmbedlogException.noLogOnHost(root.toString());
  }

  /** Keeps an error to throw if no directory is left. */
  private void note(Exception error) {
    // That a file is missing says the least: retention may have deleted all copies.
    if (failure == null || failure instanceof DataLossException) {
      failure = error;
    }
    if (left > 0) {
      LOGGER.warn("Reading {} in another directory: {}", chunk.path(), error.toString());
    }
  }

  /** Reads bytes from a position on, as {@link FileChannel#read(ByteBuffer, long)} does. */
  int read(ByteBuffer target, long position) throws IOException {
    while (true) {
      try {
        return channel.read(target, position);
      } catch (ClosedChannelException error) {
        throw error; // The task was ended, which is no failure of the directory.
      } catch (IOException error) {
        note(problem(error));
        channel.close();
        openNext();
      }
    }
  }

  /** Returns how many bytes the file has. */
  long size() throws IOException {
    return channel.size();
  }

  @Override
  public void close() throws IOException {
    channel.close();
  }
}
