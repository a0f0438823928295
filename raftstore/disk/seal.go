package disk

import (
	"crypto/aes"
	"crypto/cipher"
	"crypto/hkdf"
	"crypto/rand"
	"crypto/sha256"
	"encoding/binary"
	"errors"
	"fmt"
	"maps"
	"os"
	"slices"
	"sync"
	"sync/atomic"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable"
)

// sealer encrypts the data that a replica writes. A data key belongs to one opening of the data
// directory. It is created by the start or by ReloadKeys, and is not used for encryption after the
// replica has stopped. A counter in memory therefore produces nonces that are never used twice,
// even after a crash. Data keys are stored in a file, wrapped under a key-encryption key, as long
// as data is encrypted under them.
type sealer struct {
	path string

	mu     sync.Mutex
	ring   *Keyring
	keys   map[uint32]*dataKey
	locked map[uint32]wrappedKey // data keys with a missing key-encryption key
	next   uint32

	held map[uint32]int // number of files that are being written, by number of the data key

	current atomic.Pointer[dataKey] // nil if new data is not encrypted
}

// dataKey is an unwrapped data key. It is never used directly: a separate key is derived from it
// for each purpose.
type dataKey struct {
	number  uint32
	secret  [keyBytes]byte
	entries cipher.AEAD
	count   atomic.Uint64 // number of entries that are encrypted under this key
}

// maxEntriesPerKey is the maximum number of entries that one data key encrypts.
const maxEntriesPerKey = 1 << 32

// dataKeysName is the name of the file that contains the wrapped data keys.
const dataKeysName = "raft.keys"

func newAEAD(secret []byte) cipher.AEAD {
	block, err := aes.NewCipher(secret)
	if err != nil {
		panic(err) // the length is valid
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic(err)
	}
	return aead
}

// deriveKey returns the key for one purpose, derived from secret and salt.
func deriveKey(secret, salt []byte, purpose string) []byte {
	key, err := hkdf.Key(sha256.New, secret, salt, purpose, keyBytes)
	if err != nil {
		panic(err) // the length is valid
	}
	return key
}

func newDataKey(number uint32, secret []byte) *dataKey {
	k := &dataKey{number: number, entries: newAEAD(deriveKey(secret, nil, "keelson log entries"))}
	copy(k.secret[:], secret)
	return k
}

// openSealer returns a sealer with the data keys in the file at path. It unwraps the data keys with
// a key-encryption key in ring.
func openSealer(path string, ring *Keyring) (*sealer, error) {
	s := &sealer{path: path, ring: ring, keys: make(map[uint32]*dataKey), next: 1, held: make(map[uint32]int)}
	content, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("data keys: %w", err)
	}
	wrapped, next, err := parseDataKeys(content)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	s.next = next
	if err := s.unwrapKeys(wrapped, ring); err != nil {
		return nil, err
	}
	return s, nil
}

// unwrapKeys adds the given wrapped data keys to the sealer. It unwraps the data keys with a
// key-encryption key in ring, and stores the other data keys in s.locked.
func (s *sealer) unwrapKeys(wrapped map[uint32]wrappedKey, ring *Keyring) error {
	s.locked = make(map[uint32]wrappedKey)
	for number, w := range wrapped {
		kek := ring.findKey(w.kek)
		if kek == nil {
			s.locked[number] = w
			continue
		}
		secret, err := unwrapKey(kek, number, w.sealed)
		if err != nil {
			return fmt.Errorf("%s: data key %d cannot be unwrapped with key %q of %s: %w",
				s.path, number, w.kek, ring.source(), ErrSealed)
		}
		s.keys[number] = newDataKey(number, secret)
	}
	return nil
}

// findDataKey returns the data key with the given number. It returns ErrSealed if the data key does
// not exist or cannot be unwrapped.
func (s *sealer) findDataKey(number uint32) (*dataKey, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.keys[number]; k != nil {
		return k, nil
	}
	if w, ok := s.locked[number]; ok {
		return nil, fmt.Errorf("data key %d in %s is wrapped under key %q, which is missing (%s): %w",
			number, s.path, w.kek, s.ring.source(), ErrSealed)
	}
	return nil, fmt.Errorf("data key %d is not in %s: %w", number, s.path, ErrSealed)
}

// startDataKey starts a new data key. used contains the numbers of the data keys under which data
// is encrypted. startDataKey wraps these data keys again under the current key-encryption key, and
// removes all other data keys.
func (s *sealer) startDataKey(used map[uint32]struct{}) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.keys, func(n uint32, _ *dataKey) bool { _, ok := used[n]; return !ok })
	maps.DeleteFunc(s.locked, func(n uint32, _ wrappedKey) bool { _, ok := used[n]; return !ok })
	return s.rotateDataKey(s.ring)
}

// rotateDataKey starts a new data key, and wraps all data keys under the current key of ring. When
// the file of data keys is written, ring replaces the sealer's keyring. The caller holds s.mu.
func (s *sealer) rotateDataKey(ring *Keyring) error {
	keys, next := maps.Clone(s.keys), s.next
	var current *dataKey
	if ring.Current() != "" {
		secret := make([]byte, keyBytes)
		rand.Read(secret)
		current = newDataKey(next, secret)
		keys[next] = current
		next++
	}
	if len(keys)+len(s.locked) == 0 {
		if err := os.Remove(s.path); err != nil && !errors.Is(err, os.ErrNotExist) {
			return fmt.Errorf("data keys: %w", err)
		}
	} else if err := s.writeKeys(ring, keys, next); err != nil {
		return fmt.Errorf("writing data keys to %s: %w", s.path, err)
	}
	s.ring, s.keys, s.next = ring, keys, next
	s.current.Store(current)
	return nil
}

func (s *sealer) writeKeys(ring *Keyring, keys map[uint32]*dataKey, next uint32) error {
	wrapped := maps.Clone(s.locked)
	if wrapped == nil {
		wrapped = make(map[uint32]wrappedKey)
	}
	for number, k := range keys {
		if ring == nil {
			return fmt.Errorf("data key %d is in use: %w", number, ErrSealed)
		}
		kek := &ring.keys[0]
		wrapped[number] = wrappedKey{kek: kek.id, sealed: wrapKey(kek, number, k.secret[:])}
	}
	return durable.Write(s.path, encodeDataKeys(wrapped, next), durable.Persistent)
}

// changeKeyring replaces the keyring, starts a new data key, and wraps all data keys again under
// the current key of the new keyring.
func (s *sealer) changeKeyring(ring *Keyring) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	locked := s.locked
	if err := s.unwrapKeys(locked, ring); err != nil {
		s.locked = locked
		return err
	}
	return s.rotateDataKey(ring)
}

// sealOverhead is the number of bytes that encryption adds to an entry.
const sealOverhead = 16

// entryKey returns the data key for the next n entries, and the count of the first of them. The
// nonce of each entry is made from its count, which rises by one per entry. The data key is nil if
// entries are not encrypted. entryKey starts a new data key when the current one has reached
// maxEntriesPerKey.
func (s *sealer) entryKey(n int) (*dataKey, uint64, error) {
	for {
		k := s.current.Load()
		if k == nil {
			return nil, 0, nil
		}
		if last := k.count.Add(uint64(n)); last <= maxEntriesPerKey {
			return k, last - uint64(n), nil
		}
		s.mu.Lock()
		var err error
		if s.current.Load() == k {
			err = s.rotateDataKey(s.ring)
		}
		s.mu.Unlock()
		if err != nil {
			return nil, 0, err
		}
	}
}

// associatedData returns the index, term, and type of an entry. They are authenticated together
// with its encrypted data, so that the data is valid only at this index of the log.
func associatedData(l *raft.Log) []byte {
	var b [17]byte
	binary.LittleEndian.PutUint64(b[:], l.Index)
	binary.LittleEndian.PutUint64(b[8:], l.Term)
	b[16] = byte(l.Type)
	return b[:]
}

func entryNonce(count uint64) []byte {
	return binary.LittleEndian.AppendUint64(make([]byte, 4, 12), count)
}

// sealEntry appends the encrypted data of the entry l to out. The nonce is made from count.
func (k *dataKey) sealEntry(out []byte, l *raft.Log, count uint64) []byte {
	return k.entries.Seal(out, entryNonce(count), l.Data, associatedData(l))
}

// openEntry returns the decrypted data of the entry l. count must be the count that was passed to
// sealEntry.
func (k *dataKey) openEntry(l *raft.Log, count uint64) ([]byte, error) {
	return k.entries.Open(nil, entryNonce(count), l.Data, associatedData(l))
}

// currentKey returns the data key for new data, or nil if new data is not encrypted.
func (s *sealer) currentKey() *dataKey { return s.current.Load() }

// holdKey returns the data key for a file that will be written, or nil if the file will not be
// encrypted. The data key is not removed before release is called. This is necessary because
// collectKeys does not find the data key of an incomplete file.
func (s *sealer) holdKey() (k *dataKey, release func()) {
	s.mu.Lock()
	defer s.mu.Unlock()
	k = s.current.Load()
	if k == nil {
		return nil, func() {}
	}
	s.held[k.number]++
	return k, sync.OnceFunc(func() {
		s.mu.Lock()
		defer s.mu.Unlock()
		if s.held[k.number]--; s.held[k.number] == 0 {
			delete(s.held, k.number)
		}
	})
}

// wrappingKeyIDs returns the IDs of the key-encryption keys that are needed to unwrap the data
// keys.
func (s *sealer) wrappingKeyIDs() []string {
	s.mu.Lock()
	defer s.mu.Unlock()
	ids := make(map[string]struct{})
	for _, w := range s.locked {
		ids[w.kek] = struct{}{}
	}
	if len(s.keys) > 0 {
		ids[s.ring.keys[0].id] = struct{}{}
	}
	return slices.Sorted(maps.Keys(ids))
}
