package commitmq.interop;

import java.util.List;
import java.util.Map;
import java.util.TreeMap;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.protocol.admin.ConsumeStats;
import org.apache.rocketmq.remoting.protocol.admin.OffsetWrapper;
import org.apache.rocketmq.remoting.protocol.body.BrokerStatsData;

/** The requests of RocketMQ's exporter for the topics that are named, and its strict reading of a broker's figures. */
final class ExporterReplay extends Replay {
    private static final List<String> INTEGERS = List.of("msgPutTotalTodayNow", "msgGetTotalTodayNow", "dispatchBehindBytes",
        "putMessageSizeTotal", "sendThreadPoolQueueSize", "sendThreadPoolQueueCapacity", "pullThreadPoolQueueSize",
        "pullThreadPoolQueueCapacity", "queryThreadPoolQueueSize", "queryThreadPoolQueueCapacity", "bootTimestamp",
        "sendThreadPoolQueueHeadWaitTimeMills", "pullThreadPoolQueueHeadWaitTimeMills",
        "queryThreadPoolQueueHeadWaitTimeMills", "msgPutTotalYesterdayMorning", "msgGetTotalYesterdayMorning",
        "msgPutTotalTodayMorning", "msgGetTotalTodayMorning", "commitLogMinOffset", "commitLogMaxOffset",
        "dispatchMaxBuffer", "pageCacheLockTimeMills", "getMessageEntireTimeMax", "putMessageEntireTimeMax",
        "putMessageTimesTotal", "startAcceptSendRequestTimeStamp", "earliestMessageTimeStamp",
        "remainTransientStoreBufferNumbs");
    private static final List<String> FRACTIONS =
        List.of("consumeQueueDiskRatio", "commitLogDiskRatio", "putMessageAverageSize", "putLatency99", "putLatency999");
    private static final List<String> RATES = List.of("putTps", "getMissTps", "getTransferredTps", "getTotalTps", "getFoundTps");

    private final String names;
    private final String address;
    private final String cluster;

    ExporterReplay(String names, String address, String cluster) {
        super(names, "exporter");
        this.names = names;
        this.address = address;
        this.cluster = cluster;
    }

    @Override
    void replay(String[] topics) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(MixAll.TOOLS_CONSUMER_GROUP);
        consumer.setNamesrvAddr(names);
        consumer.setInstanceName("exporter-reads");
        consumer.start();
        try {
            for (String topic : topics) {
                step(topic, () -> byQueue(admin.examineTopicStats(topic).getOffsetTable(), one -> one.getMaxOffset()));
                for (String name : List.of("TOPIC_PUT_NUMS", "TOPIC_PUT_SIZE")) {
                    step(topic + ": " + name, () -> figures(name, topic));
                }
                for (String group : new TreeSet<>(admin.queryTopicConsumeByWho(topic).getGroupList())) {
                    group(consumer, topic, group);
                }
            }
        } finally {
            consumer.shutdown();
        }
        step("producers", () -> new TreeSet<>(admin.getAllProducerInfo(address).getData().keySet()).contains("PG"));
        for (String name : List.of("BROKER_PUT_NUMS", "BROKER_GET_NUMS")) {
            step(name, () -> admin.viewBrokerStatsData(address, name, cluster).getStatsMinute().getSum() > 0);
        }
        step("figures of the broker", () -> strictly(admin.fetchBrokerRuntimeStats(address).getTable()));
    }

    private void group(DefaultMQPullConsumer consumer, String topic, String group) {
        String at = topic + "@" + group;
        step(at + ": clients", () -> admin.examineConsumerConnectionInfo(group).getConnectionSet().size());
        step(at + ": offsets", () -> {
            ConsumeStats found = admin.examineConsumeStats(group, topic);
            return List.of(found.computeTotalDiff(), byQueue(found.getOffsetTable(), OffsetWrapper::getConsumerOffset));
        });
        step(at + ": next messages", () -> {
            Map<String, Object> found = new TreeMap<>();
            for (Map.Entry<MessageQueue, OffsetWrapper> one : admin.examineConsumeStats(group, topic).getOffsetTable().entrySet()) {
                PullResult pulled = consumer.pull(one.getKey(), "*", one.getValue().getConsumerOffset(), 1);
                found.put("" + one.getKey().getQueueId(), String.valueOf(pulled.getPullStatus()));
            }
            return found;
        });
        for (String name : List.of("GROUP_GET_NUMS", "GROUP_GET_SIZE", "SNDBCK_PUT_NUMS", "GROUP_ACK_NUMS", "GROUP_CK_NUMS")) {
            step(at + ": " + name, () -> figures(name, at));
        }
    }

    /** The count of the last minute, and whether it has a rate. */
    private Object figures(String name, String key) throws Exception {
        BrokerStatsData found = admin.viewBrokerStatsData(address, name, key);
        return List.of(found.getStatsMinute().getSum(), found.getStatsMinute().getTps() > 0);
    }

    /** As the exporter's BrokerRuntimeStats reads them: anything that it cannot read is an exception. */
    private static Object strictly(Map<String, String> table) {
        INTEGERS.forEach(name -> Long.parseLong(table.get(name)));
        FRACTIONS.forEach(name -> Double.parseDouble(table.get(name)));
        for (String name : RATES) {
            for (String rate : table.get(name).split(" ")) {
                Double.parseDouble(rate);
            }
        }
        Double.parseDouble(table.get("remainHowManyDataToFlush").split(" ")[0]);
        String[] capacity = table.get("commitLogDirCapacity").split(" ");
        Double.parseDouble(capacity[2]);
        Double.parseDouble(capacity[6]);
        int parts = 0;
        for (String part : table.get("putMessageDistributeTime").split(" ")) {
            Integer.parseInt(part.split(":")[1]);
            parts++;
        }
        table.forEach((name, value) -> {
            if (name.startsWith("scheduleMessageOffset")) {
                Long.parseLong(value.split(",")[0]);
                Long.parseLong(value.split(",")[1]);
            }
        });
        return parts + " " + table.get("brokerVersionDesc") + " " + table.get("brokerActive");
    }
}
