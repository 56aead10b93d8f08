package embedlog.spark;

/** The columns of batches whose keys and values are bytes. */
final class BytesLayouts implements BatchLayouts {
  static final BytesLayouts INSTANCE = new BytesLayouts();

  private final BatchLayout[] layouts = new BatchLayout[4];

  private BytesLayouts() {
    for (int number = 0; number < layouts.length; number++) {
      BatchLayout.Builder columns = new BatchLayout.Builder();
      columns.add("timestamp", 1, 2).add("key", 1, 3).add("value", 1, 3);
      if ((number & 1) != 0) {
        columns.add("headers", 4, 9);
      }
      if ((number & 2) != 0) {
        columns.add("offset", 1, 2);
      }
      layouts[number] = columns.build();
    }
  }

  @Override
  public boolean accepts(int flags) {
    int columns = BatchFormat.HEADERS | BatchFormat.EXPLICIT_OFFSETS;
    return (flags & ~(BatchFormat.FREE_FLAGS | columns)) == 0;
  }

  @Override
  public BatchLayout of(int flags) {
    int headers = (flags & BatchFormat.HEADERS) == 0 ? 0 : 1;
    int offsets = (flags & BatchFormat.EXPLICIT_OFFSETS) == 0 ? 0 : 2;
    return layouts[headers | offsets];
  }
}
