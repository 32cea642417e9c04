package commitmq.interop;

import com.alibaba.fastjson2.JSON;
import java.io.File;
import java.nio.file.Path;
import java.util.Properties;
import org.apache.rocketmq.common.BrokerConfig;
import org.apache.rocketmq.common.MixAll;
import org.apache.rocketmq.store.DefaultMessageStore;
import org.apache.rocketmq.store.config.MessageStoreConfig;
import org.apache.rocketmq.store.stats.BrokerStatsManager;

/** One store root opened by RocketMQ's own DefaultMessageStore, in the order in which a broker does it. */
final class OpenStore implements AutoCloseable {
    private static final long DISPATCH_DEADLINE_MS = 30_000;

    final DefaultMessageStore store;
    /** RocketMQ's answer to "did the run before end cleanly?", read before load() because start() makes the file anew. */
    final boolean abortFileFound;

    private OpenStore(DefaultMessageStore store, boolean abortFileFound) {
        this.store = store;
        this.abortFileFound = abortFileFound;
    }

    /** Load, recover and start; throws when RocketMQ refuses the store. */
    static OpenStore open(Path root, Properties settings) throws Exception {
        MessageStoreConfig config = new MessageStoreConfig();
        config.setStorePathRootDir(root.toString());
        config.setStorePathCommitLog(root.resolve("commitlog").toString());
        // No second broker listens to this one, so any free port will do for its replication service.
        config.setHaListenPort(0);
        config.setTimerWheelEnable(false);
        // A broker deletes expired segments by itself. A test's segments are never to go.
        config.setFileReservedTime(24 * 365);
        config.setDiskMaxUsedSpaceRatio(95);
        apply(settings, config);

        BrokerConfig broker = new BrokerConfig();
        broker.setBrokerName("b0");
        broker.setBrokerClusterName("C");
        boolean abortFileFound = new File(root.toFile(), "abort").exists();
        DefaultMessageStore store;
        // RocketMQ fills a static map while it makes a store: a broker has one, this program several at a time.
        synchronized (OpenStore.class) {
            store = new DefaultMessageStore(config,
                new BrokerStatsManager("C", false), (topic, queue, offset, tags, time, bitMap, properties) -> { },
                broker, ConfigFiles.topics(root.resolve("config")));
        }
        if (!store.load()) {
            throw new IllegalStateException("RocketMQ refuses to load the store: DefaultMessageStore.load() said false");
        }
        store.start();
        OpenStore open = new OpenStore(store, abortFileFound);
        open.awaitDispatch();
        return open;
    }

    /** Wait until ConsumeQueues and indexes have caught up with the log. */
    void awaitDispatch() throws InterruptedException {
        long deadline = System.currentTimeMillis() + DISPATCH_DEADLINE_MS;
        while (store.dispatchBehindBytes() > 0) {
            if (System.currentTimeMillis() > deadline) {
                throw new IllegalStateException(store.dispatchBehindBytes() + " bytes of the log are still not dispatched");
            }
            Thread.sleep(5);
        }
    }

    @Override
    public void close() {
        store.shutdown();
    }

    /** A broker's own way to apply settings, except that it ignores a misspelt key and this does not. */
    private static void apply(Properties settings, MessageStoreConfig config) {
        for (String key : settings.stringPropertyNames()) {
            String setter = "set" + Character.toUpperCase(key.charAt(0)) + key.substring(1);
            boolean known = false;
            for (var method : MessageStoreConfig.class.getMethods()) {
                known |= method.getName().equals(setter);
            }
            if (!known) {
                throw new IllegalArgumentException("RocketMQ's MessageStoreConfig has no key " + JSON.toJSONString(key));
            }
        }
        MixAll.properties2Object(settings, config);
    }
}
