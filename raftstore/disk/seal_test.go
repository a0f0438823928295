package disk

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable"
)

// secret is data that must not be readable on the disk.
var secret = bytes.Repeat([]byte("do not tell anybody "), 20)

// inClear returns the names of the files of a data directory that contain the secret.
func inClear(t *testing.T, dir string) (names []string) {
	for path, content := range dataFiles(t, dir) {
		if bytes.Contains(content, secret[:40]) {
			names = append(names, filepath.Base(path))
		}
	}
	return names
}

func (b *diskEnv) appendSecret(t *testing.T) {
	t.Helper()
	b.last++
	l := raft.Log{Index: b.last, Term: 1, Type: raft.LogCommand, Data: secret}
	b.logs[b.last] = l
	if b.first == 0 {
		b.first = b.last
	}
	if err := b.disk.Log.StoreLog(&l); err != nil {
		t.Fatal(err)
	}
}

// TestSealedDiskTellsNothing: with keys, no committed data is readable on the disk.
func TestSealedDiskTellsNothing(t *testing.T) {
	forEachLogKind(t, func(t *testing.T, kind LogStoreKind, keys *Keyring) {
		b := newDiskEnv(t, t.TempDir(), kind, keys)
		for range 200 {
			b.appendSecret(t)
		}
		b.takeSnapshot(t, 100, 1, bytes.Repeat(secret, 1000))
		b.close(t)
		names := inClear(t, b.cfg.Dir)
		if sealed := keys != nil; sealed != (len(names) == 0) {
			t.Errorf("sealed: %v, in clear: %v", sealed, names)
		}
		if err := b.open(); err != nil {
			t.Fatal(err)
		}
		b.requireSame(t)
		b.close(t)
	})
}

// TestSealingTurnedOnAndOff: encryption can be enabled and disabled for existing data. Old data
// stays readable, and the keys are needed as long as any data is encrypted.
func TestSealingTurnedOnAndOff(t *testing.T) {
	for _, kind := range logKinds {
		b := newDiskEnv(t, t.TempDir(), kind, nil)
		b.appendSecret(t)
		b.takeSnapshot(t, 1, 1, secret)
		b.close(t)
		b.cfg.Keys = newTestKeyring("k1")
		if err := b.open(); err != nil {
			t.Fatal(err)
		}
		b.requireSame(t)
		b.appendEntries(t, 1, 10, 100)
		b.takeSnapshot(t, 5, 1, secret)
		b.reopen(t)
		b.requireSame(t)
		b.close(t)

		b.cfg.Keys = nil
		if err := b.open(); !errors.Is(err, ErrSealed) || !strings.Contains(err.Error(), `"k1"`) {
			t.Errorf("%s: opened without keys: %v", kind, err)
		}
		off := newTestKeyring("k1")
		off.clear = true
		b.cfg.Keys = off
		if err := b.open(); err != nil {
			t.Fatal(err)
		}
		b.appendSecret(t)
		b.requireSame(t)
		b.takeSnapshot(t, b.last, 1, secret)
		b.takeSnapshot(t, b.last, 2, secret) // removes the encrypted snapshot
		b.compact(t, b.last-1)
		if kind == LogWAL { // it drops whole segments
			for range 600 {
				b.appendSecret(t)
			}
			b.takeSnapshot(t, b.last, 2, secret)
			b.takeSnapshot(t, b.last, 3, secret)
			b.compact(t, b.last-1)
		}
		b.reopen(t)
		b.close(t)
		if there, _ := durable.Exists(filepath.Join(b.cfg.Dir, dataKeysName)); there {
			t.Errorf("%s: data keys are kept though nothing is sealed", kind)
		}
		b.cfg.Keys = nil
		if err := b.open(); err != nil {
			t.Fatalf("%s: opened without keys when nothing is sealed: %v", kind, err)
		}
		b.requireSame(t)
		b.close(t)
	}
}

// TestKeyRotation: after a rotation, while running or by a restart, the old key is not needed.
func TestKeyRotation(t *testing.T) {
	for _, restart := range []bool{false, true} {
		b := newDiskEnv(t, t.TempDir(), LogBolt, newTestKeyring("old"))
		b.appendEntries(t, 1, 10, 100)
		b.takeSnapshot(t, 5, 1, secret)
		if restart {
			b.close(t)
			b.cfg.Keys = newTestKeyring("new", "old")
			if err := b.open(); err != nil {
				t.Fatal(err)
			}
		} else {
			before := b.disk.sealer.currentKey().number
			if err := b.disk.sealer.changeKeyring(newTestKeyring("new", "old")); err != nil {
				t.Fatal(err)
			}
			if b.disk.sealer.currentKey().number == before {
				t.Error("the data key is still the old one")
			}
		}
		b.appendEntries(t, 1, 10, 100)
		b.requireSame(t)
		b.close(t)
		b.cfg.Keys = newTestKeyring("new")
		if err := b.open(); err != nil {
			t.Fatalf("restart %v: without the old key: %v", restart, err)
		}
		b.requireSame(t)
		b.close(t)
		b.cfg.Keys = newTestKeyring("old")
		if err := b.open(); !errors.Is(err, ErrSealed) || !strings.Contains(err.Error(), `"new"`) {
			t.Errorf("restart %v: with the old key: %v", restart, err)
		}
	}
}

// TestWrongKey: a different key with the same ID is rejected, at a start and while running.
func TestWrongKey(t *testing.T) {
	b := newDiskEnv(t, t.TempDir(), LogBolt, newTestKeyring("k1"))
	b.appendEntries(t, 1, 10, 100)
	wrong := newTestKeyring("k1")
	wrong.keys[0].secret[7] ^= 1
	wrong.path = "/some/file"
	b.close(t)
	b.cfg.Keys = wrong
	if err := b.open(); !errors.Is(err, ErrSealed) || !strings.Contains(err.Error(), `"k1"`) ||
		!strings.Contains(err.Error(), "/some/file") {
		t.Errorf("opened with a wrong key: %v", err)
	}
	b.cfg.Keys = newTestKeyring("k1")
	if err := b.open(); err != nil {
		t.Fatal(err)
	}
	defer b.close(t)
	// Unwrapped data keys stay usable without their key-encryption key.
	if err := b.disk.sealer.changeKeyring(newTestKeyring("k2")); err != nil {
		t.Fatal(err)
	}
	b.appendEntries(t, 1, 10, 100)
	b.reopenWith(t, newTestKeyring("k2"))
	b.requireSame(t)
}

func (b *diskEnv) reopenWith(t *testing.T, keys *Keyring) {
	t.Helper()
	b.close(t)
	b.cfg.Keys = keys
	if err := b.open(); err != nil {
		t.Fatal(err)
	}
}

// TestNoncesAreUsedOnce: no two entries have the same key and nonce: not in one opening, not in
// several, and not after a crash or a rotation.
func TestNoncesAreUsedOnce(t *testing.T) {
	b := newDiskEnv(t, t.TempDir(), LogBolt, newTestKeyring("k1"))
	seen := make(map[[12]byte]bool)
	collect := func(from uint64) {
		for i := from; i <= b.last; i++ {
			var l raft.Log
			if err := b.disk.Log.LogStore.GetLog(i, &l); err != nil {
				t.Fatal(err)
			}
			if len(l.Extensions) != sealedExtension {
				t.Fatalf("entry %d is in clear", i)
			}
			id := [12]byte(l.Extensions[4:])
			if seen[id] {
				t.Fatalf("entry %d: key and nonce are used twice", i)
			}
			seen[id] = true
		}
	}
	for round := range 5 {
		from := b.last + 1
		b.appendEntries(t, 1, 7, 10)
		collect(from)
		b.truncateFrom(t, b.last-2) // other entries replace them
		from = b.last + 1
		b.appendEntries(t, 2, 5, 10)
		collect(from)
		if round%2 == 0 {
			b.reopen(t)
		} else if err := b.disk.sealer.changeKeyring(newTestKeyring("k1")); err != nil {
			t.Fatal(err)
		}
	}
	b.close(t)
}

// TestDataKeyWearsOut: a data key that has reached its maximum is replaced while running.
func TestDataKeyWearsOut(t *testing.T) {
	b := newDiskEnv(t, t.TempDir(), LogBolt, newTestKeyring("k1"))
	k := b.disk.sealer.currentKey()
	k.count.Store(maxEntriesPerKey - 3)
	b.appendEntries(t, 1, 2, 10)
	if b.disk.sealer.currentKey() != k {
		t.Error("replaced too soon")
	}
	b.appendEntries(t, 1, 2, 10)
	if b.disk.sealer.currentKey() == k {
		t.Error("not replaced")
	}
	b.reopen(t)
	b.requireSame(t)
	b.close(t)
}

// TestUnusedDataKeysGo: unused data keys are removed at a start.
func TestUnusedDataKeysGo(t *testing.T) {
	b := newDiskEnv(t, t.TempDir(), LogBolt, newTestKeyring("k1"))
	b.appendEntries(t, 1, 3, 10)
	for range 20 {
		b.reopen(t)
	}
	if n := len(b.disk.sealer.keys); n != 2 {
		t.Errorf("%d data keys, want that of the entries and the current one", n)
	}
	b.close(t)
}

// TestSealedEntriesDoNotMove: an encrypted entry can be decrypted only at its place in the log.
func TestSealedEntriesDoNotMove(t *testing.T) {
	b := newDiskEnv(t, t.TempDir(), LogBolt, newTestKeyring("k1"))
	b.appendEntries(t, 1, 2, 100)
	inner := b.disk.Log.LogStore
	var one, two raft.Log
	if err := errors.Join(inner.GetLog(1, &one), inner.GetLog(2, &two)); err != nil {
		t.Fatal(err)
	}
	moved := two
	moved.Index = 1
	moved.Extensions = bytes.Clone(two.Extensions)
	putSum(&moved)
	if err := inner.StoreLogs([]*raft.Log{&moved}); err != nil {
		t.Fatal(err)
	}
	b.disk.Log.cache = make(map[uint64]*raft.Log)
	var l raft.Log
	if err := b.disk.Log.GetLog(1, &l); !errors.Is(err, ErrCorruptLog) {
		t.Errorf("entry 2 in the place of entry 1: %v", err)
	}
	b.disk.Close()
}

func putSum(l *raft.Log) {
	b := l.Extensions
	s := entryChecksum(l)
	b[0], b[1], b[2], b[3] = byte(s), byte(s>>8), byte(s>>16), byte(s>>24)
}

func TestKeyFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	if err := CreateKeyFile(path, "k1"); err != nil {
		t.Fatal(err)
	}
	if err := CreateKeyFile(path, "k1"); err == nil {
		t.Error("an existing key file is written over")
	}
	if err := AddKey(path, "k2"); err != nil {
		t.Fatal(err)
	}
	if err := AddKey(path, "k2"); !errors.Is(err, ErrKeyFile) {
		t.Errorf("a key added twice: %v", err)
	}
	k, err := LoadKeyring(path)
	if err != nil {
		t.Fatal(err)
	}
	if got := strings.Join(k.IDs(), " "); got != "k2 k1" || k.Current() != "k2" {
		t.Errorf("keys %s, current %s", got, k.Current())
	}
	if k.keys[0].secret == k.keys[1].secret || k.keys[0].secret == [keyBytes]byte{} {
		t.Error("keys are not random")
	}
	content, err := os.ReadFile(path)
	if err != nil {
		t.Fatal(err)
	}
	line := strings.SplitN(string(content), "\n", 2)[0]
	for name, bad := range map[string]string{
		"nothing": "", "a comment": "# k\n", "no secret": "k1\n", "short": "k1 AAAA\n",
		"not base64": strings.Replace(line, "=", "!", 1),
		"twice":      line + "\n" + line, "three words": line + " x", "clear late": line + "\nclear\n",
		"clear only": "clear\n",
		"a bad id":   "#a " + line[3:], "long id": strings.Repeat("k", maxKeyID+1) + line[2:],
	} {
		if err := os.WriteFile(path, []byte(bad), 0o600); err != nil {
			t.Fatal(err)
		}
		_, err := LoadKeyring(path)
		if !errors.Is(err, ErrKeyFile) || !strings.Contains(err.Error(), path) {
			t.Errorf("%s: %v", name, err)
		}
		if err != nil && len(line) > 20 && strings.Contains(err.Error(), line[5:20]) {
			t.Errorf("%s: the error tells the secret: %v", name, err)
		}
	}
	if err := os.WriteFile(path, []byte("clear\n"+line), 0o600); err != nil {
		t.Fatal(err)
	}
	if k, err := LoadKeyring(path); err != nil || k.Current() != "" || len(k.IDs()) != 1 {
		t.Errorf("turned off: current %q, error %v", k.Current(), err)
	}
	if err := os.Chmod(path, 0o640); err != nil {
		t.Fatal(err)
	}
	if _, err := LoadKeyring(path); !errors.Is(err, ErrKeyFile) || !strings.Contains(err.Error(), "chmod 600") {
		t.Errorf("readable by others: %v", err)
	}
}
