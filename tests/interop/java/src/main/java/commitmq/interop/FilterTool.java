package commitmq.interop;

import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONObject;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.lang.reflect.Field;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.broker.filter.ConsumerFilterManager;
import org.apache.rocketmq.broker.filter.MessageEvaluationContext;
import org.apache.rocketmq.common.filter.ExpressionType;
import org.apache.rocketmq.filter.FilterFactory;
import org.apache.rocketmq.filter.expression.Expression;
import org.apache.rocketmq.filter.util.BitsArray;
import org.apache.rocketmq.filter.util.BloomFilter;

/**
 * Judges messages by SQL92 expressions with RocketMQ's own classes, as its broker does.
 *
 * <p>Each line of standard input is {"expression": text, "messages": [{name: value, ...}, ...]}; each line of output is
 * {"refused": why or null, "matches": [boolean, ...], "values": [text, ...]}. With the path of a consumerFilter.json as
 * argument it prints what RocketMQ makes of that instead.
 */
public final class FilterTool {
    private FilterTool() {
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        if (arguments.length > 0) {
            subscriptions(Path.of(arguments[0])).forEach(line -> out.println(JSON.toJSONString(line)));
            out.flush();
            return;
        }
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            out.println(JSON.toJSONString(judge(JSON.parseObject(line))));
        }
        out.flush();
    }

    /** What a broker's ConsumerFilterManager makes of a consumerFilter.json. */
    private static List<Map<String, Object>> subscriptions(Path file) throws Exception {
        // The constructor without a broker makes a Bloom filter of another size than a broker's.
        ConsumerFilterManager manager = new ConsumerFilterManager();
        BloomFilter bloom = BloomFilter.createByFn(20, 32);
        Field field = ConsumerFilterManager.class.getDeclaredField("bloomFilter");
        field.setAccessible(true);
        field.set(manager, bloom);
        manager.decode(Files.readString(file, StandardCharsets.UTF_8));
        List<Map<String, Object>> lines = new ArrayList<>();
        manager.getFilterDataByTopic().forEach((topic, groups) -> groups.getGroupFilterData().forEach((group, data) -> {
            Map<String, Object> line = new LinkedHashMap<>();
            line.put("topic", topic);
            line.put("group", group);
            line.put("expression", data.getExpression());
            line.put("compiled", data.getCompiledExpression() != null);
            line.put("born", data.getBornTime());
            line.put("dead", data.isDead());
            line.put("positions_kept", data.getBloomFilterData().getBitPos());
            line.put("positions", bloom.calcBitPositions(group + "#" + topic));
            BitsArray bits = BitsArray.create(bloom.getM());
            bloom.hashTo(data.getBloomFilterData(), bits);
            line.put("mask", HexFormat.of().formatHex(bits.bytes()));
            lines.add(line);
        }));
        return lines;
    }

    private static Map<String, Object> judge(JSONObject request) {
        Map<String, Object> answer = new LinkedHashMap<>();
        Expression expression;
        try {
            expression = FilterFactory.INSTANCE.get(ExpressionType.SQL92).compile(request.getString("expression"));
        } catch (Throwable error) {
            answer.put("refused", String.valueOf(error.getCause()));
            return answer;
        }
        List<Boolean> matches = new ArrayList<>();
        List<String> values = new ArrayList<>();
        for (Object message : request.getJSONArray("messages")) {
            Map<String, String> properties = new LinkedHashMap<>();
            ((JSONObject) message).forEach((name, value) -> properties.put(name, (String) value));
            try {
                Object value = expression.evaluate(new MessageEvaluationContext(properties));
                matches.add(value instanceof Boolean && (Boolean) value);
                values.add(String.valueOf(value));
            } catch (Throwable error) {
                // ExpressionMessageFilter catches this and does not select the message.
                matches.add(false);
                values.add(String.valueOf(error));
            }
        }
        answer.put("matches", matches);
        answer.put("values", values);
        return answer;
    }
}
