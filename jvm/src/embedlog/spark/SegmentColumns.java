package embedlog.spark;

import java.nio.ByteBuffer;
import java.util.ArrayList;
import java.util.Base64;
import java.util.List;
import java.util.Optional;
import java.util.function.Predicate;
import org.apache.arrow.vector.types.pojo.Field;
import org.apache.arrow.vector.types.pojo.Schema;

/**
 * The columns of the segments of a typed topic in one version of its schema.
 *
 * <p>They come with the plan, not from the file: no checksum covers the schema of a file.
 */
final class SegmentColumns implements BatchLayouts {
  private static final String TOMBSTONE = "_tombstone";
  private static final String HEADERS = "_headers";
  private static final String OFFSET = "_offset";
  private static final String TIME = "embedlog.timestamp";
  private static final String FIELD_ID = "PARQUET:field_id";
  private static final int COLUMN_FLAGS =
      BatchFormat.HEADERS | BatchFormat.TOMBSTONES | BatchFormat.EXPLICIT_OFFSETS;

  private final List<Field> fields;
  private final String time;
  private final BatchLayout[] layouts = new BatchLayout[COLUMN_FLAGS + 1];

  private SegmentColumns(Schema schema) {
    fields = schema.getFields();
    time = schema.getCustomMetadata().get(TIME);
  }

  /** Reads a schema with all columns that a segment may have: Arrow's message, in Base64. */
  static SegmentColumns parse(String message) {
    ByteBuffer bytes = ByteBuffer.wrap(Base64.getDecoder().decode(message));
    return new SegmentColumns(Schema.deserializeMessage(bytes));
  }

  @Override
  public boolean accepts(int flags) {
    return (flags & ~(BatchFormat.FREE_FLAGS | COLUMN_FLAGS)) == BatchFormat.TYPED;
  }

  @Override
  public BatchLayout of(int flags) {
    int number = flags & COLUMN_FLAGS;
    if (layouts[number] == null) {
      BatchLayout.Builder columns = new BatchLayout.Builder();
      for (Field field : fields(number)) {
        columns.add(field.getName(), VectorFactory.nodes(field), VectorFactory.buffers(field));
      }
      layouts[number] = columns.build();
    }
    return layouts[number];
  }

  private List<Field> fields(int flags) {
    List<Field> present = new ArrayList<>(fields);
    present.removeIf(
        field ->
            switch (field.getName()) {
              case TOMBSTONE -> (flags & BatchFormat.TOMBSTONES) == 0;
              case HEADERS -> (flags & BatchFormat.HEADERS) == 0;
              case OFFSET -> (flags & BatchFormat.EXPLICIT_OFFSETS) == 0;
              default -> false;
            });
    return present;
  }

  /** A column of a batch, with what is stored in it. */
  record Column(StoredColumn place, Field field) {}

  /** Returns a column of the user's own by its field id; nothing if the version lacks it. */
  Optional<Column> byId(int flags, int id) {
    String text = Integer.toString(id);
    return find(flags, field -> text.equals(field.getMetadata().get(FIELD_ID)));
  }

  /** Returns the column with the timestamps of the records. */
  Column time(int flags) {
    return find(flags, field -> field.getName().equals(time)).orElseThrow();
  }

  /** Returns the column that says which rows are tombstones; nothing if none is. */
  Optional<Column> tombstones(int flags) {
    return find(flags, field -> field.getName().equals(TOMBSTONE));
  }

  /** Returns the column of headers; nothing if no record has any. */
  Optional<Column> headers(int flags) {
    return find(flags, field -> field.getName().equals(HEADERS));
  }

  private Optional<Column> find(int flags, Predicate<Field> condition) {
    List<Field> present = fields(flags);
    for (int number = 0; number < present.size(); number++) {
      if (condition.test(present.get(number))) {
        return Optional.of(new Column(of(flags).column(number), present.get(number)));
      }
    }
    return Optional.empty();
  }
}
