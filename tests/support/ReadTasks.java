package embedlog.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.ObjectMapper;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.ObjectNode;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.Iterator;
import java.util.List;
import java.util.function.UnaryOperator;
import org.apache.spark.sql.catalyst.InternalRow;
import org.apache.spark.sql.catalyst.expressions.UnsafeProjection;
import org.apache.spark.sql.catalyst.util.ArrayData;
import org.apache.spark.sql.connector.read.InputPartition;
import org.apache.spark.sql.connector.read.PartitionReader;
import org.apache.spark.sql.internal.SQLConf;
import org.apache.spark.sql.types.StructType;
import org.apache.spark.sql.vectorized.ColumnarBatch;

/**
 * Runs the tasks of plans as an executor does, without a Spark session: hundreds in a second.
 *
 * <p>Each line of the input is a request: {@code {"plan": ..., "columns": [...],
 * "failOnDataLoss": true, "times": [first, last], "limit": -1, "typed": null}}; for typed topics with
 * "schema", as the planner answers, and "projection", {@code spark.sql.codegen.factoryMode}. The answer is a line {@code
 * {"rows": [[...], ...]}}, with bytes in hexadecimal digits, or {@code {"error": text}}.
 */
public final class ReadTasks {
  private static final ObjectMapper MAPPER = new ObjectMapper();

  private ReadTasks() {}

  /** Answers until the input ends. */
  public static void main(String[] arguments) throws Exception {
    BufferedReader requests =
        new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
    for (String line = requests.readLine(); line != null; line = requests.readLine()) {
      System.out.println(MAPPER.writeValueAsString(answer(MAPPER.readTree(line))));
    }
  }

  private static ObjectNode answer(JsonNode request) {
    ObjectNode answer = MAPPER.createObjectNode();
    try {
      answer.set("rows", rows(request));
    } catch (Throwable error) { // An OutOfMemoryError is what a test looks for, too.
      answer.removeAll();
      answer.put("error", error.toString());
    }
    return answer;
  }

  private static ArrayNode rows(JsonNode request) throws Exception {
    List<String> columns = new ArrayList<>();
    request.get("columns").forEach(column -> columns.add(column.asText()));
    TimeRange times =
        new TimeRange(request.get("times").get(0).asLong(), request.get("times").get(1).asLong());
    JsonNode typed = request.get("typed");
    StructType schema = typed.isNull() ? null : LogReader.columns(request);
    ReadRequest read =
        new ReadRequest(
            columns,
            schema == null ? null : TypedRequest.parse(typed, schema),
            request.get("failOnDataLoss").asBoolean(),
            times,
            request.get("limit").asInt());
    UnaryOperator<InternalRow> projection = projection(request.get("projection"), schema);
    ArrayNode rows = MAPPER.createArrayNode();
    LogReaderFactory factory = new LogReaderFactory(read);
    for (InputPartition task : ReadPlan.parse(request.get("plan")).partitions()) {
      try (PartitionReader<ColumnarBatch> reader = factory.createColumnarReader(task)) {
        while (reader.next()) {
          Iterator<InternalRow> batch = reader.get().rowIterator();
          while (batch.hasNext()) {
            InternalRow row = projection.apply(batch.next());
            rows.add(schema == null ? row(row, columns) : TypedValues.row(row, schema));
          }
        }
      }
    }
    return rows;
  }

  /** Returns what Spark does with each row: it copies it by generated code, or without any. */
  private static UnaryOperator<InternalRow> projection(JsonNode mode, StructType schema) {
    if (mode == null) {
      return row -> row;
    }
    SQLConf.get().setConfString("spark.sql.codegen.factoryMode", mode.asText());
    return UnsafeProjection.create(schema)::apply;
  }

  private static ArrayNode row(InternalRow row, List<String> columns) {
    ArrayNode values = MAPPER.createArrayNode();
    for (int number = 0; number < columns.size(); number++) {
      if (row.isNullAt(number)) {
        values.addNull();
        continue;
      }
      switch (columns.get(number)) {
        case "key", "value" -> values.add(HexFormat.of().formatHex(row.getBinary(number)));
        case "topic" -> values.add(row.getUTF8String(number).toString());
        case "partition", "timestampType" -> values.add(row.getInt(number));
        case "offset", "timestamp" -> values.add(row.getLong(number));
        default -> values.add(headers(row.getArray(number)));
      }
    }
    return values;
  }

  private static ArrayNode headers(ArrayData pairs) {
    ArrayNode headers = MAPPER.createArrayNode();
    for (int number = 0; number < pairs.numElements(); number++) {
      InternalRow pair = pairs.getStruct(number, 2);
      byte[] key = pair.getUTF8String(0).getBytes();
      ArrayNode header = headers.addArray().add(HexFormat.of().formatHex(key));
      if (pair.isNullAt(1)) {
        header.addNull();
      } else {
        header.add(HexFormat.of().formatHex(pair.getBinary(1)));
      }
    }
    return headers;
  }
}
