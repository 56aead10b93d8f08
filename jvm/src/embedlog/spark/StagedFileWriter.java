package embedlog.spark;

import java.io.IOException;
import java.nio.ByteBuffer;
import java.nio.channels.FileChannel;
import java.nio.file.AccessDeniedException;
import java.nio.file.FileAlreadyExistsException;
import java.nio.file.Files;
import java.nio.file.NoSuchFileException;
import java.nio.file.Path;
import java.nio.file.StandardOpenOption;
import java.nio.file.attribute.PosixFilePermissions;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;

/**
 * Writes the finished batches of one task to a file that is not part of the log yet.
 *
 * <p>The file is not flushed: the publication copies it, and flushes the copy. It may be removed at
 * any time, and is removed later if its process is killed.
 */
final class StagedFileWriter {
  /** A directory that is empty may be removed by another write before this one uses it. */
  private static final int ATTEMPTS = 10;

  /** The bit of a directory that {@code Log.share} sets. */
  private static final int SET_GROUP_ID = 02000;

  private final Path root;
  private final String directory;
  private final String path;
  private final Map<StagedRows.Partition, Integer> partitions = new LinkedHashMap<>();
  private final List<StagedRows.Batch> batches = new ArrayList<>();
  private FileChannel file;
  private long position;
  private long records;

  /**
   * Makes a writer, but no file before there is a batch.
   *
   * @param plan says where the files of the write are
   * @param name the name of the file, which no other attempt of any task has
   */
  StagedFileWriter(WritePlan plan, String name) {
    this.root = Path.of(plan.root());
    this.directory = plan.directory();
    this.path = directory + "/" + name;
  }

  /**
   * Writes a batch; those of a partition keep their order.
   *
   * @throws EmbedlogException if that is not possible; then the caller must call {@code abandon}
   */
  void add(
      TargetTopic topic,
      int partition,
      ByteBuffer head,
      ByteBuffer body,
      boolean headers,
      int count) {
    if (file == null) {
      file = create();
    }
    int size = head.remaining() + body.remaining();
    StagedRows.Partition target = new StagedRows.Partition(topic.name(), topic.id(), partition);
    Integer index = partitions.putIfAbsent(target, partitions.size());
    int number = index == null ? partitions.size() - 1 : index;
    batches.add(new StagedRows.Batch(number, position, size, headers));
    ByteBuffer[] buffers = {head, body};
    try {
      while (body.hasRemaining()) {
        file.write(buffers);
      }
    } catch (IOException error) {
      throw failed("write", error);
    }
    position += size;
    records += count;
  }

  private FileChannel create() {
    if (Files.notExists(root.resolve("embedlog.toml"))) {
      throw EmbedlogException.noLogOnHost(root.toString());
    }
    IOException problem = null;
    for (int attempt = 0; attempt < ATTEMPTS; attempt++) {
      try {
        int mode = makeDirectories();
        Path created = root.resolve(path);
        FileChannel channel =
            FileChannel.open(
                created,
                Set.of(StandardOpenOption.WRITE, StandardOpenOption.CREATE_NEW),
                PosixFilePermissions.asFileAttribute(PosixFilePermissions.fromString("rw-------")));
        share(created, mode, 0666);
        return channel;
      } catch (NoSuchFileException error) {
        problem = error;
      } catch (IOException error) {
        problem = error;
        break;
      }
    }
    if (problem instanceof AccessDeniedException) {
      throw EmbedlogException.noPermission(Path.of(problem.getMessage()));
    }
    throw failed("open", problem);
  }

  /** Makes the directories, with the permissions of the first one, which it returns. */
  private int makeDirectories() throws IOException {
    Path parent = root;
    int mode = 0700;
    for (String name : directory.split("/")) {
      parent = parent.resolve(name);
      if (!Files.isDirectory(parent)) {
        try {
          Files.createDirectory(
              parent,
              PosixFilePermissions.asFileAttribute(PosixFilePermissions.fromString("rwx------")));
          share(parent, mode, 07777);
        } catch (FileAlreadyExistsException another) {
          // Another task made it.
          continue;
        }
      }
      mode = (Integer) Files.getAttribute(parent, "unix:mode") & 07777;
    }
    return mode;
  }

  /** Gives a file or directory the permissions of its directory, if that is shared. */
  private static void share(Path path, int mode, int mask) throws IOException {
    if ((mode & SET_GROUP_ID) != 0) {
      Files.setAttribute(path, "unix:mode", mode & mask);
    }
  }

  private EmbedlogException failed(String operation, IOException error) {
    String reason = String.valueOf(error.getMessage());
    // Java has no other word for it.
    boolean isFull =
        reason.contains("No space left on device") || reason.contains("Disk quota exceeded");
    return new EmbedlogException(
        isFull ? "DiskFullError" : "StorageError",
        String.format("%s failed: %s [%s]", operation, reason, root.resolve(path)));
  }

  /**
   * Closes the file, and returns what is in it.
   *
   * @param task the number of the task
   * @param placedByKey see {@link StagedRows}
   */
  StagedRows finish(int task, boolean placedByKey) {
    boolean isStaged = file != null;
    try {
      close();
    } catch (IOException error) {
      throw failed("close", error);
    }
    return new StagedRows(
        task,
        isStaged ? path : "",
        List.copyOf(partitions.keySet()),
        List.copyOf(batches),
        records,
        placedByKey);
  }

  /** Removes the file; if that fails, it is removed with what other processes left behind. */
  void abandon() throws IOException {
    if (file != null) {
      close();
      Files.deleteIfExists(root.resolve(path));
    }
  }

  private void close() throws IOException {
    if (file != null) {
      file.close();
    }
  }
}
