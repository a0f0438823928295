package disk

import (
	"bytes"
	"errors"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore/disk/platter"
)

// secret is what must not be found on the disk.
var secret = bytes.Repeat([]byte("do not tell anybody "), 20)

// inClear counts the files of a data directory that hold the secret.
func inClear(t *testing.T, dir string) (names []string) {
	for path, content := range dataFiles(t, dir) {
		if bytes.Contains(content, secret[:40]) {
			names = append(names, filepath.Base(path))
		}
	}
	return names
}

func (b *diskBed) tell(t *testing.T) {
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

// With keys, nothing of what was committed is on the disk in clear.
func TestSealedDiskTellsNothing(t *testing.T) {
	forKinds(t, func(t *testing.T, kind LogStoreKind, keys *Keyring) {
		b := newDiskBed(t, t.TempDir(), kind, keys)
		for range 200 {
			b.tell(t)
		}
		b.snap(t, 100, 1, bytes.Repeat(secret, 1000))
		b.close(t)
		names := inClear(t, b.cfg.Dir)
		if sealed := keys != nil; sealed != (len(names) == 0) {
			t.Errorf("sealed: %v, in clear: %v", sealed, names)
		}
		if err := b.open(); err != nil {
			t.Fatal(err)
		}
		b.same(t)
		b.close(t)
	})
}

// Encryption can be turned on and off over existing data; what is old stays
// readable, and the keys are needed for as long as something is sealed.
func TestSealingTurnedOnAndOff(t *testing.T) {
	for _, kind := range logKinds {
		b := newDiskBed(t, t.TempDir(), kind, nil)
		b.tell(t)
		b.snap(t, 1, 1, secret)
		b.close(t)
		b.cfg.Keys = testRing("k1")
		if err := b.open(); err != nil {
			t.Fatal(err)
		}
		b.same(t)
		b.append(t, 1, 10, 100)
		b.snap(t, 5, 1, secret)
		b.reopen(t)
		b.same(t)
		b.close(t)

		b.cfg.Keys = nil
		if err := b.open(); !errors.Is(err, ErrSealed) || !strings.Contains(err.Error(), `"k1"`) {
			t.Errorf("%s: opened without keys: %v", kind, err)
		}
		off := testRing("k1")
		off.clear = true
		b.cfg.Keys = off
		if err := b.open(); err != nil {
			t.Fatal(err)
		}
		b.tell(t)
		b.same(t)
		b.snap(t, b.last, 1, secret)
		b.snap(t, b.last, 2, secret) // the sealed snapshot is gone
		b.compact(t, b.last-1)
		if kind == LogWAL { // whole segments go
			for range 600 {
				b.tell(t)
			}
			b.snap(t, b.last, 2, secret)
			b.snap(t, b.last, 3, secret)
			b.compact(t, b.last-1)
		}
		b.reopen(t)
		b.close(t)
		if there, _ := platter.Exists(filepath.Join(b.cfg.Dir, sealName)); there {
			t.Errorf("%s: data keys are kept though nothing is sealed", kind)
		}
		b.cfg.Keys = nil
		if err := b.open(); err != nil {
			t.Fatalf("%s: opened without keys when nothing is sealed: %v", kind, err)
		}
		b.same(t)
		b.close(t)
	}
}

// After a rotation, in the middle of work or by a restart, the old key is needed no more.
func TestKeyRotation(t *testing.T) {
	for _, restart := range []bool{false, true} {
		b := newDiskBed(t, t.TempDir(), LogBolt, testRing("old"))
		b.append(t, 1, 10, 100)
		b.snap(t, 5, 1, secret)
		if restart {
			b.close(t)
			b.cfg.Keys = testRing("new", "old")
			if err := b.open(); err != nil {
				t.Fatal(err)
			}
		} else {
			before := b.disk.seals.now().number
			if err := b.disk.seals.reload(testRing("new", "old")); err != nil {
				t.Fatal(err)
			}
			if b.disk.seals.now().number == before {
				t.Error("the data key is still the old one")
			}
		}
		b.append(t, 1, 10, 100)
		b.same(t)
		b.close(t)
		b.cfg.Keys = testRing("new")
		if err := b.open(); err != nil {
			t.Fatalf("restart %v: without the old key: %v", restart, err)
		}
		b.same(t)
		b.close(t)
		b.cfg.Keys = testRing("old")
		if err := b.open(); !errors.Is(err, ErrSealed) || !strings.Contains(err.Error(), `"new"`) {
			t.Errorf("restart %v: with the old key: %v", restart, err)
		}
	}
}

// A key that has the right name and is another one is refused, before and while running.
func TestWrongKey(t *testing.T) {
	b := newDiskBed(t, t.TempDir(), LogBolt, testRing("k1"))
	b.append(t, 1, 10, 100)
	wrong := testRing("k1")
	wrong.keys[0].secret[7] ^= 1
	wrong.path = "/some/file"
	b.close(t)
	b.cfg.Keys = wrong
	if err := b.open(); !errors.Is(err, ErrSealed) || !strings.Contains(err.Error(), `"k1"`) || !strings.Contains(err.Error(), "/some/file") {
		t.Errorf("opened with a wrong key: %v", err)
	}
	b.cfg.Keys = testRing("k1")
	if err := b.open(); err != nil {
		t.Fatal(err)
	}
	defer b.close(t)
	// Keys that are open need no key of theirs to go on.
	if err := b.disk.seals.reload(testRing("k2")); err != nil {
		t.Fatal(err)
	}
	b.append(t, 1, 10, 100)
	b.reload(t, testRing("k2"))
	b.same(t)
}

func (b *diskBed) reload(t *testing.T, keys *Keyring) {
	t.Helper()
	b.close(t)
	b.cfg.Keys = keys
	if err := b.open(); err != nil {
		t.Fatal(err)
	}
}

// Two entries are never sealed with one nonce: not within an opening, not
// across them, not after a crash or a rotation.
func TestNoncesAreUsedOnce(t *testing.T) {
	b := newDiskBed(t, t.TempDir(), LogBolt, testRing("k1"))
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
		b.append(t, 1, 7, 10)
		collect(from)
		b.back(t, b.last-2) // and others in their place
		from = b.last + 1
		b.append(t, 2, 5, 10)
		collect(from)
		if round%2 == 0 {
			b.reopen(t)
		} else if err := b.disk.seals.reload(testRing("k1")); err != nil {
			t.Fatal(err)
		}
	}
	b.close(t)
}

// A data key that has sealed its share is replaced in the middle of work.
func TestDataKeyWearsOut(t *testing.T) {
	b := newDiskBed(t, t.TempDir(), LogBolt, testRing("k1"))
	k := b.disk.seals.now()
	k.count.Store(messagesPerKey - 3)
	b.append(t, 1, 2, 10)
	if b.disk.seals.now() != k {
		t.Error("replaced too soon")
	}
	b.append(t, 1, 2, 10)
	if b.disk.seals.now() == k {
		t.Error("not replaced")
	}
	b.reopen(t)
	b.same(t)
	b.close(t)
}

// Data keys do not gather: those that nothing is sealed under go at a start.
func TestUnusedDataKeysGo(t *testing.T) {
	b := newDiskBed(t, t.TempDir(), LogBolt, testRing("k1"))
	b.append(t, 1, 3, 10)
	for range 20 {
		b.reopen(t)
	}
	if n := len(b.disk.seals.keys); n != 2 {
		t.Errorf("%d data keys, want that of the entries and the current one", n)
	}
	b.close(t)
}

// A sealed entry opens in its place only.
func TestSealedEntriesDoNotMove(t *testing.T) {
	b := newDiskBed(t, t.TempDir(), LogBolt, testRing("k1"))
	b.append(t, 1, 2, 100)
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
	s := sum(l)
	b[0], b[1], b[2], b[3] = byte(s), byte(s>>8), byte(s>>16), byte(s>>24)
}

func TestKeyFile(t *testing.T) {
	path := filepath.Join(t.TempDir(), "keys")
	if err := NewKeyFile(path, "k1"); err != nil {
		t.Fatal(err)
	}
	if err := NewKeyFile(path, "k1"); err == nil {
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
		"nothing": "", "a comment": "# k\n", "no secret": "k1\n", "short": "k1 AAAA\n", "not base64": strings.Replace(line, "=", "!", 1),
		"twice": line + "\n" + line, "three words": line + " x", "clear late": line + "\nclear\n", "clear only": "clear\n",
		"a bad id": "#a " + line[3:], "long id": strings.Repeat("k", maxKeyID+1) + line[2:],
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
