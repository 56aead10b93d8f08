package embedlog.spark;

import java.util.HashMap;
import java.util.List;
import java.util.Map;

/** The plan of a batch query, which is made once, when something first needs it. */
final class BatchPlan {
  /** The limit of a query without one. */
  static final int NO_LIMIT = -1;

  private final Planner planner;
  private final Map<String, Object> params = new HashMap<>();
  private ReadPlan plan;

  /**
   * Describes a plan.
   *
   * @param filters those on the columns of every record
   * @param columnFilters those on the columns of typed topics
   */
  BatchPlan(
      Planner planner,
      Map<String, String> options,
      List<PushedFilter> filters,
      List<PushedFilter> columnFilters,
      int limit) {
    this.planner = planner;
    params.put("options", options);
    params.put("filters", filters.stream().map(PushedFilter::toJson).toList());
    params.put("column_filters", columnFilters.stream().map(PushedFilter::toJson).toList());
    params.put("limit", limit == NO_LIMIT ? null : limit);
    params.put("cores", Planner.cores());
  }

  synchronized ReadPlan get() {
    if (plan == null) {
      plan = ReadPlan.parse(planner.request("plan_batch", params));
    }
    return plan;
  }
}
