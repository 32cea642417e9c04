package commitmq.bench.rocketmq;

import commitmq.bench.Peer;
import commitmq.bench.Request;
import commitmq.bench.Semantics;
import commitmq.bench.Settings;
import java.util.Arrays;
import java.util.Collection;
import org.apache.rocketmq.client.QueryResult;
import org.apache.rocketmq.client.consumer.DefaultMQPullConsumer;
import org.apache.rocketmq.client.consumer.PullResult;
import org.apache.rocketmq.client.consumer.PullStatus;
import org.apache.rocketmq.client.exception.MQClientException;
import org.apache.rocketmq.client.producer.SendResult;
import org.apache.rocketmq.common.TopicConfig;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.remoting.protocol.admin.TopicOffset;
import org.apache.rocketmq.remoting.protocol.route.BrokerData;
import org.apache.rocketmq.remoting.protocol.route.QueueData;
import org.apache.rocketmq.remoting.protocol.route.TopicRouteData;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** RocketMQ through its "remoting" client, which its documentation calls the fastest. The address is the name server's. */
final class RocketMqPeer implements Peer {
    private static final long ROUTE_TIMEOUT_MS = 30_000;
    private static final long BROKER_TIMEOUT_MS = 45_000;
    private static final int ADMIN_TIMEOUT_MS = 20_000;
    private static final int MATCHES = 32;
    private static final int READ_BACK_TIMEOUT_MS = 1000;

    private final String nameServer;
    private final Settings settings;
    private DefaultMQAdminExt admin;
    private Semantics semantics;
    private RocketMqWriter roundTripWriter;
    private DefaultMQPullConsumer roundTripReader;

    RocketMqPeer(Request request, Settings settings) {
        this.nameServer = request.address();
        this.settings = settings;
    }

    @Override
    public void createTopic(String topic, int queues) throws Exception {
        if (routed(topic) > 0) {
            return;
        }
        for (BrokerData broker : brokers()) {
            TopicConfig config = new TopicConfig(topic, queues, queues);
            admin().createAndUpdateTopicConfig(broker.selectBrokerAddr(), config);
        }
        for (long deadline = System.currentTimeMillis() + ROUTE_TIMEOUT_MS; routed(topic) < queues; Thread.sleep(10)) {
            if (System.currentTimeMillis() > deadline) {
                throw new IllegalStateException("the name server has no route to the new topic " + topic);
            }
        }
    }

    /** A broker whose first word to the name server was lost says it again every 30 seconds. */
    private Collection<BrokerData> brokers() throws Exception {
        for (long deadline = System.currentTimeMillis() + BROKER_TIMEOUT_MS; ; Thread.sleep(50)) {
            var brokers = admin().examineBrokerClusterInfo().getBrokerAddrTable().values();
            if (!brokers.isEmpty()) {
                return brokers;
            }
            if (System.currentTimeMillis() > deadline) {
                throw new IllegalStateException("no broker has told the name server about itself");
            }
        }
    }

    @Override
    public Writer writer(String topic, Use use) throws Exception {
        return new RocketMqWriter(nameServer, topic, settings.producer(use));
    }

    @Override
    public Reader reader(String topic, boolean atEnd) throws Exception {
        return new RocketMqReader(nameServer, topic, atEnd, settings.consumer());
    }

    @Override
    public long readable(String topic) throws Exception {
        // The ends of the ConsumeQueues: a message is behind them before it can be read.
        return admin().examineTopicStats(topic).getOffsetTable().values().stream()
                .mapToLong(TopicOffset::getMaxOffset)
                .sum();
    }

    @Override
    @SuppressWarnings("deprecation") // The newer consumer has no way to read at one offset and no other.
    public void roundTrip(String topic, byte[] body) throws Exception {
        if (roundTripWriter == null) {
            roundTripWriter = new RocketMqWriter(nameServer, topic, settings.producer(Use.SINGLE));
        }
        if (roundTripReader == null) {
            DefaultMQPullConsumer reader = new DefaultMQPullConsumer("bench-ready");
            reader.setNamesrvAddr(nameServer);
            reader.start();
            roundTripReader = reader;
        }
        SendResult sent = roundTripWriter.sendOne(new Message(topic, body), READ_BACK_TIMEOUT_MS);
        long deadline = System.currentTimeMillis() + READ_BACK_TIMEOUT_MS;
        PullResult found;
        do {
            found = roundTripReader.pull(sent.getMessageQueue(), "*", sent.getQueueOffset(), 1, READ_BACK_TIMEOUT_MS);
        } while (found.getPullStatus() != PullStatus.FOUND && System.currentTimeMillis() < deadline);
        if (found.getPullStatus() != PullStatus.FOUND
                || !Arrays.equals(found.getMsgFoundList().get(0).getBody(), body)) {
            throw new IllegalStateException("the message that was sent did not come back: " + found);
        }
    }

    @Override
    public int lookUp(String topic, String key) throws Exception {
        try {
            QueryResult found = admin().queryMessage(topic, key, MATCHES, 0, Long.MAX_VALUE);
            return found.getMessageList().size();
        } catch (MQClientException nothingFound) {
            return 0;
        }
    }

    @Override
    public Semantics semantics() throws Exception {
        if (semantics == null) {
            semantics = new RocketMqSemantics(
                    nameServer,
                    brokers().iterator().next().selectBrokerAddr(),
                    admin(),
                    settings.producer(Use.SINGLE),
                    settings.handler());
        }
        return semantics;
    }

    @Override
    public void close() {
        // The process ends right after; a shutdown in order would only wait for heartbeats.
    }

    /** How many queues the name server knows of a topic, 0 if it does not know it. */
    private int routed(String topic) throws Exception {
        try {
            TopicRouteData route = admin().examineTopicRouteInfo(topic);
            return route.getQueueDatas().stream().mapToInt(QueueData::getReadQueueNums).sum();
        } catch (MQClientException unknown) {
            return 0;
        }
    }

    private DefaultMQAdminExt admin() throws Exception {
        if (admin == null) {
            DefaultMQAdminExt opened = new DefaultMQAdminExt(ADMIN_TIMEOUT_MS);
            opened.setNamesrvAddr(nameServer);
            opened.setInstanceName("bench-admin-" + System.nanoTime());
            opened.start();
            admin = opened;
        }
        return admin;
    }
}
