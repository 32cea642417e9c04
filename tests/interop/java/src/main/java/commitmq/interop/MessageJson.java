package commitmq.interop;

import com.alibaba.fastjson2.JSON;
import java.net.InetSocketAddress;
import java.net.SocketAddress;
import java.nio.ByteBuffer;
import java.util.HexFormat;
import java.util.LinkedHashMap;
import java.util.Map;
import java.util.TreeMap;
import org.apache.rocketmq.common.message.MessageDecoder;
import org.apache.rocketmq.common.message.MessageExt;

/** One message as one JSON line, with the field names of the golden stores' messages.jsonl. */
final class MessageJson {
    boolean withHosts;
    boolean inflate;

    /** Decode one stored record with RocketMQ's decoder, the body's CRC checked. */
    MessageExt decode(ByteBuffer record) {
        MessageExt message = MessageDecoder.decode(record, true, inflate, false, false, true);
        if (message == null) {
            throw new IllegalStateException("RocketMQ's MessageDecoder refuses the record (length, magic or body CRC)");
        }
        return message;
    }

    String line(MessageExt message) {
        Map<String, Object> fields = new LinkedHashMap<>();
        fields.put("topic", message.getTopic());
        fields.put("queue_id", message.getQueueId());
        fields.put("queue_offset", message.getQueueOffset());
        fields.put("physical_offset", message.getCommitLogOffset());
        fields.put("total_size", message.getStoreSize());
        fields.put("sys_flag", message.getSysFlag());
        fields.put("flag", message.getFlag());
        fields.put("born_timestamp", message.getBornTimestamp());
        fields.put("store_timestamp", message.getStoreTimestamp());
        fields.put("body_crc", message.getBodyCRC());
        fields.put("reconsume_times", message.getReconsumeTimes());
        fields.put("prepared_transaction_offset", message.getPreparedTransactionOffset());
        fields.put("offset_msg_id", message.getMsgId());
        // A record without properties has no map at all.
        Map<String, String> properties = message.getProperties();
        fields.put("properties", properties == null ? Map.of() : new TreeMap<>(properties));
        byte[] body = message.getBody();
        fields.put("body_hex", HexFormat.of().formatHex(body == null ? new byte[0] : body));
        if (withHosts) {
            fields.put("born_host", host(message.getBornHost()));
            fields.put("store_host", host(message.getStoreHost()));
        }
        return JSON.toJSONString(fields);
    }

    private static String host(SocketAddress address) {
        InetSocketAddress internet = (InetSocketAddress) address;
        return internet.getAddress().getHostAddress() + " " + internet.getPort();
    }
}
