package embedlog.spark;

import java.io.Serializable;

/**
 * A part of one segment file.
 *
 * @param path the file, relative to the log root
 * @param sealed whether the file will not change any more
 * @param headers whether its batches have a column of headers
 * @param position where to start to read; 0 is the first batch
 * @param endPosition where to end
 * @param schemaVersion which version of the topic's schema its batches have; 0 for bytes
 */
record FileChunk(
    String path,
    boolean sealed,
    boolean headers,
    long position,
    long endPosition,
    int schemaVersion)
    implements Serializable {}
