package commitmq.interop;

import com.alibaba.fastjson2.JSON;
import java.io.IOException;
import java.io.PrintStream;
import java.io.PrintWriter;
import java.io.StringWriter;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayDeque;
import java.util.ArrayList;
import java.util.Arrays;
import java.util.Deque;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.Properties;
import java.util.TreeMap;
import java.util.concurrent.ExecutorService;
import java.util.concurrent.Executors;
import java.util.concurrent.TimeUnit;
import org.apache.rocketmq.common.BoundaryType;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.attribute.CQType;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.store.ConsumeQueueExt;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.GetMessageResult;
import org.apache.rocketmq.store.GetMessageStatus;
import org.apache.rocketmq.store.MessageFilter;
import org.apache.rocketmq.store.QueryMessageResult;
import org.apache.rocketmq.store.queue.ConsumeQueueInterface;
import org.apache.rocketmq.store.queue.CqUnit;

/**
 * Opens a store root with RocketMQ's own classes and prints what they see, one JSON object a line.
 *
 * <pre>
 *   StoreTool ROOT [--set key=value]... [--report FILE] [--hosts] [--inflate] VERB
 *     read                        every message of every queue, through its ConsumeQueue
 *     query TOPIC KEY             what store.queryMessage finds
 *     queries FILE                the same for each line of FILE, which is a topic, a tab and a key: the messages' places
 *     times TOPIC QUEUE MS...     queue offset by time, both boundaries
 *     units                       every ConsumeQueue unit, with its extension unit
 *     tagged TOPIC QUEUE CODE     queue offsets that a pull by this hash of a tag examines no further
 *     append TOPIC QUEUE COUNT    COUNT single messages and one batch of COUNT
 *     append-inner TOPIC QUEUE N  N inner batches, of 1, 2, … N messages, to a topic with queue.type=BatchCQ
 *     append-light TOPIC QUEUE COUNT NAMES   COUNT messages that go to the LMQs NAMES (with commas) too
 *     config                      topics, groups and offsets as a broker decodes their files; the store is not opened
 *     judge FILE                  "read", then "units", then "queries FILE"
 *   StoreTool --each FILE         many stores at once: each line of FILE is where the output goes, and the arguments of
 *                                 one run as above, with tabs between; what a run fails with goes to its output + ".failed"
 * </pre>
 *
 * --hosts adds the hosts of each message, --inflate prints bodies as RocketMQ's compressors inflate them. The report tells the log's and the queues' bounds right after recovery and again before the stop.
 */
public final class StoreTool {
    private static final int PULL_MESSAGES = 32;
    private static final String GROUP = "interop";

    /** RocketMQ sleeps while it closes a store, so several at a time cost little more than one. */
    private static final int STORES_AT_ONCE = 6;

    private final PrintStream out;
    private final Properties settings = new Properties();
    private Path report;
    private final MessageJson json = new MessageJson();

    private StoreTool(PrintStream out) {
        this.out = out;
    }

    public static void main(String[] arguments) {
        int status = 0;
        try {
            if (arguments[0].equals("--each")) {
                each(Path.of(arguments[1]));
            } else {
                PrintStream out = new PrintStream(System.out, false, StandardCharsets.UTF_8);
                new StoreTool(out).run(new ArrayDeque<>(Arrays.asList(arguments)));
            }
        } catch (Throwable error) {
            error.printStackTrace();
            status = 1;
        }
        // A failed load leaves RocketMQ threads behind that are no daemons; they must not keep this process.
        System.out.flush();
        Runtime.getRuntime().halt(status);
    }

    private static void each(Path file) throws Exception {
        ExecutorService pool = Executors.newFixedThreadPool(STORES_AT_ONCE);
        for (String line : Files.readAllLines(file, StandardCharsets.UTF_8)) {
            Deque<String> arguments = new ArrayDeque<>(Arrays.asList(line.split("\t")));
            Path output = Path.of(arguments.removeFirst());
            pool.execute(() -> {
                try (PrintStream out = new PrintStream(output.toFile(), StandardCharsets.UTF_8)) {
                    new StoreTool(out).run(arguments);
                } catch (Throwable error) {
                    StringWriter said = new StringWriter();
                    error.printStackTrace(new PrintWriter(said));
                    try {
                        Files.writeString(Path.of(output + ".failed"), said.toString(), StandardCharsets.UTF_8);
                    } catch (IOException lost) {
                        lost.printStackTrace();
                    }
                }
            });
        }
        pool.shutdown();
        pool.awaitTermination(1, TimeUnit.HOURS);
    }

    private void run(Deque<String> arguments) throws Exception {
        Path root = Path.of(arguments.removeFirst());
        while (arguments.getFirst().startsWith("--")) {
            String option = arguments.removeFirst();
            switch (option) {
                case "--set" -> {
                    String[] pair = arguments.removeFirst().split("=", 2);
                    settings.setProperty(pair[0], pair[1]);
                }
                case "--report" -> report = Path.of(arguments.removeFirst());
                case "--hosts" -> json.withHosts = true;
                case "--inflate" -> json.inflate = true;
                default -> throw new IllegalArgumentException("unknown option " + option);
            }
        }
        String verb = arguments.removeFirst();
        if (verb.equals("config")) {
            out.println(ConfigFiles.line(root.resolve("config")));
        } else {
            withStore(root, verb, arguments);
        }
        out.flush();
    }

    private void withStore(Path root, String verb, Deque<String> arguments) throws Exception {
        Map<String, Object> told = new LinkedHashMap<>();
        try (OpenStore open = OpenStore.open(root, settings)) {
            told.put("abort_file_found", open.abortFileFound);
            told.put("recovered", bounds(open.store));
            switch (verb) {
                case "read" -> readAll(open.store);
                case "judge" -> {
                    readAll(open.store);
                    forEachQueue(open.store, this::units);
                    queries(open.store, Path.of(arguments.removeFirst()));
                }
                case "query" -> query(open.store, arguments.removeFirst(), arguments.removeFirst());
                case "queries" -> queries(open.store, Path.of(arguments.removeFirst()));
                case "times" -> times(open.store, arguments);
                case "units" -> forEachQueue(open.store, this::units);
                case "tagged" -> tagged(open.store, arguments.removeFirst(), Integer.parseInt(arguments.removeFirst()),
                    Integer.parseInt(arguments.removeFirst()));
                case "append" -> {
                    String topic = arguments.removeFirst();
                    int queue = Integer.parseInt(arguments.removeFirst());
                    int count = Integer.parseInt(arguments.removeFirst());
                    new Append(open.store, topic, queue).run(count).forEach(out::println);
                    open.awaitDispatch();
                }
                case "append-inner", "append-light" -> {
                    String topic = arguments.removeFirst();
                    int queue = Integer.parseInt(arguments.removeFirst());
                    int count = Integer.parseInt(arguments.removeFirst());
                    Append append = new Append(open.store, topic, queue);
                    List<String> lines = verb.equals("append-inner")
                        ? append.innerBatches(count) : append.light(count, arguments.removeFirst());
                    lines.forEach(out::println);
                    open.awaitDispatch();
                }
                default -> throw new IllegalArgumentException("unknown verb " + verb);
            }
            told.put("stopped", bounds(open.store));
        }
        told.put("abort_file_left", Files.exists(root.resolve("abort")));
        if (report != null) {
            Files.writeString(report, JSON.toJSONString(told), StandardCharsets.UTF_8);
        }
    }

    private static Map<String, Object> bounds(DefaultMessageStore store) throws Exception {
        List<Object> queues = new ArrayList<>();
        forEachQueue(store, queue -> queues.add(List.of(queue.getTopic(), queue.getQueueId(),
            queue.getMinOffsetInQueue(), queue.getMaxOffsetInQueue(), queue.getMaxPhysicOffset())));
        Map<String, Object> bounds = new LinkedHashMap<>();
        bounds.put("min_physical_offset", store.getMinPhyOffset());
        bounds.put("max_physical_offset", store.getMaxPhyOffset());
        bounds.put("flushed_offset", store.getFlushedWhere());
        bounds.put("confirm_offset", store.getConfirmOffset());
        bounds.put("reput_offset", store.getReputFromOffset());
        bounds.put("writeable", store.getRunningFlags().isWriteable());
        // Each: topic, queue id, min and max queue offset, end of the last message in the log.
        bounds.put("queues", queues);
        return bounds;
    }

    private interface QueueVisitor {
        void visit(ConsumeQueueInterface queue) throws Exception;
    }

    private static void forEachQueue(DefaultMessageStore store, QueueVisitor visitor) throws Exception {
        for (var queues : new TreeMap<>(store.getConsumeQueueTable()).values()) {
            for (ConsumeQueueInterface queue : new TreeMap<>(queues).values()) {
                visitor.visit(queue);
            }
        }
    }

    private void readAll(DefaultMessageStore store) throws Exception {
        forEachQueue(store, queue -> {
            if (queue.getCQType() == CQType.BatchCQ) {
                readBatches(store, queue);
            } else if (MixAll.isLmq(queue.getTopic())) {
                readLight(store, queue);
            } else {
                readQueue(store, queue.getTopic(), queue.getQueueId());
            }
        });
    }

    /** Pull a queue of batches; each message inside becomes a line, as RocketMQ's consumers take records apart. */
    private void readBatches(DefaultMessageStore store, ConsumeQueueInterface queue) throws Exception {
        long offset = Math.max(0, queue.getMinOffsetInQueue());
        while (offset < queue.getMaxOffsetInQueue()) {
            GetMessageResult result = store.getMessage(GROUP, queue.getTopic(), queue.getQueueId(), offset, PULL_MESSAGES, null);
            if (result.getStatus() != GetMessageStatus.FOUND || result.getNextBeginOffset() <= offset) {
                throw new IllegalStateException("pull of " + queue.getTopic() + " at " + offset + ": " + result);
            }
            for (ByteBuffer record : result.getMessageBufferList()) {
                List<MessageExt> inside = new ArrayList<>();
                MessageDecoder.decodeMessage(json.decode(record), inside);
                for (MessageExt message : inside) {
                    if (message.getQueueOffset() != offset) {
                        throw new IllegalStateException("expected offset " + offset + ", got " + message);
                    }
                    out.println(json.line(message));
                    offset++;
                }
            }
            if (offset != result.getNextBeginOffset()) {
                throw new IllegalStateException("pull of " + queue.getTopic() + " goes on at " + result.getNextBeginOffset());
            }
            result.release();
        }
    }

    /** Pull an LMQ: its units lead to records of other topics. Each line tells the place in the LMQ beside the record's own. */
    private void readLight(DefaultMessageStore store, ConsumeQueueInterface queue) {
        String name = queue.getTopic();
        long offset = queue.getMinOffsetInQueue();
        while (offset < queue.getMaxOffsetInQueue()) {
            GetMessageResult result = store.getMessage(GROUP, name, MixAll.LMQ_QUEUE_ID, offset, PULL_MESSAGES, null);
            if (result.getStatus() != GetMessageStatus.FOUND || result.getNextBeginOffset() <= offset) {
                throw new IllegalStateException("pull of " + name + " at " + offset + ": " + result);
            }
            for (ByteBuffer record : result.getMessageBufferList()) {
                Map<String, Object> fields = new LinkedHashMap<>();
                fields.put("lmq", name);
                fields.put("lmq_offset", offset++);
                fields.put("message", JSON.parseObject(json.line(json.decode(record))));
                out.println(JSON.toJSONString(fields));
            }
            result.release();
        }
    }

    /** Pull one queue as a consumer's requests do: from the least offset on, each time from where the last answer ended. */
    private void readQueue(DefaultMessageStore store, String topic, int queue) {
        long offset = store.getMinOffsetInQueue(topic, queue);
        while (true) {
            GetMessageResult result = store.getMessage(GROUP, topic, queue, offset, PULL_MESSAGES, null);
            if (result.getStatus() == GetMessageStatus.OFFSET_OVERFLOW_ONE
                || result.getStatus() == GetMessageStatus.NO_MESSAGE_IN_QUEUE) {
                return;
            }
            if (result.getStatus() != GetMessageStatus.FOUND || result.getNextBeginOffset() <= offset) {
                throw new IllegalStateException("pull of " + topic + " queue " + queue + " at " + offset + ": " + result);
            }
            for (ByteBuffer record : result.getMessageBufferList()) {
                MessageExt message = json.decode(record);
                // The unit's place must be the record's own number, or consumers would count wrongly.
                if (message.getQueueOffset() != offset || message.getQueueId() != queue || !message.getTopic().equals(topic)) {
                    throw new IllegalStateException("unit " + offset + " of " + topic + " queue " + queue + " leads to " + message);
                }
                out.println(json.line(message));
                offset++;
            }
            if (offset != result.getNextBeginOffset()) {
                throw new IllegalStateException("pull of " + topic + " queue " + queue + " skipped to " + result.getNextBeginOffset());
            }
            result.release();
        }
    }

    private void query(DefaultMessageStore store, String topic, String key) {
        QueryMessageResult result = store.queryMessage(topic, key, 64, 0, Long.MAX_VALUE);
        for (ByteBuffer record : result.getMessageBufferList()) {
            out.println(json.line(json.decode(record)));
        }
        result.release();
    }

    private void queries(DefaultMessageStore store, Path file) throws Exception {
        for (String line : Files.readAllLines(file, StandardCharsets.UTF_8)) {
            String[] pair = line.split("\t", 2);
            QueryMessageResult result = store.queryMessage(pair[0], pair[1], 10_000, 0, Long.MAX_VALUE);
            List<Long> offsets = new ArrayList<>();
            for (ByteBuffer record : result.getMessageBufferList()) {
                offsets.add(json.decode(record).getCommitLogOffset());
            }
            result.release();
            Map<String, Object> fields = new LinkedHashMap<>();
            fields.put("topic", pair[0]);
            fields.put("key", pair[1]);
            fields.put("physical_offsets", offsets);
            out.println(JSON.toJSONString(fields));
        }
    }

    private void times(DefaultMessageStore store, Deque<String> arguments) {
        String topic = arguments.removeFirst();
        int queue = Integer.parseInt(arguments.removeFirst());
        for (String time : arguments) {
            Map<String, Object> fields = new LinkedHashMap<>();
            fields.put("timestamp", Long.parseLong(time));
            fields.put("lower", store.getOffsetInQueueByTime(topic, queue, Long.parseLong(time), BoundaryType.LOWER));
            fields.put("upper", store.getOffsetInQueueByTime(topic, queue, Long.parseLong(time), BoundaryType.UPPER));
            out.println(JSON.toJSONString(fields));
        }
    }

    private void units(ConsumeQueueInterface queue) {
        for (long offset = queue.getMinOffsetInQueue(); offset < queue.getMaxOffsetInQueue(); offset++) {
            CqUnit unit = queue.get(offset);
            Map<String, Object> fields = new LinkedHashMap<>();
            fields.put("topic", queue.getTopic());
            fields.put("queue_id", queue.getQueueId());
            fields.put("queue_offset", offset);
            fields.put("physical_offset", unit.getPos());
            fields.put("tags_code", unit.getTagsCode());
            ConsumeQueueExt.CqExtUnit extension = unit.getCqExtUnit();
            if (extension != null) {
                fields.put("ext_size", extension.getSize());
                fields.put("ext_tags_code", extension.getTagsCode());
                fields.put("ext_store_timestamp", extension.getMsgStoreTime());
                byte[] bits = extension.getFilterBitMap();
                fields.put("ext_bitmap", bits == null ? "" : HexFormat.of().formatHex(bits));
            }
            out.println(JSON.toJSONString(fields));
        }
    }

    private void tagged(DefaultMessageStore store, String topic, int queue, int code) throws Exception {
        MessageFilter filter = new MessageFilter() {
            @Override
            public boolean isMatchedByConsumeQueue(Long tagsCode, ConsumeQueueExt.CqExtUnit extension) {
                return tagsCode != null && tagsCode.intValue() == code && tagsCode == tagsCode.intValue();
            }

            @Override
            public boolean isMatchedByCommitLog(ByteBuffer buffer, Map<String, String> properties) {
                return true;
            }
        };
        long offset = store.getMinOffsetInQueue(topic, queue);
        while (offset < store.getMaxOffsetInQueue(topic, queue)) {
            GetMessageResult result = store.getMessage(GROUP, topic, queue, offset, PULL_MESSAGES, filter);
            for (ByteBuffer record : result.getMessageBufferList()) {
                out.println(JSON.toJSONString(Map.of("queue_offset", json.decode(record).getQueueOffset())));
            }
            offset = result.getNextBeginOffset();
            result.release();
        }
    }
}
