package commitmq.bench.rocketmq;

import commitmq.bench.Peer;
import commitmq.bench.Semantics;
import java.util.Properties;
import org.apache.rocketmq.client.consumer.DefaultMQPushConsumer;
import org.apache.rocketmq.client.consumer.listener.ConsumeConcurrentlyStatus;
import org.apache.rocketmq.client.consumer.listener.MessageListenerConcurrently;
import org.apache.rocketmq.client.producer.DefaultMQProducer;
import org.apache.rocketmq.client.producer.LocalTransactionState;
import org.apache.rocketmq.client.producer.SendStatus;
import org.apache.rocketmq.client.producer.TransactionListener;
import org.apache.rocketmq.client.producer.TransactionMQProducer;
import org.apache.rocketmq.client.producer.TransactionSendResult;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.common.consumer.ConsumeFromWhere;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageExt;
import org.apache.rocketmq.tools.admin.DefaultMQAdminExt;

/** Delays, transactions, shared queues and retries through RocketMQ's own clients. */
final class RocketMqSemantics implements Semantics {
    private static final int FIRST_LEVEL = 1;

    private final String nameServer;
    private final String brokerAddress;
    private final DefaultMQAdminExt admin;
    private final Properties producerSettings;
    private final Properties handlerSettings;

    RocketMqSemantics(
            String nameServer,
            String brokerAddress,
            DefaultMQAdminExt admin,
            Properties producerSettings,
            Properties handlerSettings) {
        this.nameServer = nameServer;
        this.brokerAddress = brokerAddress;
        this.admin = admin;
        this.producerSettings = producerSettings;
        this.handlerSettings = handlerSettings;
    }

    @Override
    public Delayer delayer(String topic) throws Exception {
        DefaultMQProducer producer = started(new DefaultMQProducer("bench-delayer"));
        return new Delayer() {
            @Override
            public void submit(byte[] body, long deliverAtMs, Peer.Done done) throws Exception {
                Message message = new Message(topic, body);
                message.setDeliverTimeMs(deliverAtMs);
                producer.send(message, new RocketMqWriter.Ended(done));
            }

            @Override
            public void close() {
                producer.shutdown();
            }
        };
    }

    @Override
    public long waiting() throws Exception {
        String found = admin.fetchBrokerRuntimeStats(brokerAddress).getTable().get("timerCongestNum");
        return found == null ? 0 : Long.parseLong(found);
    }

    @Override
    public Transactor transactor(String topic) throws Exception {
        TransactionMQProducer producer = new TransactionMQProducer("bench-transactions");
        producer.setTransactionListener(new Committing());
        started(producer);
        return new Transactor() {
            @Override
            public void commit(byte[] body) throws Exception {
                TransactionSendResult sent = producer.sendMessageInTransaction(new Message(topic, body), null);
                if (sent.getSendStatus() != SendStatus.SEND_OK) {
                    throw new IllegalStateException(sent.toString());
                }
            }

            @Override
            public void close() {
                producer.shutdown();
            }
        };
    }

    @Override
    public Sharer sharer(String topic, String group) throws Exception {
        return new RocketMqSharer(started(new DefaultMQProducer("bench-sharer")), brokerAddress, topic, group);
    }

    @Override
    public AutoCloseable handling(String topic, String group, Handler handler) throws Exception {
        DefaultMQPushConsumer consumer = new DefaultMQPushConsumer(group);
        consumer.setNamesrvAddr(nameServer);
        MixAll.properties2Object(handlerSettings, consumer);
        consumer.setConsumeFromWhere(ConsumeFromWhere.CONSUME_FROM_FIRST_OFFSET);
        consumer.subscribe(topic, "*");
        consumer.registerMessageListener((MessageListenerConcurrently) (messages, context) -> {
            boolean good = true;
            for (MessageExt message : messages) {
                good &= handler.handle(message.getBody(), message.getReconsumeTimes());
            }
            context.setDelayLevelWhenNextConsume(FIRST_LEVEL);
            return good ? ConsumeConcurrentlyStatus.CONSUME_SUCCESS : ConsumeConcurrentlyStatus.RECONSUME_LATER;
        });
        consumer.start();
        return consumer::shutdown;
    }

    private <T extends DefaultMQProducer> T started(T producer) throws Exception {
        producer.setNamesrvAddr(nameServer);
        MixAll.properties2Object(producerSettings, producer);
        producer.start();
        return producer;
    }

    /** Commits everything. */
    private static final class Committing implements TransactionListener {
        @Override
        public LocalTransactionState executeLocalTransaction(Message message, Object argument) {
            return LocalTransactionState.COMMIT_MESSAGE;
        }

        @Override
        public LocalTransactionState checkLocalTransaction(MessageExt message) {
            return LocalTransactionState.COMMIT_MESSAGE;
        }
    }
}
