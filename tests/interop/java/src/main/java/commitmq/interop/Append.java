package commitmq.interop;

import com.alibaba.fastjson2.JSON;
import java.net.InetSocketAddress;
import java.nio.ByteBuffer;
import java.nio.charset.StandardCharsets;
import java.util.ArrayList;
import java.util.LinkedHashMap;
import java.util.List;
import java.util.Map;
import org.apache.rocketmq.common.message.Message;
import org.apache.rocketmq.common.message.MessageAccessor;
import org.apache.rocketmq.common.message.MessageConst;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExtBatch;
import org.apache.rocketmq.common.message.MessageExtBrokerInner;
import org.apache.rocketmq.common.sysflag.MessageSysFlag;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.PutMessageResult;
import org.apache.rocketmq.store.PutMessageStatus;

/** Puts messages of RocketMQ's own into an open store: single ones and one batch. */
final class Append {
    private static final InetSocketAddress BORN = new InetSocketAddress("127.0.0.1", 40000);
    private static final InetSocketAddress STORE = new InetSocketAddress("127.0.0.1", 10911);

    private final DefaultMessageStore store;
    private final String topic;
    private final int queue;

    Append(DefaultMessageStore store, String topic, int queue) {
        this.store = store;
        this.topic = topic;
        this.queue = queue;
    }

    /** Store {@code count} single messages, then as many in one batch; give one JSON line for each put. */
    List<String> run(int count) {
        List<String> lines = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            lines.add(line("single", 1, store.putMessage(single(i))));
        }
        lines.add(line("batch", count, store.putMessages(batch(count))));
        return lines;
    }

    /** Store {@code count} inner batches of 1, 2, … messages, in the way in which a broker does it for BatchCQ topics. */
    List<String> innerBatches(int count) {
        List<String> lines = new ArrayList<>();
        for (int number = 1; number <= count; number++) {
            MessageExtBatch batch = batch(number);
            MessageAccessor.putProperty(batch, MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX,
                String.format("7F000001000000000000B%011d", number));
            batch.setSysFlag(MessageSysFlag.NEED_UNWRAP_FLAG | MessageSysFlag.INNER_BATCH_FLAG);
            batch.setInnerBatch(true);
            MessageAccessor.putProperty(batch, MessageConst.PROPERTY_INNER_NUM,
                String.valueOf(MessageDecoder.countInnerMsgNum(ByteBuffer.wrap(batch.getBody()))));
            batch.setPropertiesString(MessageDecoder.messageProperties2String(batch.getProperties()));
            lines.add(line("inner", number, store.putMessage(batch)));
        }
        return lines;
    }

    /** Store {@code count} messages that go to the LMQs {@code names} too. */
    List<String> light(int count, String names) {
        List<String> lines = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            MessageExtBrokerInner message = single(i);
            MessageAccessor.putProperty(message, MessageConst.PROPERTY_INNER_MULTI_DISPATCH, names);
            message.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
            lines.add(line("light", 1, store.putMessage(message)));
        }
        return lines;
    }

    private MessageExtBrokerInner single(int i) {
        Message message = message("single", i);
        MessageExtBrokerInner inner = new MessageExtBrokerInner();
        inner.setBody(message.getBody());
        inner.setFlag(i);
        MessageAccessor.setProperties(inner, message.getProperties());
        inner.setPropertiesString(MessageDecoder.messageProperties2String(message.getProperties()));
        inner.setTagsCode(message.getTags().hashCode());
        fill(inner);
        return inner;
    }

    private MessageExtBatch batch(int count) {
        List<Message> messages = new ArrayList<>();
        for (int i = 0; i < count; i++) {
            messages.add(message("batch", i));
        }
        MessageExtBatch batch = new MessageExtBatch();
        batch.setBody(MessageDecoder.encodeMessages(messages));
        fill(batch);
        return batch;
    }

    private Message message(String kind, int i) {
        Message message = new Message(topic, ("rocketmq " + kind + " " + i).getBytes(StandardCharsets.UTF_8));
        message.setTags("Tag-🚀-" + i % 3);
        message.setKeys("java-key-" + kind + "-" + i);
        message.putUserProperty("writer", "rocketmq");
        message.setWaitStoreMsgOK(true);
        MessageAccessor.putProperty(message, MessageConst.PROPERTY_UNIQ_CLIENT_MESSAGE_ID_KEYIDX,
            String.format("7F000001000000000000%s%011d", kind.charAt(0), i));
        return message;
    }

    private void fill(MessageExtBrokerInner inner) {
        inner.setTopic(topic);
        inner.setQueueId(queue);
        inner.setBornTimestamp(System.currentTimeMillis());
        inner.setBornHost(BORN);
        inner.setStoreHost(STORE);
    }

    private String line(String kind, int count, PutMessageResult result) {
        if (result.getPutMessageStatus() != PutMessageStatus.PUT_OK) {
            throw new IllegalStateException("RocketMQ could not append: " + result.getPutMessageStatus());
        }
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("kind", kind);
        fields.put("count", count);
        fields.put("queue_offset", result.getAppendMessageResult().getLogicsOffset());
        fields.put("physical_offset", result.getAppendMessageResult().getWroteOffset());
        fields.put("bytes", result.getAppendMessageResult().getWroteBytes());
        return JSON.toJSONString(fields);
    }
}
