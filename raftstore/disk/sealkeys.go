package disk

import (
	"crypto/rand"
	"encoding/binary"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"slices"
)

// wrappedKey is a data key as it lies on the disk.
type wrappedKey struct {
	kek    string // id of the key that it is wrapped under
	sealed []byte
}

const nonceBytes = 12

// wrapContext binds a wrapped key to its number.
func wrapContext(number uint32) []byte {
	return binary.LittleEndian.AppendUint32([]byte("keelson data key "), number)
}

// wrap seals a data key. Nonces are random: there are few messages.
func wrap(kek *keyEncryptionKey, number uint32, secret []byte) []byte {
	nonce := make([]byte, nonceBytes)
	rand.Read(nonce)
	return newAEAD(kek.secret[:]).Seal(nonce, nonce, secret, wrapContext(number))
}

func unwrap(kek *keyEncryptionKey, number uint32, sealed []byte) ([]byte, error) {
	if len(sealed) < nonceBytes {
		return nil, errShort
	}
	return newAEAD(kek.secret[:]).Open(nil, sealed[:nonceBytes], sealed[nonceBytes:], wrapContext(number))
}

// ErrCorruptKeys reports a file of data keys that is not what was written.
var ErrCorruptKeys = errors.New("raftstore: file of data keys is corrupt")

// The file: a checksum of what follows, a version, the next number, and for
// each key its number and, with their lengths, the id of the key it is wrapped
// under and its sealed bytes.
const wrappedVersion = 1

func encodeWrapped(keys map[uint32]wrappedKey, next uint32) []byte {
	b := append(make([]byte, 4, 256), wrappedVersion)
	b = binary.LittleEndian.AppendUint32(b, next)
	for _, number := range slices.Sorted(maps.Keys(keys)) {
		k := keys[number]
		b = binary.LittleEndian.AppendUint32(b, number)
		b = append(append(b, byte(len(k.kek))), k.kek...)
		b = append(append(b, byte(len(k.sealed))), k.sealed...)
	}
	binary.LittleEndian.PutUint32(b, crc32.Checksum(b[4:], castagnoli))
	return b
}

func parseWrapped(b []byte) (map[uint32]wrappedKey, uint32, error) {
	if len(b) < 9 || binary.LittleEndian.Uint32(b) != crc32.Checksum(b[4:], castagnoli) {
		return nil, 0, fmt.Errorf("checksum does not match: %w", ErrCorruptKeys)
	}
	if b[4] != wrappedVersion {
		return nil, 0, fmt.Errorf("version %d, this is version %d: %w", b[4], wrappedVersion, ErrCorruptKeys)
	}
	next := binary.LittleEndian.Uint32(b[5:])
	keys := make(map[uint32]wrappedKey)
	piece := func() []byte {
		if len(b) == 0 || len(b) < 1+int(b[0]) {
			b = nil
			return nil
		}
		p := b[1 : 1+int(b[0])]
		b = b[1+len(p):]
		return slices.Clone(p)
	}
	for b = b[9:]; len(b) > 0; {
		if len(b) < 4 {
			return nil, 0, fmt.Errorf("%w: %w", errShort, ErrCorruptKeys)
		}
		number := binary.LittleEndian.Uint32(b)
		b = b[4:]
		k := wrappedKey{kek: string(piece()), sealed: piece()}
		if k.kek == "" || len(k.sealed) == 0 || number >= next {
			return nil, 0, fmt.Errorf("data key %d: %w: %w", number, errShort, ErrCorruptKeys)
		}
		keys[number] = k
	}
	return keys, next, nil
}
