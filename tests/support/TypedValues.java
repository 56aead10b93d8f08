package embedlog.spark;

import com.fasterxml.jackson.databind.JsonNode;
import com.fasterxml.jackson.databind.node.ArrayNode;
import com.fasterxml.jackson.databind.node.JsonNodeFactory;
import java.util.HexFormat;
import org.apache.spark.sql.catalyst.expressions.SpecializedGetters;
import org.apache.spark.sql.catalyst.util.ArrayData;
import org.apache.spark.sql.types.ArrayType;
import org.apache.spark.sql.types.BinaryType;
import org.apache.spark.sql.types.BooleanType;
import org.apache.spark.sql.types.ByteType;
import org.apache.spark.sql.types.DataType;
import org.apache.spark.sql.types.DateType;
import org.apache.spark.sql.types.DecimalType;
import org.apache.spark.sql.types.DoubleType;
import org.apache.spark.sql.types.FloatType;
import org.apache.spark.sql.types.IntegerType;
import org.apache.spark.sql.types.MapType;
import org.apache.spark.sql.types.ShortType;
import org.apache.spark.sql.types.StringType;
import org.apache.spark.sql.types.StructType;

/** Values of any type as JSON: bytes and text in hexadecimal digits, floats as text. */
final class TypedValues {
  private static final JsonNodeFactory JSON = JsonNodeFactory.instance;

  private TypedValues() {}

  /** Returns the columns of a row, or the fields of a struct, as a list. */
  static ArrayNode row(SpecializedGetters row, StructType type) {
    ArrayNode values = JSON.arrayNode();
    for (int number = 0; number < type.size(); number++) {
      values.add(value(row, number, type.fields()[number].dataType()));
    }
    return values;
  }

  private static JsonNode value(SpecializedGetters row, int at, DataType type) {
    if (row.isNullAt(at)) {
      return JSON.nullNode();
    } else if (type instanceof BooleanType) {
      return JSON.booleanNode(row.getBoolean(at));
    } else if (type instanceof ByteType) {
      return JSON.numberNode(row.getByte(at));
    } else if (type instanceof ShortType) {
      return JSON.numberNode(row.getShort(at));
    } else if (type instanceof IntegerType || type instanceof DateType) {
      return JSON.numberNode(row.getInt(at));
    } else if (type instanceof FloatType) {
      return JSON.textNode(Double.toString(row.getFloat(at)));
    } else if (type instanceof DoubleType) {
      return JSON.textNode(Double.toString(row.getDouble(at)));
    } else if (type instanceof DecimalType decimal) {
      return JSON.textNode(
          row.getDecimal(at, decimal.precision(), decimal.scale())
              .toJavaBigDecimal()
              .toPlainString());
    } else if (type instanceof StringType) {
      return JSON.textNode(HexFormat.of().formatHex(row.getUTF8String(at).getBytes()));
    } else if (type instanceof BinaryType) {
      return JSON.textNode(HexFormat.of().formatHex(row.getBinary(at)));
    } else if (type instanceof ArrayType list) {
      return list(row.getArray(at), list.elementType());
    } else if (type instanceof MapType map) {
      ArrayNode keys = list(row.getMap(at).keyArray(), map.keyType());
      return JSON.arrayNode().add(keys).add(list(row.getMap(at).valueArray(), map.valueType()));
    } else if (type instanceof StructType struct) {
      return row(row.getStruct(at, struct.size()), struct);
    }
    return JSON.numberNode(row.getLong(at));
  }

  private static ArrayNode list(
      ArrayData items, DataType type) {
    ArrayNode values = JSON.arrayNode();
    for (int number = 0; number < items.numElements(); number++) {
      values.add(value(items, number, type));
    }
    return values;
  }
}
