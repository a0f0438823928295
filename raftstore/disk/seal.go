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

	"keelson.dev/keelson/raftstore/disk/platter"
)

// sealer seals what a replica writes. A data key belongs to one opening of the
// data directory: it is made at the start, or by ReloadKeys, and seals nothing
// after the replica has stopped. So a counter in memory gives nonces that are
// never used twice, whatever a crash loses. Data keys lie in a file, wrapped
// under a key-encryption key, for as long as something sealed under them does.
type sealer struct {
	path string

	mu     sync.Mutex
	ring   *Keyring
	keys   map[uint32]*dataKey
	locked map[uint32]wrappedKey // under a key that is not there
	next   uint32

	held map[uint32]int // by number: files that are being written

	current atomic.Pointer[dataKey] // nil: what is new is written in clear
}

// dataKey is a key in clear. What is used is derived from it, by purpose.
type dataKey struct {
	number  uint32
	secret  [keyBytes]byte
	entries cipher.AEAD
	count   atomic.Uint64 // of entries sealed
}

// messagesPerKey bounds how many entries one data key seals.
const messagesPerKey = 1 << 32

// sealName is the file of the wrapped data keys.
const sealName = "raft.keys"

func newAEAD(secret []byte) cipher.AEAD {
	block, err := aes.NewCipher(secret)
	if err != nil {
		panic(err) // the length is right
	}
	aead, err := cipher.NewGCM(block)
	if err != nil {
		panic(err)
	}
	return aead
}

// derive makes the key for one purpose.
func derive(secret, salt []byte, purpose string) []byte {
	key, err := hkdf.Key(sha256.New, secret, salt, purpose, keyBytes)
	if err != nil {
		panic(err) // the length is right
	}
	return key
}

func newDataKey(number uint32, secret []byte) *dataKey {
	k := &dataKey{number: number, entries: newAEAD(derive(secret, nil, "keelson log entries"))}
	copy(k.secret[:], secret)
	return k
}

// openSealer reads the data keys and opens those it can.
func openSealer(path string, ring *Keyring) (*sealer, error) {
	s := &sealer{path: path, ring: ring, keys: make(map[uint32]*dataKey), next: 1, held: make(map[uint32]int)}
	content, err := os.ReadFile(path)
	if errors.Is(err, os.ErrNotExist) {
		return s, nil
	}
	if err != nil {
		return nil, fmt.Errorf("data keys: %w", err)
	}
	wrapped, next, err := parseWrapped(content)
	if err != nil {
		return nil, fmt.Errorf("%s: %w", path, err)
	}
	s.next = next
	if err := s.unlock(wrapped, ring); err != nil {
		return nil, err
	}
	return s, nil
}

// unlock opens wrapped keys; those under keys that are not there stay locked.
func (s *sealer) unlock(wrapped map[uint32]wrappedKey, ring *Keyring) error {
	s.locked = make(map[uint32]wrappedKey)
	for number, w := range wrapped {
		kek := ring.find(w.kek)
		if kek == nil {
			s.locked[number] = w
			continue
		}
		secret, err := unwrap(kek, number, w.sealed)
		if err != nil {
			return fmt.Errorf("%s: data key %d does not open with key %q of %s: %w", s.path, number, w.kek, ring.where(), ErrSealed)
		}
		s.keys[number] = newDataKey(number, secret)
	}
	return nil
}

// key finds a data key that something is sealed under.
func (s *sealer) key(number uint32) (*dataKey, error) {
	s.mu.Lock()
	defer s.mu.Unlock()
	if k := s.keys[number]; k != nil {
		return k, nil
	}
	if w, ok := s.locked[number]; ok {
		return nil, fmt.Errorf("data key %d in %s is wrapped under key %q, which is not there (%s): %w", number, s.path, w.kek, s.ring.where(), ErrSealed)
	}
	return nil, fmt.Errorf("data key %d is not in %s: %w", number, s.path, ErrSealed)
}

// begin drops the keys that nothing is sealed under, wraps the others under the
// current key and starts a new one.
func (s *sealer) begin(used map[uint32]struct{}) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	maps.DeleteFunc(s.keys, func(n uint32, _ *dataKey) bool { _, ok := used[n]; return !ok })
	maps.DeleteFunc(s.locked, func(n uint32, _ wrappedKey) bool { _, ok := used[n]; return !ok })
	return s.renew(s.ring)
}

// renew starts a new data key under the current key of a ring, which replaces
// the old ring once the file is written. The caller holds s.mu.
func (s *sealer) renew(ring *Keyring) error {
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
	} else if err := s.save(ring, keys, next); err != nil {
		return fmt.Errorf("writing data keys to %s: %w", s.path, err)
	}
	s.ring, s.keys, s.next = ring, keys, next
	s.current.Store(current)
	return nil
}

func (s *sealer) save(ring *Keyring, keys map[uint32]*dataKey, next uint32) error {
	wrapped := maps.Clone(s.locked)
	if wrapped == nil {
		wrapped = make(map[uint32]wrappedKey)
	}
	for number, k := range keys {
		if ring == nil {
			return fmt.Errorf("data key %d is in use: %w", number, ErrSealed)
		}
		kek := &ring.keys[0]
		wrapped[number] = wrappedKey{kek: kek.id, sealed: wrap(kek, number, k.secret[:])}
	}
	return platter.ReplaceFile(s.path, encodeWrapped(wrapped, next))
}

// reload takes another ring, under which everything is wrapped anew.
func (s *sealer) reload(ring *Keyring) error {
	s.mu.Lock()
	defer s.mu.Unlock()
	locked := s.locked
	if err := s.unlock(locked, ring); err != nil {
		s.locked = locked
		return err
	}
	return s.renew(ring)
}

// sealedBytes is by how much an entry grows.
const sealedBytes = 16

// entryKey is the key for so many entries that follow; nil when they are
// written in clear. A key that has sealed enough is replaced.
func (s *sealer) entryKey(n int) (*dataKey, uint64, error) {
	for {
		k := s.current.Load()
		if k == nil {
			return nil, 0, nil
		}
		if last := k.count.Add(uint64(n)); last <= messagesPerKey {
			return k, last - uint64(n), nil
		}
		s.mu.Lock()
		var err error
		if s.current.Load() == k {
			err = s.renew(s.ring)
		}
		s.mu.Unlock()
		if err != nil {
			return nil, 0, err
		}
	}
}

// bound is what an entry is sealed together with: it opens in its place only.
func bound(l *raft.Log) []byte {
	var b [17]byte
	binary.LittleEndian.PutUint64(b[:], l.Index)
	binary.LittleEndian.PutUint64(b[8:], l.Term)
	b[16] = byte(l.Type)
	return b[:]
}

func entryNonce(count uint64) []byte {
	return binary.LittleEndian.AppendUint64(make([]byte, 4, 12), count)
}

// seal appends the sealed data of an entry to out.
func (k *dataKey) seal(out []byte, l *raft.Log, count uint64) []byte {
	return k.entries.Seal(out, entryNonce(count), l.Data, bound(l))
}

// open returns the data of a sealed entry.
func (k *dataKey) open(l *raft.Log, count uint64) ([]byte, error) {
	return k.entries.Open(nil, entryNonce(count), l.Data, bound(l))
}

// now is the data key that what is new is sealed under; nil = in clear.
func (s *sealer) now() *dataKey { return s.current.Load() }

// hold is the data key for a file that is going to be written; nil = in clear. It
// stays until it is released: nobody finds the file before it is whole.
func (s *sealer) hold() (k *dataKey, release func()) {
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

// numbers are the keys that are there, for tests and Inspect.
func (s *sealer) needs() []string {
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
