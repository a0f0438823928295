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
)

var damageTries = flag.Int("damage.tries", 25, "bytes flipped in each file of a data directory")

// damages are the errors that say that a file is not what was written.
var damages = []error{ErrCorruptLog, ErrCorruptVotes, ErrCorruptSnapshot, ErrCorruptKeys, ErrSealed}

// populated is a data directory with something in every file, closed.
func populated(t *testing.T, kind LogStoreKind, keys *Keyring) *diskBed {
	b := newDiskBed(t, t.TempDir(), kind, keys)
	b.vote(t, "CurrentTerm", 3)
	b.append(t, 1, 40, 700)
	b.snap(t, 20, 1, bytes.Repeat([]byte("early"), 1000))
	b.append(t, 1, 30, 6000)
	b.reopen(t) // what was in the journal is in bbolt
	b.back(t, 60)
	b.append(t, 2, 10, 400)
	b.snap(t, 50, 1, bytes.Repeat([]byte("later"), 1000))
	b.compact(t, 30)
	b.vote(t, "LastVoteTerm", 2)
	b.vote(t, "CurrentTerm", 4)
	b.append(t, 2, 5, 100)
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

// Whichever byte of whichever file of a data directory is flipped, and wherever
// a file is cut off: the replica refuses to start with an error that names the
// file, or nothing at all is wrong.
func TestDamageIsFound(t *testing.T) {
	forKinds(t, func(t *testing.T, kind LogStoreKind, keys *Keyring) {
		b := populated(t, kind, keys)
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
				// What is read only now may be refused only now, by all of it.
				if d != "" && (len(b.failed) == 0 || !typed(b.failed[0], path)) {
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
			if !typed(err, path) || !strings.Contains(err.Error(), "join again") && !errors.Is(err, ErrSealed) {
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
			if name := filepath.Base(path); refused[name] == 0 && !waits(t, good, path) {
				t.Errorf("no damage to %s was refused", name)
			}
		}
	})
}

// waits says that a file waits for a segment of raft-wal, and holds nothing.
func waits(t *testing.T, files map[string][]byte, path string) bool {
	if filepath.Ext(path) != walSuffix {
		return false
	}
	var l walList
	if err := json.Unmarshal(files[filepath.Join(filepath.Dir(path), walMetaName)][4:], &l); err != nil {
		t.Fatal(err)
	}
	for _, p := range l.Places {
		if p.File == filepath.Base(path) {
			return false
		}
	}
	return true
}

// usedByte picks a byte of a bbolt file where a page in use begins, which is
// where its sense is, or anywhere in such a page.
func usedByte(t *testing.T, content []byte, random *rand.Rand) int {
	c := boltCheck{f: bytes.NewReader(content), size: int64(len(content)), seen: make(map[uint64]struct{})}
	if err := c.run(); err != nil {
		t.Fatal(err)
	}
	pages := []uint64{0, 1}
	for p := range c.seen {
		pages = append(pages, p)
	}
	slices.Sort(pages)
	page := pages[random.IntN(len(pages))]
	within := int(c.page)
	if page < 2 || random.IntN(2) == 0 {
		within = 96
	}
	return int(page)*int(c.page) + random.IntN(within)
}

// typed says that an error is one of damage and names the file. Of the two
// files of the journal, and of bbolt's log that the journal knows the end of,
// either may be named.
func typed(err error, path string) bool {
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
