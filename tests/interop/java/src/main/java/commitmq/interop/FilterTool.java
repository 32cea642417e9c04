package commitmq.interop;

import com.alibaba.fastjson2.JSON;
import com.alibaba.fastjson2.JSONObject;
import java.io.BufferedReader;
import java.io.InputStreamReader;
import java.io.PrintStream;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.broker.filter.MessageEvaluationContext;
import org.apache.rocketmq.common.filter.ExpressionType;
import org.apache.rocketmq.filter.FilterFactory;
import org.apache.rocketmq.filter.expression.Expression;

/**
 * Judges messages by SQL92 expressions with RocketMQ's own classes, as its broker does.
 *
 * <p>Each line of standard input is {"expression": text, "messages": [{name: value, ...}, ...]}; each line of output is
 * {"refused": why or null, "matches": [boolean, ...], "values": [text, ...]}.
 */
public final class FilterTool {
    private FilterTool() {
    }

    public static void main(String[] arguments) throws Exception {
        PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
        BufferedReader in = new BufferedReader(new InputStreamReader(System.in, StandardCharsets.UTF_8));
        for (String line = in.readLine(); line != null; line = in.readLine()) {
            out.println(JSON.toJSONString(judge(JSON.parseObject(line))));
        }
        out.flush();
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
