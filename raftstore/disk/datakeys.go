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

// wrappedKey is a data key as it is stored on disk, encrypted under a key-encryption key.
type wrappedKey struct {
	kek    string // ID of the key-encryption key that encrypts the data key
	sealed []byte
}

const nonceBytes = 12

// wrapAssociatedData returns the associated data of the AES-GCM encryption of a data key. It binds
// the wrapped key to its number.
func wrapAssociatedData(number uint32) []byte {
	return binary.LittleEndian.AppendUint32([]byte("keelson data key "), number)
}

// wrapKey encrypts the data key secret, which has the given number, under a key-encryption key. The
// nonce is random, because a key-encryption key encrypts few messages.
func wrapKey(kek *keyEncryptionKey, number uint32, secret []byte) []byte {
	nonce := make([]byte, nonceBytes)
	rand.Read(nonce)
	return newAEAD(kek.secret[:]).Seal(nonce, nonce, secret, wrapAssociatedData(number))
}

func unwrapKey(kek *keyEncryptionKey, number uint32, sealed []byte) ([]byte, error) {
	if len(sealed) < nonceBytes {
		return nil, errTruncatedKeys
	}
	return newAEAD(kek.secret[:]).Open(nil, sealed[:nonceBytes], sealed[nonceBytes:], wrapAssociatedData(number))
}

var errTruncatedKeys = errors.New("the content is truncated")

// ErrCorruptKeys is returned for a damaged file of data keys.
var ErrCorruptKeys = errors.New("raftstore: file of data keys is corrupt")

// wrappedVersion is the version of the file of data keys. The file starts with three fields: a
// checksum of all bytes behind it; this version; and the number of the next new data key. The data
// keys follow. Each has its number, the ID of the key-encryption key that wraps it, and the
// encrypted data key. The ID and the encrypted data key are preceded by their lengths in bytes.
const wrappedVersion = 1

func encodeDataKeys(keys map[uint32]wrappedKey, next uint32) []byte {
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

func parseDataKeys(b []byte) (map[uint32]wrappedKey, uint32, error) {
	if len(b) < 9 || binary.LittleEndian.Uint32(b) != crc32.Checksum(b[4:], castagnoli) {
		return nil, 0, fmt.Errorf("checksum does not match: %w", ErrCorruptKeys)
	}
	if b[4] != wrappedVersion {
		return nil, 0, fmt.Errorf("version %d, want version %d: %w", b[4], wrappedVersion, ErrCorruptKeys)
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
			return nil, 0, fmt.Errorf("%w: %w", errTruncatedKeys, ErrCorruptKeys)
		}
		number := binary.LittleEndian.Uint32(b)
		b = b[4:]
		k := wrappedKey{kek: string(piece()), sealed: piece()}
		if k.kek == "" || len(k.sealed) == 0 || number >= next {
			return nil, 0, fmt.Errorf("data key %d: %w: %w", number, errTruncatedKeys, ErrCorruptKeys)
		}
		keys[number] = k
	}
	return keys, next, nil
}
