package embedlog.spark;

import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Optional;
import java.util.OptionalLong;
import org.apache.spark.sql.connector.expressions.aggregate.Aggregation;
import org.apache.spark.sql.connector.expressions.filter.Predicate;
import org.apache.spark.sql.connector.read.Scan;
import org.apache.spark.sql.connector.read.SupportsPushDownAggregates;
import org.apache.spark.sql.connector.read.SupportsPushDownLimit;
import org.apache.spark.sql.connector.read.SupportsPushDownRequiredColumns;
import org.apache.spark.sql.connector.read.SupportsPushDownV2Filters;
import org.apache.spark.sql.types.StructField;
import org.apache.spark.sql.types.StructType;

/** Collects what a query wants of the log: columns, conditions, a count and a limit. */
final class LogScanBuilder
    implements SupportsPushDownRequiredColumns,
        SupportsPushDownV2Filters,
        SupportsPushDownAggregates,
        SupportsPushDownLimit {
  private final Planner planner;
  private final Map<String, String> options;
  private final LogReader reader;
  private final StructType schema;
  private final List<PushedFilter> filters = new ArrayList<>();
  private final List<PushedFilter> columnFilters = new ArrayList<>();
  private Predicate[] pushed = {};
  private StructType columns;
  private int limit = BatchPlan.NO_LIMIT;
  private BatchPlan planWithoutLimit;
  private PlannedCount count;

  /**
   * Begins with all columns of a table.
   *
   * @throws EmbedlogException if an option or a column is wrong
   */
  LogScanBuilder(Planner planner, Map<String, String> options, StructType schema) {
    this.planner = planner;
    this.options = options;
    this.schema = schema;
    this.columns = schema;
    this.reader = LogReader.check(planner, options, schema);
  }

  /**
   * Leaves out columns, and fields of a typed topic's: of headers Spark may want the keys alone,
   * but both are stored.
   */
  @Override
  public void pruneColumns(StructType required) {
    StructType wanted = new StructType();
    for (StructField field : required.fields()) {
      boolean isWhole = reader.typed() == null || field.name().equals("headers");
      wanted = wanted.add(isWhole ? schema.apply(field.name()) : field);
    }
    columns = wanted;
  }

  /** Takes what narrows the plan, and returns what Spark must still apply to each row. */
  @Override
  public Predicate[] pushPredicates(Predicate[] predicates) {
    List<Predicate> taken = new ArrayList<>();
    List<Predicate> remaining = new ArrayList<>();
    for (Predicate predicate : predicates) {
      if (PushedFilter.isAlwaysTrue(predicate)) {
        taken.add(predicate);
        continue;
      }
      Optional<PushedFilter> filter = PushedFilter.of(predicate);
      if (filter.isPresent()) {
        filters.add(filter.get());
        taken.add(predicate);
      }
      if (filter.isEmpty() && reader.typed() != null) {
        filter = PushedFilter.ofColumn(predicate);
        filter.ifPresent(columnFilters::add);
        filter.ifPresent(usable -> taken.add(predicate));
        remaining.add(predicate);
      } else if (filter.isEmpty() || !filter.get().isExact()) {
        remaining.add(predicate);
      }
    }
    pushed = taken.toArray(Predicate[]::new);
    return remaining.toArray(Predicate[]::new);
  }

  @Override
  public Predicate[] pushedPredicates() {
    return pushed;
  }

  /** Takes {@code count(*)}, if the plan tells how many records there are. */
  @Override
  public boolean pushAggregation(Aggregation aggregation) {
    if (!PlannedCount.answers(aggregation)) {
      return false;
    }
    planWithoutLimit = new BatchPlan(planner, options, filters, columnFilters, BatchPlan.NO_LIMIT);
    OptionalLong rows = planWithoutLimit.get().rows();
    if (rows.isEmpty()) {
      return false;
    }
    int columns = aggregation.aggregateExpressions().length;
    count = new PlannedCount(reader.topics(), rows.getAsLong(), columns);
    return true;
  }

  @Override
  public boolean supportCompletePushDown(Aggregation aggregation) {
    return PlannedCount.answers(aggregation);
  }

  @Override
  public boolean pushLimit(int limit) {
    this.limit = limit;
    return true;
  }

  /** Each task stops at the limit; Spark takes so many rows of all tasks. */
  @Override
  public boolean isPartiallyPushed() {
    return true;
  }

  @Override
  public Scan build() {
    if (count != null) {
      return count;
    }
    boolean isPlanned = planWithoutLimit != null && limit == BatchPlan.NO_LIMIT;
    BatchPlan plan =
        isPlanned
            ? planWithoutLimit
            : new BatchPlan(planner, options, filters, columnFilters, limit);
    return new LogScan(planner, options, reader, columns, filters, columnFilters, limit, plan);
  }
}
