package commitmq.interop;

import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.List;
import java.util.Map;
import java.util.Set;
import java.util.TreeMap;
import java.util.TreeSet;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.impl.MQClientAPIImpl;
import org.apache.rocketmq.client.trace.TraceView;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.common.message.MessageQueue;
import org.apache.rocketmq.remoting.RemotingClient;
import org.apache.rocketmq.remoting.protocol.RemotingCommand;
import org.apache.rocketmq.remoting.protocol.RemotingSerializable;
import org.apache.rocketmq.remoting.protocol.RequestCode;
import org.apache.rocketmq.remoting.protocol.body.Connection;
import org.apache.rocketmq.remoting.protocol.body.ConsumeMessageDirectlyResult;
import org.apache.rocketmq.remoting.protocol.body.ConsumerConnection;
import org.apache.rocketmq.remoting.protocol.body.ConsumerRunningInfo;
import org.apache.rocketmq.remoting.protocol.body.ProducerConnection;
import org.apache.rocketmq.remoting.protocol.body.ProducerInfo;
import org.apache.rocketmq.remoting.protocol.body.QueueTimeSpan;
import org.apache.rocketmq.remoting.protocol.body.SubscriptionGroupWrapper;
import org.apache.rocketmq.remoting.protocol.body.TopicConfigSerializeWrapper;
import org.apache.rocketmq.remoting.protocol.route.BrokerData;
import org.apache.rocketmq.remoting.protocol.route.TopicRouteData;
import org.apache.rocketmq.remoting.protocol.subscription.SubscriptionGroupConfig;
import org.apache.rocketmq.tools.admin.api.MessageTrack;

/**
 * The requests of RocketMQ's Dashboard, page by page, with its own class for them (DefaultMQAdminExt).
 *
 * Words: TOPIC, GROUP with a client, CLIENT, GROUP without one, GROUP with a dead letter, KEY, UNIQUE_ID and OFFSET_ID of a
 * message of TOPIC, UNIQUE_ID of a traced message.
 */
final class DashboardReplay extends Replay {
    private static final String MADE = "MadeByDashboard";
    private static final String MADE_GROUP = "GroupOfDashboard";

    private final String names;
    private final String address;
    private final String broker;
    private final String cluster;

    DashboardReplay(String names, String address, String broker, String cluster) {
        super(names, "dashboard");
        this.names = names;
        this.address = address;
        this.broker = broker;
        this.cluster = cluster;
    }

    @Override
    void replay(String[] words) throws Exception {
        String topic = words[0];
        String group = words[1];
        String client = words[2];
        clusterPage();
        topicPage(topic);
        topicChanges();
        groupPage(group, client, topic);
        groupPage(words[3], "nobody", topic);
        groupChanges(words[3], topic);
        producerPage(topic);
        messagePage(topic, words[5], words[6], words[7], group, client);
        tracePage(words[8]);
        deadLetterPage(words[4], group, client);
        operationsPage();
    }

    private void clusterPage() {
        step("cluster", () -> {
            Map<String, Object> found = new TreeMap<>();
            for (BrokerData one : admin.examineBrokerClusterInfo().getBrokerAddrTable().values()) {
                found.put(one.getCluster() + "/" + one.getBrokerName(), new TreeSet<>(one.getBrokerAddrs().keySet()).toString());
            }
            return found;
        });
        step("broker runtime: total rate", () ->
            admin.fetchBrokerRuntimeStats(address).getTable().get("getTotalTps").split(" ").length);
        step("broker settings", () -> {
            Map<String, Object> found = new TreeMap<>();
            for (String name : List.of("brokerName", "brokerClusterName", "brokerId", "brokerRole", "brokerPermission",
                "autoCreateTopicEnable", "autoCreateSubscriptionGroup", "messageDelayLevel", "fileReservedTime")) {
                found.put(name, admin.getBrokerConfig(address).getProperty(name));
            }
            return found;
        });
    }

    private void topicPage(String topic) {
        step("topics", () -> {
            Set<String> system = api().getSystemTopicList(20_000).getTopicList();
            Set<String> found = new TreeSet<>();
            for (String name : admin.fetchAllTopicList().getTopicList()) {
                if (!system.contains(name) && !name.startsWith("rmq_sys_")) {
                    found.add(name);
                }
            }
            return found;
        });
        step("types of topics", () -> {
            TopicConfigSerializeWrapper all = admin.getAllTopicConfig(address, 10_000);
            Set<String> system = api().getSystemTopicList(20_000).getTopicList();
            Map<String, Object> found = new TreeMap<>();
            all.getTopicConfigTable().forEach((name, config) -> {
                if (!system.contains(name) && !name.startsWith("rmq_sys_")) {
                    found.put(name, String.valueOf(config.getAttributes()));
                }
            });
            return found;
        });
        step("status", () -> byQueue(admin.examineTopicStats(topic).getOffsetTable(),
            one -> one.getMinOffset() + "-" + one.getMaxOffset() + " " + (one.getLastUpdateTimestamp() > 0)));
        step("route", () -> route(topic));
        step("groups of the topic", () -> new TreeSet<>(admin.queryTopicConsumeByWho(topic).getGroupList()));
        step("settings of the topic", () -> admin.examineTopicConfig(address, topic).toString());
        step("no such topic", () -> admin.examineTopicConfig(address, "NoSuchTopic").toString());
        step("no such topic's route", () -> route("NoSuchTopic"));
        step("no such topic's status", () -> admin.examineTopicStats(address, "NoSuchTopic"));
    }

    private void topicChanges() {
        step("make a topic", () -> {
            TopicConfig config = new TopicConfig(MADE, 3, 2, 6);
            config.setAttributes(Map.of("+message.type", "FIFO"));
            admin.createAndUpdateTopicConfig(address, config);
            return admin.examineTopicConfig(address, MADE).toString();
        });
        step("its route", () -> route(MADE));
        step("delete it in the broker", () -> {
            admin.deleteTopicInBroker(Set.of(address), MADE);
            return true;
        });
        step("delete it in the name server", () -> {
            admin.deleteTopicInNameServer(Set.of(names), MADE);
            return route(MADE);
        });
    }

    private Object route(String topic) throws Exception {
        TopicRouteData route = admin.examineTopicRouteInfo(topic);
        List<String> found = new ArrayList<>();
        route.getQueueDatas().forEach(one -> found.add(one.getBrokerName() + " " + one.getReadQueueNums() + " "
            + one.getWriteQueueNums() + " " + one.getPerm() + " " + one.getTopicSysFlag()));
        return found;
    }

    private void groupPage(String group, String client, String topic) {
        step(group + ": groups", () -> {
            // (without paging fields, as the Dashboard asks)
            RemotingCommand request =
                RemotingCommand.createRequestCommand(RequestCode.GET_ALL_SUBSCRIPTIONGROUP_CONFIG, null);
            RemotingCommand answer = remoting().invokeSync(address, request, 8_000);
            Set<String> found = new TreeSet<>();
            for (String name : RemotingSerializable.decode(answer.getBody(), SubscriptionGroupWrapper.class)
                .getSubscriptionGroupTable().keySet()) {
                if (!MixAll.isSysConsumerGroup(name) && !MixAll.isPredefinedGroup(name)) {
                    found.add(name);
                }
            }
            return found;
        });
        step(group + ": settings", () -> admin.examineSubscriptionGroupConfig(address, group).toString());
        step(group + ": progress", () -> byQueue(admin.examineConsumeStats(group).getOffsetTable(),
            one -> one.getBrokerOffset() + " " + one.getConsumerOffset() + " " + one.getPullOffset()));
        step(group + ": progress in the topic", () -> byQueue(admin.examineConsumeStats(group, topic).getOffsetTable(),
            one -> one.getBrokerOffset() + " " + one.getConsumerOffset() + " " + (one.getLastTimestamp() > 0)));
        step(group + ": clients", () -> {
            ConsumerConnection found = admin.examineConsumerConnectionInfo(group);
            Set<String> clients = new TreeSet<>();
            for (Connection one : found.getConnectionSet()) {
                clients.add(one.getClientId() + " " + one.getLanguage() + " " + one.getVersion());
            }
            Set<String> subscriptions = new TreeSet<>();
            found.getSubscriptionTable().values().forEach(one -> subscriptions.add(one.getTopic() + " " + one.getSubString()));
            return List.of(clients, subscriptions, found.getConsumeType(), found.getMessageModel(), found.getConsumeFromWhere());
        });
        step(group + ": running", () -> {
            ConsumerRunningInfo found = admin.getConsumerRunningInfo(group, client, true);
            Map<String, Object> queues = byQueue(found.getMqTable(), one -> one.getCommitOffset());
            queues.keySet().removeIf(name -> name.startsWith(MixAll.RETRY_GROUP_TOPIC_PREFIX));
            return List.of(queues, found.getJstack() != null && found.getJstack().length() > 100);
        });
        step(group + ": status", () -> {
            Map<String, Object> found = new TreeMap<>();
            admin.getConsumeStatus(topic, group, "").forEach((id, table) -> found.put(id, byQueue(table, one -> one)));
            return found;
        });
        step(group + ": times", () -> {
            Map<String, Object> found = new TreeMap<>();
            for (QueueTimeSpan one : admin.queryConsumeTimeSpan(topic, group)) {
                found.put("" + one.getMessageQueue().getQueueId(), List.of(one.getMinTimeStamp() > 0,
                    one.getMaxTimeStamp() >= one.getMinTimeStamp(), one.getConsumeTimeStamp() > 0, one.getDelayTime() > 0));
            }
            return found;
        });
        step(group + ": topics", () -> new TreeSet<>(admin.queryTopicsByConsumer(group).getTopicList()));
        step(group + ": subscription", () -> {
            var found = admin.querySubscription(group, topic);
            return found == null ? "none" : found.getTopic() + " " + found.getSubString() + " " + found.getExpressionType();
        });
    }

    private void groupChanges(String group, String topic) {
        step("make a group", () -> {
            SubscriptionGroupConfig config = new SubscriptionGroupConfig();
            config.setGroupName(MADE_GROUP);
            config.setRetryMaxTimes(7);
            config.setConsumeMessageOrderly(true);
            admin.createAndUpdateSubscriptionGroupConfig(address, config);
            return admin.examineSubscriptionGroupConfig(address, MADE_GROUP).toString();
        });
        step("clone offsets", () -> {
            admin.cloneGroupOffset(group, MADE_GROUP, topic, true);
            return byQueue(admin.examineConsumeStats(address, MADE_GROUP, topic, 5_000).getOffsetTable(),
                one -> one.getConsumerOffset());
        });
        step("reset to the beginning", () -> byQueue(admin.resetOffsetByTimestamp(topic, MADE_GROUP, 0, true), one -> one));
        step("reset to the end", () -> byQueue(admin.resetOffsetByTimestamp(topic, MADE_GROUP, -1, true), one -> one));
        step("reset of no group", () -> admin.resetOffsetByTimestamp(topic, "NoSuchGroup", -1, true));
        step("reset the old way", () -> {
            List<String> found = new ArrayList<>();
            admin.resetOffsetByTimestampOld(MADE_GROUP, topic, 0, true).forEach(one -> found.add(one.getQueueId() + " "
                + one.getBrokerOffset() + " " + one.getConsumerOffset() + " " + one.getRollbackOffset()));
            found.sort(null);
            return found;
        });
        step("delete the group", () -> {
            admin.deleteSubscriptionGroup(address, MADE_GROUP, true);
            for (String prefix : List.of(MixAll.RETRY_GROUP_TOPIC_PREFIX, MixAll.DLQ_GROUP_TOPIC_PREFIX)) {
                admin.deleteTopicInBroker(Set.of(address), prefix + MADE_GROUP);
                admin.deleteTopicInNameServer(Set.of(names), prefix + MADE_GROUP);
            }
            return new TreeSet<>(admin.queryTopicConsumeByWho(topic).getGroupList());
        });
    }

    private void producerPage(String topic) {
        step("producers", () -> {
            ProducerConnection found = admin.examineProducerConnectionInfo("PG", topic);
            List<String> clients = new ArrayList<>();
            found.getConnectionSet().forEach(one -> clients.add(one.getClientId() + " " + one.getLanguage()));
            return clients;
        });
        step("no producers", () -> admin.examineProducerConnectionInfo("NoSuchGroup", topic));
        step("all producers", () -> {
            List<String> clients = new ArrayList<>();
            for (ProducerInfo one : admin.getAllProducerInfo(address).getData().get("PG")) {
                clients.add(one.getClientId() + " " + one.getLanguage() + " " + one.getVersion());
            }
            return clients;
        });
    }

    private void messagePage(String topic, String key, String unique, String offsetId, String group, String client) {
        step("messages of a time", () -> messages(topic, 0, System.currentTimeMillis()));
        step("messages of no time", () -> messages(topic, 1_000, 2_000));
        step("messages of a key", () -> bodies(admin.queryMessage(topic, key, 64, 0, System.currentTimeMillis()).getMessageList()));
        step("messages of no key", () ->
            bodies(admin.queryMessage(topic, "NoSuchKey", 64, 0, System.currentTimeMillis()).getMessageList()));
        for (String id : List.of(unique, offsetId)) {
            String kind = id.equals(unique) ? "unique id" : "offset id";
            step("message of a " + kind, () -> body(admin.viewMessage(topic, id)));
            step("its tracks by " + kind, () -> tracks(admin.viewMessage(topic, id)));
            step("consumed again by " + kind, () -> direct(admin.consumeMessageDirectly(group, client, topic, id)));
        }
        step("message of no id", () -> body(admin.viewMessage(topic, unique.substring(0, unique.length() - 4) + "FFFF")));
        step("consumed again by nobody", () -> direct(admin.consumeMessageDirectly(group, "nobody", topic, offsetId)));
    }

    private void tracePage(String traced) {
        step("trace", () -> {
            Set<String> found = new TreeSet<>();
            long now = System.currentTimeMillis();
            for (MessageExt one : admin.queryMessage("RMQ_SYS_TRACE_TOPIC", traced, 64, 0, now).getMessageList()) {
                for (TraceView view : TraceView.decodeFromTraceTransData(traced, one)) {
                    found.add(view.getMsgType() + " " + view.getGroupName() + " " + view.getTopic() + " " + view.getStatus());
                }
            }
            return found;
        });
    }

    private void deadLetterPage(String group, String other, String client) {
        String dead = MixAll.DLQ_GROUP_TOPIC_PREFIX + group;
        step("no dead letters", () -> route(MixAll.DLQ_GROUP_TOPIC_PREFIX + other));
        step("dead letters", () -> messages(dead, 0, System.currentTimeMillis()));
        step("a dead letter", () -> {
            MessageExt letter = letters(dead).get(0);
            return body(letter) + " " + letter.getProperty("RETRY_TOPIC") + " " + letter.getReconsumeTimes();
        });
        step("consumed again", () -> direct(
            admin.consumeMessageDirectly(other, client, dead, letters(dead).get(0).getMsgId())));
    }

    private void operationsPage() {
        step("order of a topic", () -> {
            admin.createOrUpdateOrderConf("Ordered", broker + ":4", true);
            return admin.getKVConfig("ORDER_TOPIC_CONFIG", "Ordered");
        });
        step("orders", () -> new TreeMap<>(admin.getKVListByNamespace("ORDER_TOPIC_CONFIG").getTable()).toString());
        step("no order", () -> {
            admin.deleteKvConfig("ORDER_TOPIC_CONFIG", "Ordered");
            return admin.getKVConfig("ORDER_TOPIC_CONFIG", "Ordered");
        });
        step("wiped", () -> admin.wipeWritePermOfBroker(names, broker) > 0);
        step("added", () -> admin.addWritePermOfBroker(names, broker) > 0);
        step("clusters", () -> admin.getClusterList("DefaultCluster").contains(cluster));
    }

    // ------------------------------------------------------------ messages

    private Object messages(String topic, long begin, long end) throws Exception {
        List<String> found = new ArrayList<>();
        for (MessageExt one : pulled(topic, begin, end)) {
            found.add(one.getQueueId() + "@" + one.getQueueOffset() + " " + body(one) + " " + one.getTags() + " " + one.getKeys());
        }
        found.sort(null);
        return found;
    }

    private List<MessageExt> letters(String topic) throws Exception {
        return pulled(topic, 0, System.currentTimeMillis());
    }

    /** As the Dashboard reads a topic: by the offsets of two times. */
    private List<MessageExt> pulled(String topic, long begin, long end) throws Exception {
        DefaultMQPullConsumer consumer = new DefaultMQPullConsumer(MixAll.TOOLS_CONSUMER_GROUP);
        consumer.setNamesrvAddr(names);
        consumer.setInstanceName("dashboard-" + System.nanoTime());
        consumer.start();
        List<MessageExt> found = new ArrayList<>();
        try {
            for (MessageQueue queue : consumer.fetchSubscribeMessageQueues(topic)) {
                long last = consumer.searchOffset(queue, end);
                for (long offset = consumer.searchOffset(queue, begin); offset <= last; ) {
                    PullResult pulled = consumer.pull(queue, "*", offset, 32);
                    offset = pulled.getNextBeginOffset();
                    if (pulled.getPullStatus() != PullStatus.FOUND) {
                        break;
                    }
                    for (MessageExt one : pulled.getMsgFoundList()) {
                        if (one.getStoreTimestamp() >= begin && one.getStoreTimestamp() <= end) {
                            found.add(one);
                        }
                    }
                }
            }
        } finally {
            consumer.shutdown();
        }
        return found;
    }

    private Object tracks(MessageExt message) throws Exception {
        Set<String> found = new TreeSet<>();
        for (MessageTrack one : admin.messageTrackDetail(message)) {
            found.add(one.getConsumerGroup() + " " + one.getTrackType() + " " + one.getExceptionDesc());
        }
        return found;
    }

    private static Object direct(ConsumeMessageDirectlyResult result) {
        return result.getConsumeResult() + " " + result.isOrder() + " " + result.isAutoCommit();
    }

    private static Object bodies(List<MessageExt> messages) {
        Set<String> found = new TreeSet<>();
        messages.forEach(one -> found.add(body(one)));
        return found;
    }

    private static String body(MessageExt message) {
        return message == null ? "none" : new String(message.getBody(), StandardCharsets.UTF_8);
    }

    private MQClientAPIImpl api() {
        return admin.getDefaultMQAdminExtImpl().getMqClientInstance().getMQClientAPIImpl();
    }

    private RemotingClient remoting() {
        return api().getRemotingClient();
    }
}
