package disk

import (
	"bytes"
	"encoding/binary"
	"encoding/json"
	"errors"
	"fmt"
	"hash/crc32"
	"maps"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"sync"
	"syscall"
	"testing"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/internal/durable"
	"keelson.dev/keelson/internal/durable/durabletest"
	"keelson.dev/keelson/raftstore/disk/sector"
	"keelson.dev/keelson/raftstore/disk/wal"
)

// newWALEnv returns a disk with small segments.
func newWALEnv(t *testing.T) *diskEnv {
	b := &diskEnv{logs: make(map[uint64]raft.Log), votes: make(map[string]uint64)}
	b.cfg = Config{Name: "r1", Dir: filepath.Join(t.TempDir(), "data"), LogStore: LogWAL, NoSync: true,
		SegmentBytes: 16 << 10}.withDefaults()
	if err := b.open(); err != nil {
		t.Fatal(err)
	}
	return b
}

// fillAndShorten fills some segments and drops earlier ones.
func (b *diskEnv) fillAndShorten(t *testing.T) {
	for range 60 {
		b.appendEntries(t, 1, 1, 900)
	}
	b.takeSnapshot(t, b.last, 1, []byte("state"))
	b.compact(t, b.last-5)
}

func walFiles(t *testing.T, b *diskEnv) []string { return walFilesIn(t, b.cfg.Dir) }

func walFilesIn(t *testing.T, dir string) []string {
	list, err := filepath.Glob(filepath.Join(dir, walName, "*"+wal.FileSuffix))
	if err != nil {
		t.Error(err)
	}
	return list
}

func readWALList(t *testing.T, b *diskEnv) wal.List {
	content, err := os.ReadFile(filepath.Join(b.cfg.Dir, walName, wal.ListName))
	if err != nil {
		t.Fatal(err)
	}
	l, err := wal.ParseList(content, b.disk.stable.currentRecord().logID)
	if err != nil {
		t.Fatal(err)
	}
	return l
}

// TestWALRecyclesFiles: a log that is shortened as fast as it grows uses the same files for many
// segments.
func TestWALRecyclesFiles(t *testing.T) {
	b := newWALEnv(t)
	for range 8 {
		b.fillAndShorten(t)
	}
	early := make(map[uint64]bool)
	for _, path := range walFiles(t, b) {
		early[inode(t, path)] = true
	}
	for range 20 {
		b.fillAndShorten(t)
		b.requireSame(t)
	}
	var fresh []string
	for _, path := range walFiles(t, b) {
		if !early[inode(t, path)] {
			fresh = append(fresh, path)
		}
	}
	if len(fresh) > 1 { // one may be created ahead of need
		t.Errorf("%v are not of the %d files of the beginning", fresh, len(early))
	}
	l := readWALList(t, b)
	if n := uint64(len(walFiles(t, b))); l.NextSegmentID < 10*n {
		t.Errorf("%d segments so far, in %d files", l.NextSegmentID, n)
	}
	b.close(t)
}

func inode(t *testing.T, path string) uint64 {
	var s syscall.Stat_t
	if err := syscall.Stat(path, &s); err != nil {
		t.Fatal(err)
	}
	return s.Ino
}

// TestWALLetsFilesGo: a log that was long once releases the space.
func TestWALLetsFilesGo(t *testing.T) {
	b := newWALEnv(t)
	b.appendEntries(t, 1, 1, 100)
	for range 5 * wal.MaxSpares {
		b.appendEntries(t, 1, 8, 2000) // more than a segment
	}
	if n := len(walFiles(t, b)); n < 4*wal.MaxSpares {
		t.Fatalf("%d files of a long log", n)
	}
	b.takeSnapshot(t, b.last, 1, []byte("state"))
	b.compact(t, b.last-5)
	if n := len(walFiles(t, b)); n > wal.MaxSpares+3 {
		t.Errorf("%d files after it was shortened", n)
	}
	for range 3 {
		b.fillAndShorten(t)
	}
	if n := len(walFiles(t, b)); n > 12 {
		t.Errorf("%d files when it had long been short", n)
	}
	b.reopen(t)
	b.requireSame(t)
	b.close(t)
}

// crashPoint is the state of the log at a moment, and what may exist after a crash.
type crashPoint struct {
	acked  map[uint64]raft.Log
	first  uint64              // the oldest acknowledged entry
	last   uint64              // the newest acknowledged entry
	doing  map[uint64]raft.Log // entries that are being appended
	cut    uint64              // the new end of a log whose last entries are being deleted
	shrink uint64              // the new start of a log whose first entries are being deleted
}

// TestWALFilesChangeHandsWhole: at any moment, in the middle of an append, while segments and their
// files change, or while a file is filled, a crash leaves the acknowledged log. The previous
// content of a file is never part of it. F52
func TestWALFilesChangeHandsWhole(t *testing.T) {
	layer := &durabletest.Lossy{}
	b := &diskEnv{logs: make(map[uint64]raft.Log), votes: make(map[string]uint64)}
	b.cfg = Config{Name: "r1", Dir: filepath.Join(t.TempDir(), "data"), LogStore: LogWAL, NoSync: true,
		SegmentBytes: 16 << 10, Files: layer}.withDefaults()
	if err := b.open(); err != nil {
		t.Fatal(err)
	}
	copied := b.cfg
	copied.Dir, copied.Files = filepath.Join(t.TempDir(), "data"), nil
	var mu sync.Mutex
	var now crashPoint
	looked := 0
	look := func(string, string) error {
		mu.Lock()
		defer mu.Unlock()
		looked++
		if err := now.checkFiles(readDataFiles(t, b.cfg.Dir), b.cfg.Dir, copied); err != nil {
			t.Errorf("moment %d, %d to %d: %v", looked, now.first, now.last, err)
		}
		return nil
	}
	begin := func(m crashPoint) {
		mu.Lock()
		defer mu.Unlock()
		now = m
		now.acked, now.first, now.last = maps.Clone(b.logs), b.first, b.last
	}
	layer.Fail(look)
	term := uint64(1)
	for i := range 250 {
		var doing []*raft.Log
		next := make(map[uint64]raft.Log)
		for n := range uint64(3) {
			l := &raft.Log{Index: b.last + 1 + n, Term: term,
				Data: bytes.Repeat([]byte{byte(b.last + n), byte(term)}, 100+i%3*50)}
			doing, next[l.Index] = append(doing, l), *l
		}
		begin(crashPoint{doing: next})
		if err := b.disk.Log.StoreLogs(doing); err != nil {
			t.Fatal(err)
		}
		maps.Copy(b.logs, next)
		b.last += 3
		b.first = max(b.first, 1)
		switch {
		case i%9 == 4:
			b.takeSnapshot(t, b.last-4, term, []byte("state"))
			begin(crashPoint{shrink: b.last - 4})
			b.compact(t, b.last-5)
		case i%9 == 8:
			begin(crashPoint{cut: b.last - 7})
			b.truncateFrom(t, b.last-6)
			term++
		}
	}
	l := readWALList(t, b)
	b.close(t)
	layer.Fail(nil)
	if _, err := layer.Crash(func() bool { return false }); err != nil {
		t.Fatal(err)
	}
	if lives := l.NextSegmentID / uint64(len(l.Places)+len(l.Spares)); looked < 300 || lives < 2 {
		t.Errorf("%d moments, each file was %d segments", looked, lives)
	}
}

// readDataFiles returns the content of all files. It reads the list of segments last, so that the
// files that the list names exist. It reads a file until the content is the same twice.
func readDataFiles(t *testing.T, dir string) map[string][]byte {
	files := make(map[string][]byte)
	meta := filepath.Join(dir, walName, wal.ListName)
	snapshots, err := filepath.Glob(filepath.Join(dir, snapshotsName, "*"))
	if err != nil {
		t.Error(err)
	}
	list := append(walFilesIn(t, dir), append(snapshots, filepath.Join(dir, boltName), meta)...)
	for _, path := range list {
		for still := false; !still; {
			content, err := os.ReadFile(path)
			if errors.Is(err, os.ErrNotExist) {
				break // removed concurrently
			}
			if err != nil {
				t.Error(err)
				break
			}
			still = bytes.Equal(content, files[path])
			files[path] = content
		}
	}
	return files
}

func (m crashPoint) checkFiles(files map[string][]byte, dir string, c Config) error {
	if err := os.RemoveAll(c.Dir); err != nil {
		return err
	}
	for path, content := range files {
		path = strings.Replace(path, dir, c.Dir, 1)
		if err := errors.Join(os.MkdirAll(filepath.Dir(path), 0o700), os.WriteFile(path, content, 0o600)); err != nil {
			return err
		}
	}
	d, err := openDisk(c, func(error) {})
	if err != nil {
		return err
	}
	defer d.Close()
	first, err := d.Log.FirstIndex()
	last, err2 := d.Log.LastIndex()
	if err := errors.Join(err, err2); err != nil {
		return err
	}
	ends := []uint64{m.last, m.last + uint64(len(m.doing))}
	if m.cut != 0 {
		ends = append(ends, m.cut)
	}
	if !slices.Contains(ends, last) || m.first != 0 && first > max(m.first, m.shrink) {
		return fmt.Errorf("the log reaches from %d to %d, want from %d or %d to one of %d", first, last, m.first,
			m.shrink, ends)
	}
	for i := first; i != 0 && i <= last; i++ {
		var l raft.Log
		if err := d.Log.GetLog(i, &l); err != nil {
			return err
		}
		want, ok := m.acked[i]
		if !ok {
			want, ok = m.doing[i]
		}
		if ok && (l.Term != want.Term || !bytes.Equal(l.Data, want.Data)) {
			return fmt.Errorf("entry %d is of term %d, want term %d", i, l.Term, want.Term)
		}
	}
	return d.Log.StoreLog(&raft.Log{Index: last + 1, Term: 99}) // the log accepts further entries
}

// TestWALSectorThatWasLost: an acknowledged sector that is empty, or that has the content of an
// earlier segment, is damage and not the end of the log.
func TestWALSectorThatWasLost(t *testing.T) {
	b := newWALEnv(t)
	for range 6 {
		b.fillAndShorten(t)
	}
	b.close(t)
	before := dataFiles(t, b.cfg.Dir)
	if err := b.open(); err != nil {
		t.Fatal(err)
	}
	// A new segment in the file of an earlier one.
	old := readWALList(t, b)
	for l := old; len(l.Segments) == len(old.Segments) ||
		len(slices.DeleteFunc(slices.Clone(old.Spares), func(s string) bool {
			return slices.Contains(l.Spares, s)
		})) == 0; l = readWALList(t, b) {
		b.appendEntries(t, 1, 1, 900)
	}
	for range 4 {
		b.appendEntries(t, 1, 1, 900)
	}
	l := readWALList(t, b)
	b.close(t)
	name := filepath.Join(b.cfg.Dir, walName, l.Places[tailName(l)].File)
	after := dataFiles(t, b.cfg.Dir)
	if _, waited := before[name]; !waited {
		t.Fatalf("the last segment lies in a new file, %s", name)
	}
	for what, lost := range map[string][]byte{"what was there before": before[name],
		"nothing": make([]byte, len(before[name]))} {
		for n := 2; n <= 5; n++ {
			files := maps.Clone(after)
			bad := bytes.Clone(after[name])
			copy(bad[n*sector.Size:(n+1)*sector.Size], lost[n*sector.Size:])
			files[name] = bad
			putFiles(t, b.cfg.Dir, files)
			err := b.open()
			if !errors.Is(err, ErrCorruptLog) || !strings.Contains(err.Error(), name) {
				t.Errorf("sector %d holds %s: %v", n, what, err)
			}
			if err == nil {
				b.close(t)
			}
		}
	}
	putFiles(t, b.cfg.Dir, after)
	if err := b.open(); err != nil {
		t.Fatal(err)
	}
	b.requireSame(t)
	b.close(t)
}

func tailName(l wal.List) string {
	last := l.Segments[len(l.Segments)-1]
	return fmt.Sprintf("%020d-%016x%s", last.BaseIndex, last.ID, wal.FileSuffix)
}

// TestWALOfTheFirstVersion: a log of the first version, with a file for each segment, can be used,
// and its files are reused.
func TestWALOfTheFirstVersion(t *testing.T) {
	b := newWALEnv(t)
	for range 30 {
		b.appendEntries(t, 1, 2, 700)
	}
	l, id := readWALList(t, b), b.disk.stable.currentRecord().logID
	b.close(t)
	dir := filepath.Join(b.cfg.Dir, walName)
	for name, p := range l.Places {
		content, err := os.ReadFile(filepath.Join(dir, p.File))
		if err != nil {
			t.Fatal(err)
		}
		for at := 0; at < len(content); at += sector.Size {
			s, state := sector.CheckStamp(content[at:], wal.FileSeed(id, p.File), int64(at))
			if state == sector.Valid {
				s.Number = min(s.Number, 7) // the seventh opening of the file
				sector.Seal(content[at:], wal.FileSeed(id, name), int64(at), s)
			}
		}
		if err := os.WriteFile(filepath.Join(dir, name), content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
	for path := range dataFiles(t, dir) {
		if _, old := l.Places[filepath.Base(path)]; !old {
			if err := os.Remove(path); err != nil {
				t.Fatal(err)
			}
		}
	}
	list, err := json.Marshal(l.PersistentState)
	if err != nil {
		t.Fatal(err)
	}
	list = append(binary.LittleEndian.AppendUint32(nil, crc32.Update(id, castagnoli, list)), list...)
	if err := errors.Join(os.WriteFile(filepath.Join(dir, wal.ListName), list, 0o600),
		os.WriteFile(filepath.Join(dir, "spare"), make([]byte, 5000), 0o600)); err != nil {
		t.Fatal(err)
	}
	for range 3 {
		if err := b.open(); err != nil {
			t.Fatal(err)
		}
		b.requireSame(t)
		b.fillAndShorten(t)
		b.requireSame(t)
		b.close(t)
	}
	if there, err := durable.Exists(filepath.Join(dir, "spare")); there || err != nil {
		t.Errorf("its spare file is there: %v, error %v", there, err)
	}
}
