package embedlog.spark;

import org.apache.spark.sql.vectorized.ColumnarBatch;

/** The columns that a query wants of batches, over the bytes of the batch that is read. */
interface TaskColumns {
  /** Sets what all batches of a slice have in common. */
  void begin(PartitionSlice slice);

  /**
   * Returns the columns that the batches of a file have.
   *
   * @throws EmbedlogException if they are not those of the query's kind of topic
   */
  BatchLayouts layouts(PartitionSlice slice, FileChunk chunk);

  /**
   * Returns the columns to read from a batch.
   *
   * @param head the batch
   * @param partial whether only some of its offsets are wanted
   */
  StoredColumn[] stored(BatchHead head, boolean partial);

  /**
   * Goes on with another batch.
   *
   * @param head the batch
   * @param body its columns, of which at least those of {@link #stored} were read
   * @throws DamagedBatchException if a column is not as it was written
   */
  void load(BatchHead head, BatchBody body) throws DamagedBatchException;

  /**
   * Returns the rows that the query leaves out: a bit for each row of the batch.
   *
   * @return the address of the bits; 0 if it leaves out none
   */
  long leftOut();

  /**
   * Shows the rows [first, last) of the batch.
   *
   * @throws DamagedBatchException if a column is not as it was written
   */
  ColumnarBatch show(int first, int last) throws DamagedBatchException;
}
