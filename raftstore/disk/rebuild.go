package disk

import (
	"encoding/binary"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"
	"slices"
	"time"

	"github.com/hashicorp/raft"

	"keelson.dev/keelson/raftstore"
	"keelson.dev/keelson/raftstore/disk/platter"
	"keelson.dev/keelson/raftstore/mvcc"
)

// DiskInfo is what Inspect finds in a data directory.
type DiskInfo struct {
	Owner     string       // name of the replica; "" when the directory holds none
	Cluster   string       // of the newest snapshot that can be read
	LogStore  LogStoreKind // "" when there is no log
	First     uint64       // index of the first entry of the log; 0 = the log is empty
	Last      uint64       // and of the last
	LastTerm  uint64       // and its term: with Last it tells which of several logs has more
	Term      uint64       // current raft term
	Sealed    []string     // ids of the key-encryption keys that it needs
	Bytes     int64        // on the disk, of all files
	Snapshots []SnapshotInfo
}

// SnapshotInfo is one snapshot of a data directory, newest first.
type SnapshotInfo struct {
	File     string
	Index    uint64
	Term     uint64
	Bytes    int64 // of its content
	Taken    time.Time
	Sealed   bool
	Revision raftstore.Revision // 0 when it cannot be read without a key
}

// ErrNoData reports a directory that holds no replica's data.
var ErrNoData = errors.New("raftstore: no replica's data")

// lookRecord reads the stable store of a directory that nobody has open.
func lookRecord(dir string, patience time.Duration) (stableRecord, error) {
	path := filepath.Join(dir, boltName)
	lock, err := lockFolder(dir, patience)
	if err != nil {
		if errors.Is(err, os.ErrNotExist) {
			err = fmt.Errorf("%s: %w", dir, ErrNoData)
		}
		return stableRecord{}, err
	}
	defer lock.Close()
	b, err := checkBolt(path)
	if err != nil {
		return stableRecord{}, err
	}
	rec, err := decodeRecord(b)
	if err != nil {
		return rec, fmt.Errorf("%s: %w", path, err)
	}
	return rec, nil
}

// Inspect reads and checks a data directory that no replica uses. It needs
// c.Dir, and c.Keys to check what is sealed. What it finds damaged is an
// error that names the file, together with what could be read. It changes
// nothing but what a start would: a journal that a crash left is brought to
// its end.
func Inspect(c Config) (DiskInfo, error) {
	var info DiskInfo
	rec, err := lookRecord(c.Dir, 0)
	info.Bytes = folderBytes(c.Dir)
	if err != nil {
		return info, fmt.Errorf("inspecting %s: %w", c.Dir, err)
	}
	info.Owner, info.LogStore = rec.owner, rec.kind
	if v := rec.values["CurrentTerm"]; len(v) == 8 {
		info.Term = binary.BigEndian.Uint64(v)
	}
	c.Name, c.LogStore = rec.owner, rec.kind
	c = c.withDefaults()
	err = info.look(c)
	if err != nil {
		return info, fmt.Errorf("inspecting %s: %w", c.Dir, err)
	}
	return info, nil
}

// look fills in what lies in files of their own; it goes on as far as it can.
func (info *DiskInfo) look(c Config) error {
	seals, err := openSealer(filepath.Join(c.Dir, sealName), c.Keys)
	if err != nil {
		return err
	}
	info.Sealed = seals.needs()
	store := newSnapshotStore(c, seals, func(error) {})
	list, err := store.list()
	if errors.Is(err, fs.ErrNotExist) {
		list, err = nil, nil
	}
	for i, k := range list {
		one := SnapshotInfo{File: store.path(k.id), Index: k.Index, Term: k.Term, Bytes: k.size, Taken: time.UnixMilli(k.Taken), Sealed: k.Key != 0}
		cluster, revision, lookErr := store.peek(k.id)
		if lookErr != nil && !errors.Is(lookErr, ErrSealed) {
			err = errors.Join(err, lookErr)
		}
		if one.Revision = revision; i == 0 {
			info.Cluster = cluster
		}
		info.Snapshots = append(info.Snapshots, one)
	}
	d, openErr := openDisk(c, func(error) {})
	if openErr != nil {
		return errors.Join(err, openErr)
	}
	defer d.Close()
	var e error
	if info.First, e = d.Log.FirstIndex(); e == nil {
		info.Last, e = d.Log.LastIndex()
	}
	if e == nil && info.Last > 0 {
		var last raft.Log
		e = d.Log.GetLog(info.Last, &last)
		info.LastTerm = last.Term
	}
	return errors.Join(err, e)
}

// peek reads a whole snapshot and says of which cluster and revision it is.
func (s *snapshotStore) peek(id string) (string, raftstore.Revision, error) {
	_, content, err := s.Open(id)
	if err != nil {
		return "", 0, err
	}
	defer content.Close()
	machine, meta, err := mvcc.Load(content)
	if err != nil {
		return "", 0, s.bad(id, err)
	}
	return meta.Cluster, machine.View().Revision(), nil
}

// folderBytes is how much the files of a folder take.
func folderBytes(dir string) int64 {
	total := int64(0)
	// What cannot be read is left out: this is for people to look at.
	_ = filepath.WalkDir(dir, func(_ string, e fs.DirEntry, err error) error {
		if err != nil {
			return nil
		}
		if info, err := e.Info(); err == nil && info.Mode().IsRegular() {
			total += info.Size()
		}
		return nil
	})
	return total
}

// ours are the names that a replica gives to what it keeps.
func ours(name string) bool {
	for _, n := range append([]string{boltName, walName, sealName, snapshotsName, stagingName}, journalFiles()...) {
		if name == n || name == n+platter.NewSuffix {
			return true
		}
	}
	return false
}

// SetAside moves the raft data of a replica that does not run out of the way,
// so that it can join again empty or be restored. It returns the directory,
// beside c.Dir, where the data is now. It does not look at what it moves,
// so that damaged data can be moved, too; it needs c.Dir only.
//
// The data must not come back after the replica has joined again: what it had
// promised in votes would be forgotten.
func SetAside(c Config) (moved string, err error) {
	lock, err := lockFolder(c.Dir, 0)
	if err == nil {
		defer lock.Close()
	} else if !errors.Is(err, os.ErrNotExist) {
		return "", fmt.Errorf("setting aside %s: %w", c.Dir, err)
	}
	list, err := os.ReadDir(c.Dir)
	if err != nil {
		return "", fmt.Errorf("setting aside: %w", err)
	}
	list = slices.DeleteFunc(list, func(e fs.DirEntry) bool { return !ours(e.Name()) })
	if len(list) == 0 {
		return "", fmt.Errorf("setting aside %s: %w", c.Dir, ErrNoData)
	}
	// raft.db is the first to go: cut short, this directory does not start, and
	// the rest is moved by the next attempt.
	slices.SortFunc(list, func(a, b fs.DirEntry) int {
		switch {
		case a.Name() == boltName:
			return -1
		case b.Name() == boltName:
			return 1
		}
		return 0
	})
	moved = fmt.Sprintf("%s.aside-%s", filepath.Clean(c.Dir), time.Now().UTC().Format("20060102T150405.000000000"))
	if err := os.Mkdir(moved, 0o700); err != nil {
		return "", fmt.Errorf("setting aside: %w", err)
	}
	for _, e := range list {
		if err := os.Rename(filepath.Join(c.Dir, e.Name()), filepath.Join(moved, e.Name())); err != nil {
			return moved, fmt.Errorf("setting aside: %w", err)
		}
	}
	return moved, errors.Join(platter.SyncFolder(moved), platter.SyncFolder(c.Dir), platter.SyncFolder(filepath.Dir(moved)))
}

func journalFiles() []string {
	names := journalNames(journalName)
	return names[:]
}
