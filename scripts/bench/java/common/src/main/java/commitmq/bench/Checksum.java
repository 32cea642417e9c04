package commitmq.bench;

import java.util.zip.CRC32;

/** Counts bodies and bytes and touches every byte; see {@link Bodies#checksum}. */
final class Checksum implements Peer.Sink {
    private final CRC32 crc = new CRC32();
    private long messages;
    private long bytes;
    private long sum;

    @Override
    public void accept(byte[] array, int at, int length) {
        crc.reset();
        crc.update(array, at, length);
        sum += crc.getValue();
        bytes += length;
        messages++;
    }

    long messages() {
        return messages;
    }

    long bytes() {
        return bytes;
    }

    long sum() {
        return sum;
    }
}
