package embedlog.spark;

import java.io.Serializable;
import java.util.List;

/**
 * The offsets [fromOffset, untilOffset) of one partition of the log, and the files with them.
 *
 * @param topic the topic
 * @param partition the partition of the topic
 * @param fromOffset the first offset to read
 * @param untilOffset the offset after the last one to read
 * @param leaderEpoch the log's epoch when this was planned: batches of a later epoch are not part
 *     of the plan
 * @param chunks the files, in the order of their offsets
 * @param directories the log roots with the files, in a log of several directories: that of the
 *     leader comes first, and the others are read if it fails
 */
record PartitionSlice(
    String topic,
    int partition,
    long fromOffset,
    long untilOffset,
    long leaderEpoch,
    List<FileChunk> chunks,
    List<String> directories)
    implements Serializable {}
