package commitmq.bench.rocketmq;

import commitmq.bench.Driver;

/** Loads RocketMQ with its own Java client; see {@link Driver} for the command line. */
public final class RocketMqDriver {
    private RocketMqDriver() {}

    public static void main(String[] arguments) {
        Driver.main(arguments, RocketMqPeer::new);
    }
}
