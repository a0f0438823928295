package disk

import (
	"bytes"
	"encoding/base64"
	"errors"
	"fmt"
	"maps"
	"os"
	"path/filepath"
	"strings"
	"testing"

	"github.com/hashicorp/raft"
	"pgregory.net/rapid"
)

// logKinds are the log stores. Tests use both.
var logKinds = []LogStoreKind{LogBolt, LogWAL}

type fataler interface {
	Fatalf(format string, args ...any)
}

// diskEnv is the disk of a replica and its expected content.
type diskEnv struct {
	cfg    Config
	disk   *Data
	failed []error

	logs        map[uint64]raft.Log
	first, last uint64
	votes       map[string]uint64
	snapshot    []byte // content of the newest snapshot
	index       uint64 // index of the newest snapshot
}

func newDiskEnv(t fataler, dir string, kind LogStoreKind, keys *Keyring) *diskEnv {
	b := &diskEnv{
		cfg: Config{Name: "r1", Dir: filepath.Join(dir, "data"), LogStore: kind, Keys: keys, NoSync: true,
			JournalBytes: 64 << 10, SegmentBytes: 128 << 10}.withDefaults(),
		logs: make(map[uint64]raft.Log), votes: make(map[string]uint64),
	}
	if err := b.open(); err != nil {
		t.Fatalf("opening: %v", err)
	}
	return b
}

func (b *diskEnv) open() error {
	b.failed = nil
	d, err := openDisk(b.cfg, func(err error) { b.failed = append(b.failed, err) })
	b.disk = d
	return err
}

func (b *diskEnv) reopen(t fataler) {
	b.close(t)
	if err := b.open(); err != nil {
		t.Fatalf("opening again: %v", err)
	}
}

func (b *diskEnv) close(t fataler) {
	if err := b.disk.Close(); err != nil {
		t.Fatalf("closing: %v", err)
	}
}

func (b *diskEnv) appendEntries(t fataler, term uint64, n, size int) {
	var logs []*raft.Log
	for range n {
		b.last++
		data := bytes.Repeat([]byte{byte(b.last), byte(term)}, size/2)
		l := raft.Log{Index: b.last, Term: term, Type: raft.LogCommand, Data: data}
		logs = append(logs, &l)
		b.logs[l.Index] = l
	}
	if b.first == 0 {
		b.first = logs[0].Index
	}
	if err := b.disk.Log.StoreLogs(logs); err != nil {
		t.Fatalf("appending %d to %d: %v", logs[0].Index, b.last, err)
	}
}

// compact deletes the entries up to an index; truncateFrom deletes those from an index.
func (b *diskEnv) compact(t fataler, to uint64) {
	first, err := b.disk.Log.FirstIndex() // raft deletes from the first index of the store
	if err == nil {
		err = b.disk.Log.DeleteRange(first, to)
	}
	if err != nil {
		t.Fatalf("deleting %d to %d: %v", first, to, err)
	}
	maps.DeleteFunc(b.logs, func(i uint64, _ raft.Log) bool { return i <= to })
	if b.first = to + 1; b.first > b.last {
		b.first = 0
	}
}

func (b *diskEnv) truncateFrom(t fataler, from uint64) {
	if err := b.disk.Log.DeleteRange(from, b.last); err != nil {
		t.Fatalf("deleting %d to %d: %v", from, b.last, err)
	}
	maps.DeleteFunc(b.logs, func(i uint64, _ raft.Log) bool { return i >= from })
	if b.last = from - 1; b.first > b.last {
		b.first = 0
	}
}

func (b *diskEnv) setVote(t fataler, key string, value uint64) {
	if err := b.disk.stable.SetUint64([]byte(key), value); err != nil {
		t.Fatalf("voting: %v", err)
	}
	b.votes[key] = value
}

func (b *diskEnv) takeSnapshot(t fataler, index, term uint64, content []byte) {
	group := raft.Configuration{Servers: []raft.Server{{ID: "r1", Address: "127.0.0.1:1"}}}
	sink, err := b.disk.Snapshots.Create(1, index, term, group, 1, nil)
	if err == nil {
		_, err = sink.Write(content)
	}
	if err == nil {
		err = sink.Close()
	}
	if err != nil {
		t.Fatalf("snapshot at %d: %v", index, err)
	}
	b.snapshot, b.index = content, index
}

// differs describes the first difference between the open disk and its expected content; "" if
// there is none.
func (b *diskEnv) differs() string {
	first, err := b.disk.Log.FirstIndex()
	last, err2 := b.disk.Log.LastIndex()
	if err := errors.Join(err, err2); err != nil {
		return err.Error()
	}
	// The log may start earlier: whole files are deleted, or the deletion was interrupted.
	if b.first != 0 && (first > b.first || last != b.last) || b.first == 0 && last > b.index && last != b.last {
		return fmt.Sprintf("log reaches from %d to %d, want %d to %d", first, last, b.first, b.last)
	}
	for i := first; i != 0 && i <= last; i++ {
		var l raft.Log
		if err := b.disk.Log.GetLog(i, &l); err != nil {
			return fmt.Sprintf("entry %d: %v", i, err)
		}
		if w, ok := b.logs[i]; ok && (l.Term != w.Term || l.Type != w.Type || !bytes.Equal(l.Data, w.Data)) {
			return fmt.Sprintf("entry %d is of term %d with %d bytes, want term %d with %d", i, l.Term, len(l.Data),
				w.Term, len(w.Data))
		}
	}
	for k, want := range b.votes {
		if v, err := b.disk.stable.GetUint64([]byte(k)); v != want || err != nil {
			return fmt.Sprintf("%s is %d, want %d, error %v", k, v, want, err)
		}
	}
	if b.snapshot == nil {
		return ""
	}
	list, err := b.disk.Snapshots.List()
	if err != nil || len(list) == 0 || list[0].Index != b.index || list[0].Size != int64(len(b.snapshot)) {
		return fmt.Sprintf("snapshots: %v, error %v", list, err)
	}
	content, err := readSnapshot(b.disk.Snapshots, list[0].ID)
	if err != nil || !bytes.Equal(content, b.snapshot) {
		return fmt.Sprintf("snapshot holds %d bytes, want %d, error %v", len(content), len(b.snapshot), err)
	}
	return ""
}

func (b *diskEnv) requireSame(t *testing.T) {
	t.Helper()
	if d := b.differs(); d != "" {
		t.Error(d)
	}
}

func readSnapshot(s *snapshotStore, id string) ([]byte, error) {
	_, r, err := s.Open(id)
	if err != nil {
		return nil, err
	}
	defer r.Close()
	var out bytes.Buffer
	_, err = out.ReadFrom(r)
	return out.Bytes(), err
}

func forEachLogKind(t *testing.T, f func(t *testing.T, kind LogStoreKind, keys *Keyring)) {
	for _, kind := range logKinds {
		t.Run(string(kind), func(t *testing.T) { f(t, kind, nil) })
		t.Run(string(kind)+"-sealed", func(t *testing.T) { f(t, kind, newTestKeyring("k1")) })
	}
}

// newTestKeyring returns a keyring with keys that are derived from their IDs.
func newTestKeyring(ids ...string) *Keyring {
	var lines strings.Builder
	for _, id := range ids {
		secret := make([]byte, keyBytes)
		copy(secret, id)
		fmt.Fprintf(&lines, "%s %s\n", id, base64.StdEncoding.EncodeToString(secret))
	}
	k, err := parseKeyring([]byte(lines.String()))
	if err != nil {
		panic(err)
	}
	return k
}

// TestDiskKeeps: appended and deleted entries, votes, and snapshots survive a restart, with each
// log store.
func TestDiskKeeps(t *testing.T) {
	forEachLogKind(t, func(t *testing.T, kind LogStoreKind, keys *Keyring) {
		b := newDiskEnv(t, t.TempDir(), kind, keys)
		b.setVote(t, "CurrentTerm", 7)
		b.appendEntries(t, 1, 10, 100)
		b.appendEntries(t, 1, 1, 300_000) // longer than the journal
		b.appendEntries(t, 1, 300, 2000)  // more than the journal
		b.requireSame(t)
		b.reopen(t)
		b.requireSame(t)
		b.truncateFrom(t, 200)
		b.requireSame(t)
		b.appendEntries(t, 2, 50, 30)
		b.reopen(t)
		b.requireSame(t)
		b.takeSnapshot(t, 100, 1, bytes.Repeat([]byte("state"), 100_000))
		b.compact(t, 90)
		b.requireSame(t)
		b.reopen(t)
		b.requireSame(t)
		b.truncateFrom(t, b.last)
		b.reopen(t)
		b.truncateFrom(t, b.last)
		b.appendEntries(t, 3, 3, 10)
		b.reopen(t)
		b.requireSame(t)
		if len(b.failed) > 0 {
			t.Errorf("failures: %v", b.failed)
		}
	})
}

// TestLogBeginsAnew: a snapshot from a leader replaces the whole log, which then starts at a much
// higher index.
func TestLogBeginsAnew(t *testing.T) {
	forEachLogKind(t, func(t *testing.T, kind LogStoreKind, keys *Keyring) {
		b := newDiskEnv(t, t.TempDir(), kind, keys)
		b.appendEntries(t, 1, 20, 100)
		b.takeSnapshot(t, 5000, 4, []byte("from the leader"))
		b.compact(t, b.last)
		b.last = 5000
		b.reopen(t)
		b.requireSame(t)
		b.appendEntries(t, 4, 20, 100)
		b.requireSame(t)
		b.reopen(t)
		b.requireSame(t)
	})
}

// TestDiskAgreesWithModel: any sequence of raft's operations gives the same content as a simple
// model.
func TestDiskAgreesWithModel(t *testing.T) {
	forEachLogKind(t, func(t *testing.T, kind LogStoreKind, keys *Keyring) {
		if (kind == LogWAL) != (keys != nil) {
			return // encryption is independent of the log store: each kind is tested once
		}
		rapid.Check(t, func(t *rapid.T) {
			dir, err := os.MkdirTemp("", "disk")
			if err != nil {
				t.Fatalf("%v", err)
			}
			defer os.RemoveAll(dir)
			b := newDiskEnv(t, dir, kind, keys)
			defer func() { b.disk.Close() }()
			term := uint64(1)
			for range rapid.IntRange(1, 15).Draw(t, "steps") {
				switch step := rapid.IntRange(0, 9).Draw(t, "step"); {
				case step < 4 || b.first == 0:
					b.appendEntries(t, term, rapid.IntRange(1, 20).Draw(t, "n"),
						rapid.SampledFrom([]int{0, 10, 600, 9000, 80_000}).Draw(t, "size"))
				case step == 4 && b.index < b.last:
					to := rapid.Uint64Range(max(b.first, b.index+1), b.last).Draw(t, "to")
					b.takeSnapshot(t, to, term, []byte(fmt.Sprint(to)))
					b.compact(t, rapid.Uint64Range(b.first, to).Draw(t, "trailing"))
				case step == 5 && b.last > b.index:
					term++
					b.truncateFrom(t, rapid.Uint64Range(max(b.first, b.index+1), b.last).Draw(t, "from"))
				case step == 6:
					b.setVote(t, rapid.SampledFrom([]string{"CurrentTerm", "LastVoteTerm"}).Draw(t, "key"), term)
				default:
					b.reopen(t)
				}
				if d := b.differs(); d != "" {
					t.Fatalf("%s", d)
				}
			}
		})
	})
}

func TestOtherReplicasData(t *testing.T) {
	b := newDiskEnv(t, t.TempDir(), LogBolt, nil)
	b.close(t)
	b.cfg.Name = "r2"
	if err := b.open(); !errors.Is(err, ErrForeignData) {
		t.Errorf("another replica's data: %v", err)
	}
}

func TestOtherLogStore(t *testing.T) {
	for i, kind := range logKinds {
		b := newDiskEnv(t, t.TempDir(), kind, nil)
		b.appendEntries(t, 1, 3, 10)
		b.close(t)
		b.cfg.LogStore = logKinds[1-i]
		if err := b.open(); !errors.Is(err, ErrLogStore) || !strings.Contains(err.Error(), "convert") {
			t.Errorf("made with %s, opened with %s: %v", kind, b.cfg.LogStore, err)
		}
		b.cfg.LogStore = kind
		if err := b.open(); err != nil {
			t.Fatal(err)
		}
		b.requireSame(t)
		b.close(t)
	}
}

// TestDataOfAnEarlierVersion: data of the first versions is not reported as damaged.
func TestDataOfAnEarlierVersion(t *testing.T) {
	dir := t.TempDir()
	b, err := openBolt(filepath.Join(dir, boltName), true)
	if err != nil {
		t.Fatal(err)
	}
	if err := errors.Join(b.Set([]byte("CurrentTerm"), make([]byte, 8)), b.Set([]byte(oldOwnerKey), []byte("r1")),
		b.Close()); err != nil {
		t.Fatal(err)
	}
	_, err = openDisk(Config{Name: "r1", Dir: dir, NoSync: true}.withDefaults(), func(error) {})
	if !errors.Is(err, ErrDataFormat) || errors.Is(err, ErrCorruptLog) {
		t.Errorf("opened: %v", err)
	}
}

func TestDiskInUse(t *testing.T) {
	b := newDiskEnv(t, t.TempDir(), LogBolt, nil)
	defer b.close(t)
	if _, err := openDisk(b.cfg, func(error) {}); !errors.Is(err, ErrInUse) {
		t.Errorf("opened twice: %v", err)
	}
}
