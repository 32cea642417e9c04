package commitmq.interop;

import com.alibaba.fastjson2.JSON;
import java.io.IOException;
import java.nio.charset.StandardCharsets;
import java.nio.file.Files;
import java.nio.file.Path;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.concurrent.ConcurrentMap;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;
import org.apache.rocketmq.remoting.protocol.body.ConsumerOffsetSerializeWrapper;
import org.apache.rocketmq.remoting.protocol.body.SubscriptionGroupWrapper;
import org.apache.rocketmq.remoting.protocol.body.TopicConfigSerializeWrapper;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;

/** The JSON files under config/, decoded with RocketMQ's own classes and its own fallback to the .bak file. */
final class ConfigFiles {
    private ConfigFiles() {
    }

    static ConcurrentMap<String, TopicConfig> topics(Path folder) throws IOException {
        return decode(folder, "topics.json", TopicConfigSerializeWrapper.class).getTopicConfigTable();
    }

    /** All three tables as one JSON object; offsets as [topic@group, queue id, next offset]. */
    static String line(Path folder) throws IOException {
        Map<String, Object> tables = new LinkedHashMap<>();
        List<Object> topics = new ArrayList<>();
        for (TopicConfig topic : new TreeMap<>(topics(folder)).values()) {
            topics.add(List.of(topic.getTopicName(), topic.getReadQueueNums(), topic.getWriteQueueNums(),
                topic.getPerm(), topic.getTopicFilterType().name(), topic.getTopicSysFlag(), topic.isOrder(),
                topic.getAttributes()));
        }
        tables.put("topics", topics);
        List<Object> groups = new ArrayList<>();
        for (SubscriptionGroupConfig group : new TreeMap<>(decode(folder, "subscriptionGroup.json",
            SubscriptionGroupWrapper.class).getSubscriptionGroupTable()).values()) {
            groups.add(List.of(group.getGroupName(), group.isConsumeEnable(), group.getRetryQueueNums(),
                group.getRetryMaxTimes(), group.getConsumeTimeoutMinute()));
        }
        tables.put("groups", groups);
        List<Object> offsets = new ArrayList<>();
        new TreeMap<>(decode(folder, "consumerOffset.json", ConsumerOffsetSerializeWrapper.class).getOffsetTable())
            .forEach((key, queues) -> new TreeMap<>(queues)
                .forEach((queue, offset) -> offsets.add(List.of(key, queue, offset))));
        tables.put("offsets", offsets);
        return JSON.toJSONString(tables);
    }

    private static <T extends RemotingSerializable> T decode(Path folder, String name, Class<T> type) throws IOException {
        for (String candidate : new String[] {name, name + ".bak"}) {
            Path file = folder.resolve(candidate);
            if (Files.exists(file) && Files.size(file) > 0) {
                return RemotingSerializable.fromJson(Files.readString(file, StandardCharsets.UTF_8), type);
            }
        }
        return RemotingSerializable.fromJson("{}", type);
    }
}
