package embedlog.spark;

/** Which columns the batches of a segment have, by the flags in their heads. */
interface BatchLayouts {
  /** Returns the flags that a batch may have. */
  int knownFlags();

  /** Returns the columns of batches with some of these flags. */
  BatchLayout of(int flags);
}
