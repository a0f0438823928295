package disk

import (
	"bytes"
	"encoding/json"
	"errors"
	"flag"
	"fmt"
	"io/fs"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"strings"
	"testing"

	"keelson.dev/keelson/raftstore/disk/wal"
)

var damageTries = flag.Int("damage.tries", 25, "bytes flipped in each file of a data directory")

// damages are the errors that report damaged files.
var damages = []error{ErrCorruptLog, ErrCorruptVotes, ErrCorruptSnapshot, ErrCorruptKeys, ErrSealed}

// newPopulatedEnv returns a closed data directory with content in every file.
func newPopulatedEnv(t *testing.T, kind LogStoreKind, keys *Keyring) *diskEnv {
	b := newDiskEnv(t, t.TempDir(), kind, keys)
	b.setVote(t, "CurrentTerm", 3)
	b.appendEntries(t, 1, 40, 700)
	b.takeSnapshot(t, 20, 1, bytes.Repeat([]byte("early"), 1000))
	b.appendEntries(t, 1, 30, 6000)
	b.reopen(t) // moves the entries in the journal to bbolt
	b.truncateFrom(t, 60)
	b.appendEntries(t, 2, 10, 400)
	b.takeSnapshot(t, 50, 1, bytes.Repeat([]byte("later"), 1000))
	b.compact(t, 30)
	b.setVote(t, "LastVoteTerm", 2)
	b.setVote(t, "CurrentTerm", 4)
	b.appendEntries(t, 2, 5, 100)
	b.close(t)
	return b
}

func dataFiles(t *testing.T, dir string) map[string][]byte {
	files := make(map[string][]byte)
	err := filepath.WalkDir(dir, func(path string, e fs.DirEntry, err error) error {
		if err != nil || e.IsDir() {
			return err
		}
		files[path], err = os.ReadFile(path)
		return err
	})
	if err != nil {
		t.Fatal(err)
	}
	return files
}

func putFiles(t *testing.T, dir string, files map[string][]byte) {
	if err := os.RemoveAll(dir); err != nil {
		t.Fatal(err)
	}
	for path, content := range files {
		if err := os.MkdirAll(filepath.Dir(path), 0o700); err != nil {
			t.Fatal(err)
		}
		if err := os.WriteFile(path, content, 0o600); err != nil {
			t.Fatal(err)
		}
	}
}

// TestDamageIsFound: if any byte of any file is flipped, or a file is truncated anywhere, the
// replica does not start and the error names the file, or the data is not affected.
func TestDamageIsFound(t *testing.T) {
	forEachLogKind(t, func(t *testing.T, kind LogStoreKind, keys *Keyring) {
		b := newPopulatedEnv(t, kind, keys)
		good := dataFiles(t, b.cfg.Dir)
		random := rand.New(rand.NewPCG(1, uint64(len(kind))))
		refused, harmless := make(map[string]int), make(map[string]int)
		try := func(path, what string, content []byte) {
			t.Helper()
			files := make(map[string][]byte, len(good))
			for p, c := range good {
				files[p] = c
			}
			files[path] = content
			putFiles(t, b.cfg.Dir, files)
			name := filepath.Base(path)
			err := b.open()
			if err == nil {
				d := b.differs()
				// Damage to data that is first read here is also reported here.
				if d != "" && (len(b.failed) == 0 || !isTypedDamage(b.failed[0], path)) {
					t.Errorf("%s %s: %s, failures %v", name, what, d, b.failed)
				}
				if d == "" {
					harmless[name]++
				} else {
					refused[name]++
				}
				b.close(t)
				return
			}
			refused[name]++
			if !isTypedDamage(err, path) || !strings.Contains(err.Error(), "join again") && !errors.Is(err, ErrSealed) {
				t.Errorf("%s %s: %v", name, what, err)
			}
		}
		for path, content := range good {
			size := len(content)
			for range *damageTries {
				at := random.IntN(size)
				if filepath.Base(path) == boltName {
					at = usedByte(t, content, random)
				}
				bad := bytes.Clone(content)
				bad[at] ^= byte(1 + random.IntN(255))
				try(path, fmt.Sprintf("byte %d flipped", at), bad)
			}
			for range *damageTries / 8 {
				try(path, "cut off", content[:random.IntN(size)])
			}
			try(path, "emptied", nil)
		}
		for name := range harmless {
			t.Logf("%s: %d refused, %d harmless", name, refused[name], harmless[name])
		}
		for path := range good {
			if name := filepath.Base(path); refused[name] == 0 && !isSpareFile(t, good, path) {
				t.Errorf("no damage to %s was refused", name)
			}
		}
	})
}

// isSpareFile reports whether a file is a spare file of raft-wal, without content.
func isSpareFile(t *testing.T, files map[string][]byte, path string) bool {
	if filepath.Ext(path) != wal.FileSuffix {
		return false
	}
	var l wal.List
	if err := json.Unmarshal(files[filepath.Join(filepath.Dir(path), wal.ListName)][4:], &l); err != nil {
		t.Fatal(err)
	}
	for _, p := range l.Places {
		if p.File == filepath.Base(path) {
			return false
		}
	}
	return true
}

// usedByte returns the offset of a byte in a used page of a bbolt file. Half of them are in the
// header and the element list of the page.
func usedByte(t *testing.T, content []byte, random *rand.Rand) int {
	c := boltCheck{f: bytes.NewReader(content), size: int64(len(content)), seen: make(map[uint64]struct{})}
	if err := c.checkFile(); err != nil {
		t.Fatal(err)
	}
	pages := []uint64{0, 1}
	for p := range c.seen {
		pages = append(pages, p)
	}
	slices.Sort(pages)
	page := pages[random.IntN(len(pages))]
	within := int(c.pageSize)
	if page < 2 || random.IntN(2) == 0 {
		within = 96
	}
	return int(page)*int(c.pageSize) + random.IntN(within)
}

// isTypedDamage reports whether an error is one of damages and names the file. For the files of the
// journal and for bbolt's log, whose end the journal records, it may name either.
func isTypedDamage(err error, path string) bool {
	named := strings.Contains(err.Error(), path)
	if name := filepath.Base(path); name == boltName || strings.HasPrefix(name, journalName) {
		named = named || strings.Contains(err.Error(), filepath.Join(filepath.Dir(path), journalName))
	}
	for _, d := range damages {
		if errors.Is(err, d) {
			return named
		}
	}
	return false
}
