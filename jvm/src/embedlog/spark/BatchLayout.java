package embedlog.spark;

import java.util.ArrayList;
import java.util.List;

/** The columns of a batch, in their order; the same object for all batches with these columns. */
final class BatchLayout {
  private final StoredColumn[] columns;
  private final int nodes;
  private final int buffers;

  private BatchLayout(List<StoredColumn> columns, int nodes, int buffers) {
    this.columns = columns.toArray(StoredColumn[]::new);
    this.nodes = nodes;
    this.buffers = buffers;
  }

  /** Returns a column by its number. */
  StoredColumn column(int number) {
    return columns[number];
  }

  /** Returns the last column, which holds the offsets of a batch that has them. */
  StoredColumn last() {
    return columns[columns.length - 1];
  }

  /** Returns how many columns there are. */
  int size() {
    return columns.length;
  }

  /** Returns how many nodes all columns have. */
  int nodes() {
    return nodes;
  }

  /** Returns how many buffers all columns have. */
  int buffers() {
    return buffers;
  }

  /** Adds up the columns before each column. */
  static final class Builder {
    private final List<StoredColumn> columns = new ArrayList<>();
    private int nodes;
    private int buffers;

    /** Adds a column behind those so far. */
    Builder add(String name, int itsNodes, int itsBuffers) {
      columns.add(new StoredColumn(name, columns.size(), nodes, itsNodes, buffers, itsBuffers));
      nodes += itsNodes;
      buffers += itsBuffers;
      return this;
    }

    BatchLayout build() {
      return new BatchLayout(columns, nodes, buffers);
    }
  }
}
