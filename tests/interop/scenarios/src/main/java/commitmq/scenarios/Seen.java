package commitmq.scenarios;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.Comparator;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.regex.Pattern;
import java.util.zip.CRC32;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;

/** What clients show of messages and results, without clocks, ids and hosts. */
public final class Seen {
    /** Properties whose values hold a clock, an id, or what else is different in each run. */
    private static final Set<String> CHANGING = Set.of(
        "UNIQ_KEY", "ORIGIN_MESSAGE_ID", "DLQ_ORIGIN_MESSAGE_ID", "CONSUME_START_TIME", "MIN_OFFSET", "MAX_OFFSET",
        "CORRELATION_ID", "REPLY_TO_CLIENT", "PUSH_REPLY_TIME", "ARRIVE_TIME", "TIMER_OUT_MS", "TIMER_ENQUEUE_MS",
        "TIMER_DEQUEUE_MS", "TIMER_DELIVER_MS", "TIMER_ROLL_TIMES", "1ST_POP_TIME", "POP_CK", "BORN_TIMESTAMP",
        "__transactionId__", "TRAN_PREPARED_QUEUE_OFFSET", "TRANSACTION_CHECK_TIMES");
    /** A checksum that a broker may be told to add. */
    private static final String CHECKSUM = "__CRC32#";
    private static final Pattern ID = Pattern.compile("[0-9A-F]{32}|[0-9A-F]{40}|[0-9A-F]{56}");
    private static final int SHORT = 200;

    private Seen() {
    }

    /** One message. */
    public static Map<String, Object> line(MessageExt message) {
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("topic", message.getTopic());
        fields.put("queue", message.getQueueId());
        fields.put("offset", message.getQueueOffset());
        fields.put("body", body(message.getBody()));
        fields.put("flag", message.getFlag());
        fields.put("sys_flag", message.getSysFlag());
        fields.put("reconsume_times", message.getReconsumeTimes());
        fields.put("id", form(message.getMsgId()));
        fields.put("properties", properties(message.getProperties()));
        return fields;
    }

    /** Messages by topic, queue and offset. */
    public static List<Object> lines(List<MessageExt> messages) {
        List<Object> found = new ArrayList<>();
        sorted(messages).forEach(message -> found.add(line(message)));
        return found;
    }

    static List<MessageExt> sorted(List<MessageExt> messages) {
        List<MessageExt> found = new ArrayList<>(messages);
        found.sort(Comparator.comparing(MessageExt::getTopic).thenComparing(MessageExt::getQueueId)
            .thenComparing(MessageExt::getQueueOffset).thenComparing(MessageExt::getReconsumeTimes));
        return found;
    }

    /** Only the bodies, in that order. */
    public static List<String> bodies(List<MessageExt> messages) {
        return sorted(messages).stream().map(message -> body(message.getBody())).toList();
    }

    /** The result of a send to {@code stage}'s broker. */
    public static Map<String, Object> result(SendResult result, Stage stage) {
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("status", result.getSendStatus());
        fields.put("topic", result.getMessageQueue().getTopic());
        fields.put("broker", result.getMessageQueue().getBrokerName());
        fields.put("queue", result.getMessageQueue().getQueueId());
        fields.put("offset", result.getQueueOffset());
        fields.put("ids", forms(result.getMsgId()));
        fields.put("offset_ids", forms(result.getOffsetMsgId()));
        fields.put("offset_id_names_broker", hasAddress(result.getOffsetMsgId(), stage.address));
        fields.put("transaction_id", result.getTransactionId() == null ? "none"
            : result.getTransactionId().equals(result.getMsgId()) ? "the id" : form(result.getTransactionId()));
        fields.put("region", result.getRegionId());
        fields.put("trace_on", result.isTraceOn());
        return fields;
    }

    private static Object hasAddress(String ids, String address) {
        if (ids == null) {
            return null;
        }
        for (String id : ids.split(",")) {
            try {
                var place = (java.net.InetSocketAddress) MessageDecoder.decodeMessageId(id).getAddress();
                if (!address.equals(place.getAddress().getHostAddress() + ":" + place.getPort())) {
                    return false;
                }
            } catch (Exception error) {
                return String.valueOf(error);
            }
        }
        return true;
    }

    private static List<String> forms(String ids) {
        List<String> found = new ArrayList<>();
        for (String id : ids == null ? new String[0] : ids.split(",")) {
            found.add(form(id));
        }
        return found;
    }

    /** What an id looks like. */
    static String form(String id) {
        return id == null ? "none" : ID.matcher(id).matches() ? "an id" : "no id: " + id;
    }

    static String body(byte[] body) {
        if (body == null) {
            return "none";
        }
        if (body.length <= SHORT) {
            return new String(body, StandardCharsets.UTF_8);
        }
        CRC32 sum = new CRC32();
        sum.update(body);
        return body.length + " bytes, CRC " + sum.getValue();
    }

    private static Map<String, String> properties(Map<String, String> properties) {
        Map<String, String> found = new TreeMap<>();
        if (properties != null) {
            properties.forEach((name, value) -> found.put(name, CHANGING.contains(name) ? "…" : value));
        }
        found.remove(CHECKSUM);
        return found;
    }
}
