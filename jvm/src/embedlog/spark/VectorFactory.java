package embedlog.spark;

import java.util.List;
import org.apache.arrow.vector.types.FloatingPointPrecision;
import org.apache.arrow.vector.types.TimeUnit;
import org.apache.arrow.vector.types.pojo.ArrowType;
import org.apache.arrow.vector.types.pojo.Field;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.BinaryType;
import org.apache.spark.sql.types.BooleanType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DateType;
import org.apache.spark.sql.types.DayTimeIntervalType;
import org.apache.spark.sql.types.DecimalType;
import org.apache.spark.sql.types.IntegralType;
import org.apache.spark.sql.types.LongType;
import org.apache.spark.sql.types.MapType;
import org.apache.spark.sql.types.NumericType;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.types.TimestampNTZType;
import org.apache.spark.sql.types.TimestampType;
import org.apache.spark.sql.vectorized.ColumnVector;

/**
 * Makes the vector that shows a stored column with the type that the query has for it.
 *
 * <p>The column may be of another version of the schema: narrower than the query's type, or wider,
 * if the schema has changed since the query began. It walks through the types as Arrow numbers
 * nodes and buffers, each before what is inside of it.
 */
final class VectorFactory {
  private static final long DAY = 86_400_000_000L;

  private final DamagedValues damaged;
  private int node;
  private int buffer;

  private VectorFactory(StoredColumn column, DamagedValues damaged) {
    this.damaged = damaged;
    node = column.firstNode();
    buffer = column.firstBuffer();
  }

  /**
   * Makes a vector.
   *
   * @param column where the column is
   * @param field what is stored in it
   * @param type the type that the query has for it
   * @param damaged makes the error for a damaged value
   * @throws EmbedlogException if it cannot be read as that type
   */
  static StoredVector of(StoredColumn column, Field field, DataType type, DamagedValues damaged) {
    return new VectorFactory(column, damaged).vector(column.name(), field, type);
  }

  /** Returns how many nodes a column has. */
  static int nodes(Field field) {
    return 1 + field.getChildren().stream().mapToInt(VectorFactory::nodes).sum();
  }

  /** Returns how many buffers a column has. */
  static int buffers(Field field) {
    int inside = field.getChildren().stream().mapToInt(VectorFactory::buffers).sum();
    return inside + ownBuffers(field.getType());
  }

  private static int ownBuffers(ArrowType type) {
    return switch (type.getTypeID()) {
      case Struct, FixedSizeList -> 1;
      case Utf8, Binary -> 3;
      case Bool, Int, FloatingPoint, Decimal, FixedSizeBinary -> 2;
      case Date, Time, Timestamp, Duration, List, Map -> 2;
      default -> throw unknown(type);
    };
  }

  private static EmbedlogException unknown(ArrowType type) {
    return new EmbedlogException(
        "UnsupportedFormatError",
        "A column of Arrow's type " + type + " cannot be read. Use a newer embedlog.");
  }

  /** Makes the next vector; passes over one that the query does not have, whose type is null. */
  private StoredVector vector(String name, Field field, DataType type) {
    final VectorPlace place = new VectorPlace(name, node, buffer, damaged);
    ArrowType stored = field.getType();
    node++;
    buffer += ownBuffers(stored);
    List<Field> inside = field.getChildren();
    StoredVector vector =
        switch (stored.getTypeID()) {
          case List, FixedSizeList ->
              list(place, field, type instanceof ArrayType list ? list : null);
          case Map -> map(place, inside.get(0), type instanceof MapType map ? map : null);
          case Struct -> struct(place, field, type instanceof StructType struct ? struct : null);
          default -> type == null ? null : plain(place, stored, type);
        };
    if (vector == null && type != null) {
      throw new EmbedlogException(
          "InvalidSchemaError",
          String.format(
              "Column %s is stored as %s, which cannot be read as %s. Load the topic again, or"
                  + " restart the query: its schema has changed.",
              name, stored, type.sql()));
    }
    return vector;
  }

  private StoredVector list(VectorPlace place, Field field, ArrayType type) {
    DataType itemType = type == null ? null : type.elementType();
    StoredVector items = vector(place.column() + "[]", field.getChildren().get(0), itemType);
    if (type == null) {
      return null;
    }
    return field.getType() instanceof ArrowType.FixedSizeList fixed
        ? new FixedListVector(type, place, items, fixed.getListSize())
        : new ListVector(type, place, items);
  }

  private StoredVector map(VectorPlace place, Field entries, MapType type) {
    final VectorPlace ofEntries = new VectorPlace(place.column() + "[]", node, buffer, damaged);
    node++;
    buffer += ownBuffers(entries.getType());
    DataType keyType = type == null ? null : type.keyType();
    DataType valueType = type == null ? null : type.valueType();
    StoredVector keys = vector(place.column() + ".key", entries.getChildren().get(0), keyType);
    StoredVector values =
        vector(place.column() + ".value", entries.getChildren().get(1), valueType);
    if (type == null) {
      return null;
    }
    StructType pair = new StructType().add("key", keyType).add("value", valueType);
    ColumnVector[] fields = {keys, values};
    return new ListVector(type, place, new StructVector(pair, ofEntries, fields));
  }

  /** Finds the fields of a struct by their names: another version may have others. */
  private StoredVector struct(VectorPlace place, Field field, StructType type) {
    ColumnVector[] fields = new ColumnVector[type == null ? 0 : type.size()];
    for (Field stored : field.getChildren()) {
      int ordinal = type == null ? -1 : List.of(type.fieldNames()).indexOf(stored.getName());
      DataType wanted = ordinal < 0 ? null : type.fields()[ordinal].dataType();
      StoredVector vector = vector(place.column() + "." + stored.getName(), stored, wanted);
      if (ordinal >= 0) {
        fields[ordinal] = vector;
      }
    }
    if (type == null) {
      return null;
    }
    for (int ordinal = 0; ordinal < fields.length; ordinal++) {
      if (fields[ordinal] == null) {
        StructField absent = type.fields()[ordinal];
        fields[ordinal] = new AbsentVector(absent.dataType());
      }
    }
    return new StructVector(type, place, fields);
  }

  /** Makes a vector of a column that has no other ones inside; null if the types do not agree. */
  private static StoredVector plain(VectorPlace place, ArrowType stored, DataType type) {
    boolean isTimestamp = type instanceof TimestampType || type instanceof TimestampNTZType;
    boolean isInterval = type instanceof DayTimeIntervalType;
    if (stored instanceof ArrowType.Bool && type instanceof BooleanType) {
      return new BooleanVector(place);
    } else if (stored instanceof ArrowType.Int integer && type instanceof NumericType) {
      int width = integer.getBitWidth() / Byte.SIZE;
      return new IntegerVector(type, place, width, integer.getIsSigned(), IntegerScale.NONE);
    } else if (stored instanceof ArrowType.FloatingPoint number
        && type instanceof NumericType
        && !(type instanceof DecimalType)) {
      return new FloatVector(type, place, width(number.getPrecision()));
    } else if (stored instanceof ArrowType.Decimal decimal
        && (type instanceof DecimalType || type instanceof IntegralType)) {
      return new DecimalVector(type, place, decimal.getBitWidth() / Byte.SIZE, decimal.getScale());
    } else if (stored instanceof ArrowType.Utf8 && type instanceof StringType
        || stored instanceof ArrowType.Binary && type instanceof BinaryType) {
      return new BytesVector(type, place);
    } else if (stored instanceof ArrowType.FixedSizeBinary fixed && type instanceof BinaryType) {
      return new FixedBytesVector(place, fixed.getByteWidth());
    } else if (stored instanceof ArrowType.Date && type instanceof DateType) {
      return new IntegerVector(type, place, Integer.BYTES, true, IntegerScale.NONE);
    } else if (stored instanceof ArrowType.Date && isTimestamp) {
      return new IntegerVector(type, place, Integer.BYTES, true, new IntegerScale(1, DAY, false));
    } else if (stored instanceof ArrowType.Timestamp timestamp && type instanceof DateType) {
      // The column was of dates when the query began.
      return longs(type, place, new IntegerScale(perSecond(timestamp.getUnit()) * 86_400, 1, true));
    } else if (stored instanceof ArrowType.Timestamp timestamp) {
      return time(place, Long.BYTES, timestamp.getUnit(), isTimestamp, type);
    } else if (stored instanceof ArrowType.Duration duration) {
      return time(place, Long.BYTES, duration.getUnit(), isInterval, type);
    } else if (stored instanceof ArrowType.Time time) {
      return time(place, time.getBitWidth() / Byte.SIZE, time.getUnit(), isInterval, type);
    }
    return null;
  }

  /** Makes a vector of microseconds, or of nanoseconds as they are if the query wants numbers. */
  private static StoredVector time(
      VectorPlace place, int width, TimeUnit unit, boolean isTime, DataType type) {
    boolean isNumber = type instanceof LongType && unit == TimeUnit.NANOSECOND;
    if (!isTime && !isNumber) {
      return null;
    }
    IntegerScale scale = isNumber ? IntegerScale.NONE : toMicroseconds(unit);
    return new IntegerVector(type, place, width, true, scale);
  }

  private static StoredVector longs(DataType type, VectorPlace place, IntegerScale scale) {
    return new IntegerVector(type, place, Long.BYTES, true, scale);
  }

  private static int width(FloatingPointPrecision precision) {
    return switch (precision) {
      case HALF -> Short.BYTES;
      case SINGLE -> Float.BYTES;
      case DOUBLE -> Double.BYTES;
    };
  }

  private static long perSecond(TimeUnit unit) {
    return switch (unit) {
      case SECOND -> 1L;
      case MILLISECOND -> 1000L;
      case MICROSECOND -> 1_000_000L;
      case NANOSECOND -> 1_000_000_000L;
    };
  }

  /** Returns the scale to Spark's microseconds; finer times are none of its. */
  static IntegerScale toMicroseconds(TimeUnit unit) {
    long number = perSecond(unit);
    return number > 1_000_000L
        ? new IntegerScale(number / 1_000_000L, 1, true)
        : new IntegerScale(1, 1_000_000L / number, false);
  }

  /** Returns the scale to microseconds, rounded down to milliseconds. */
  static IntegerScale toMilliseconds(TimeUnit unit) {
    long number = perSecond(unit);
    return number >= 1000L
        ? new IntegerScale(number / 1000L, 1000L, false)
        : new IntegerScale(1, 1_000_000L / number, false);
  }
}
