package commitmq.bench;

import java.util.Random;
import java.util.zip.CRC32;

/** A pool of different printable bodies, made before any clock starts, and the checksum of each. */
public final class Bodies {
    private static final int POOL = 64;

    private final byte[][] pool = new byte[POOL][];
    private final long[] checksums = new long[POOL];

    public Bodies(int bodyBytes, long seed) {
        Random random = new Random(seed);
        for (int i = 0; i < POOL; i++) {
            pool[i] = new byte[bodyBytes];
            for (int at = 0; at < bodyBytes; at++) {
                pool[i][at] = (byte) (' ' + random.nextInt('~' - ' ' + 1));
            }
            CRC32 crc = new CRC32();
            crc.update(pool[i]);
            checksums[i] = crc.getValue();
        }
    }

    /** The body of the message with this number; not to be written to. */
    public byte[] get(long number) {
        return pool[(int) (number % POOL)];
    }

    /** The sum of the CRC-32 of the bodies of messages 0 to {@code messages} - 1, which no order of reading changes. */
    public long checksum(long messages) {
        long sum = 0;
        for (int i = 0; i < POOL; i++) {
            sum += checksums[i] * (messages / POOL + (i < messages % POOL ? 1 : 0));
        }
        return sum;
    }
}
