package embedlog.spark;

import java.util.Arrays;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.GenericInternalRow;
import org.apache.spark.sql.connector.expressions.aggregate.AggregateFunc;
import org.apache.spark.sql.connector.expressions.aggregate.Aggregation;
import org.apache.spark.sql.connector.expressions.aggregate.CountStar;
import org.apache.spark.sql.connector.read.LocalScan;
import org.apache.spark.sql.types.DataTypes;
import org.apache.spark.sql.types.StructType;

/**
 * The answer to {@code count(*)} from the plan alone, without a task: where offsets have no gaps,
 * they tell how many records there are.
 *
 * @param topics what is counted, for descriptions
 * @param count how many records there are
 * @param columns how often the query counts them
 */
record PlannedCount(String topics, long count, int columns) implements LocalScan {

  /** Whether an aggregation does nothing but count all rows. */
  static boolean answers(Aggregation aggregation) {
    AggregateFunc[] functions = aggregation.aggregateExpressions();
    return aggregation.groupByExpressions().length == 0
        && functions.length > 0
        && Arrays.stream(functions).allMatch(CountStar.class::isInstance);
  }

  @Override
  public StructType readSchema() {
    StructType schema = new StructType();
    for (int column = 0; column < columns; column++) {
      schema = schema.add("count" + column, DataTypes.LongType, false);
    }
    return schema;
  }

  @Override
  public InternalRow[] rows() {
    Object[] counts = new Object[columns];
    Arrays.fill(counts, count);
    return new InternalRow[] {new GenericInternalRow(counts)};
  }

  @Override
  public String description() {
    return "embedlog " + topics + " (counted by the JVM from the plan)";
  }
}
