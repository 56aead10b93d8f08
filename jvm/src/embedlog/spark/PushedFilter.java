package embedlog.spark;

import java.util.ArrayList;
import java.util.List;
import java.util.Locale;
import java.util.Map;
import java.util.Optional;
import java.util.function.Function;
import org.apache.spark.sql.connector.expressions.Expression;
import org.apache.spark.sql.connector.expressions.Literal;
import org.apache.spark.sql.connector.expressions.NamedReference;
import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.unsafe.types.UTF8String;

/**
 * A condition of a query that narrows what is read.
 *
 * @param column topic, partition, offset, timestamp, or a column of a typed topic
 * @param operator one of {@code = < <= > >= in}
 * @param values numbers or text; one, except for {@code in}; timestamps in microseconds
 */
record PushedFilter(String column, String operator, List<Object> values) {
  private static final List<String> COLUMNS = List.of("topic", "partition", "offset", "timestamp");

  /** Longer lists cost the plan more than they save. */
  private static final int MAX_VALUES = 100;

  /** The operators, with what they become if the column is on their right. */
  private static final Map<String, String> MIRRORED =
      Map.of("=", "=", "<", ">", "<=", ">=", ">", "<", ">=", "<=");

  /** Whether a predicate says that a column is not null that never is; Spark adds these. */
  static boolean isAlwaysTrue(Predicate predicate) {
    return predicate.name().equals("IS_NOT_NULL")
        && predicate.children()[0] instanceof NamedReference reference
        && reference.fieldNames().length == 1
        && COLUMNS.contains(reference.fieldNames()[0]);
  }

  /** Returns the filter for a predicate of Spark; nothing for those that narrow nothing. */
  static Optional<PushedFilter> of(Predicate predicate) {
    return of(predicate, PushedFilter::recordColumn);
  }

  /**
   * Returns the filter for a predicate on a column of a typed topic, by which statistics narrow the
   * plan; Spark must apply it to each row nevertheless.
   */
  static Optional<PushedFilter> ofColumn(Predicate predicate) {
    return of(predicate, PushedFilter::topicColumn).filter(PushedFilter::isPlain);
  }

  private static String recordColumn(NamedReference reference) {
    String[] names = reference.fieldNames();
    return names.length == 1 && COLUMNS.contains(names[0]) ? names[0] : null;
  }

  /** Returns the name of a column, or of a field of the column with all of them. */
  private static String topicColumn(NamedReference reference) {
    String[] names = reference.fieldNames();
    boolean isField = names.length == 2 && names[0].equals("value");
    return isField ? names[1] : names.length == 1 ? names[0] : null;
  }

  /** Whether all values are the same in JSON. */
  private boolean isPlain() {
    return values.stream()
        .allMatch(
            value ->
                value instanceof String
                    || value instanceof Boolean
                    || value instanceof Byte
                    || value instanceof Short
                    || value instanceof Integer
                    || value instanceof Long
                    || value instanceof Float number && Float.isFinite(number)
                    || value instanceof Double number && Double.isFinite(number));
  }

  private static Optional<PushedFilter> of(
      Predicate predicate, Function<NamedReference, String> names) {
    String operator = predicate.name().toLowerCase(Locale.ROOT);
    Expression[] children = predicate.children();
    if (children.length < 2) {
      return Optional.empty();
    }
    if (operator.equals("in") && children.length <= MAX_VALUES + 1) {
      return of(children[0], operator, List.of(children).subList(1, children.length), names);
    }
    // With a literal that is not null this is "=".
    operator = operator.equals("<=>") ? "=" : operator;
    if (!MIRRORED.containsKey(operator)) {
      return Optional.empty();
    }
    return children[1] instanceof NamedReference
        ? of(children[1], MIRRORED.get(operator), List.of(children[0]), names)
        : of(children[0], operator, List.of(children[1]), names);
  }

  private static Optional<PushedFilter> of(
      Expression column,
      String operator,
      List<Expression> literals,
      Function<NamedReference, String> names) {
    String name = column instanceof NamedReference reference ? names.apply(reference) : null;
    if (name == null) {
      return Optional.empty();
    }
    List<Object> values = new ArrayList<>();
    for (Expression expression : literals) {
      if (!(expression instanceof Literal<?> literal) || literal.value() == null) {
        return Optional.empty();
      }
      Object value = literal.value();
      values.add(value instanceof UTF8String ? value.toString() : value);
    }
    return Optional.of(new PushedFilter(name, operator, values));
  }

  /** Whether the plan leaves out all rows that do not match, so that Spark need not look. */
  boolean isExact() {
    return !column.equals("timestamp");
  }

  /** Returns the filter for the planner. */
  List<Object> toJson() {
    return List.of(column, operator, operator.equals("in") ? values : values.get(0));
  }

  /** Returns the timestamps in milliseconds that may match. */
  TimeRange times() {
    TimeRange range = TimeRange.ALL;
    if (!column.equals("timestamp")) {
      return range;
    }
    long least = values.stream().mapToLong(value -> (Long) value).min().orElseThrow();
    long greatest = values.stream().mapToLong(value -> (Long) value).max().orElseThrow();
    return switch (operator) {
      case "<" -> new TimeRange(range.first(), Math.floorDiv(greatest - 1, 1000L));
      case "<=" -> new TimeRange(range.first(), Math.floorDiv(greatest, 1000L));
      case ">" -> new TimeRange(Math.floorDiv(least, 1000L) + 1, range.last());
      case ">=" -> new TimeRange(roundUp(least), range.last());
      default -> new TimeRange(roundUp(least), Math.floorDiv(greatest, 1000L));
    };
  }

  /** Returns microseconds as milliseconds; also the least of them, which has no opposite. */
  private static long roundUp(long microseconds) {
    return Math.floorDiv(microseconds, 1000L) + (Math.floorMod(microseconds, 1000L) == 0 ? 0 : 1);
  }

  @Override
  public String toString() {
    return column + " " + operator + " " + (values.size() == 1 ? values.get(0) : values);
  }
}
