package embedlog.spark;

/** Which columns the batches of a segment have, by the flags in their heads. */
interface BatchLayouts {
  /** Whether a batch may have these flags. */
  boolean accepts(int flags);

  /** Returns the columns of batches with some of these flags. */
  BatchLayout of(int flags);
}
