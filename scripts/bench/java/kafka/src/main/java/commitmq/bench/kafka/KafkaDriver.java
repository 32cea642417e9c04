package commitmq.bench.kafka;

import commitmq.bench.Driver;

/** Loads Kafka with its own Java client; see {@link Driver} for the command line. */
public final class KafkaDriver {
    private KafkaDriver() {}

    public static void main(String[] arguments) {
        Driver.main(arguments, KafkaPeer::new);
    }
}
