package disk

import (
	"errors"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"runtime/debug"
	"time"

	"github.com/hashicorp/raft"
	raftboltdb "github.com/hashicorp/raft-boltdb/v2"
	"go.etcd.io/bbolt"
	"golang.org/x/sys/unix"

	"keelson.dev/keelson/raftstore/disk/platter"
)

// ErrInUse reports a data directory that another process has open.
var ErrInUse = errors.New("raftstore: data directory is in use")

// boltName is the file of the stable store, and of the log with LogBolt.
const boltName = "raft.db"

// boltLog is raft-boltdb behind a wall: bbolt trusts its pages and panics, or
// reads past its file, where they are damaged. checkBolt has found them whole
// when the file was opened; what happens to them later comes out as an error.
type boltLog struct {
	store *raftboltdb.BoltStore
	path  string
}

func openBolt(path string, noSync bool) (b *boltLog, err error) {
	defer guard(path, &err)
	store, err := raftboltdb.New(raftboltdb.Options{
		Path:   path,
		NoSync: noSync,
		BoltOptions: &bbolt.Options{
			// Another process holding the file is an error, not a reason to hang.
			Timeout: lockPatience,
			// The list of free pages is found again by a scan at the start;
			// writing it would double what a small commit writes.
			NoFreelistSync: true,
			FreelistType:   bbolt.FreelistMapType,
		},
	})
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", path, err)
	}
	return &boltLog{store: store, path: path}, nil
}

// makeBolt makes the file of a new replica. A crash leaves a whole one or none.
func makeBolt(path string, rec stableRecord, noSync bool) error {
	tmp := path + platter.NewSuffix
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	b, err := openBolt(tmp, noSync)
	if err != nil {
		return err
	}
	err = (&stableStore{inner: b}).write(rec)
	if err := errors.Join(err, b.Close()); err != nil {
		return fmt.Errorf("%s: %w", tmp, err)
	}
	return platter.MoveFile(tmp, path)
}

// guard turns a panic, also one of a bad memory access, into an error. It
// is deferred.
func guard(path string, err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("%s: reading its pages: %v: %w", path, p, ErrCorruptLog)
	}
}

// faults makes bad memory accesses of this goroutine panic until it is undone.
func faults() func() {
	old := debug.SetPanicOnFault(true)
	return func() { debug.SetPanicOnFault(old) }
}

// FirstIndex implements raft.LogStore, as do the next five.
func (b *boltLog) FirstIndex() (i uint64, err error) {
	defer guard(b.path, &err)
	defer faults()()
	return b.store.FirstIndex()
}

func (b *boltLog) LastIndex() (i uint64, err error) {
	defer guard(b.path, &err)
	defer faults()()
	return b.store.LastIndex()
}

func (b *boltLog) GetLog(index uint64, out *raft.Log) (err error) {
	defer guard(b.path, &err)
	defer faults()()
	return b.store.GetLog(index, out)
}

func (b *boltLog) StoreLog(l *raft.Log) error { return b.StoreLogs([]*raft.Log{l}) }

func (b *boltLog) StoreLogs(logs []*raft.Log) (err error) {
	if len(logs) == 0 {
		return nil
	}
	defer guard(b.path, &err)
	defer faults()()
	return b.store.StoreLogs(logs)
}

func (b *boltLog) DeleteRange(first, last uint64) (err error) {
	defer guard(b.path, &err)
	defer faults()()
	return b.store.DeleteRange(first, last)
}

// Get reads a value of the stable store.
func (b *boltLog) Get(key []byte) (v []byte, err error) {
	defer guard(b.path, &err)
	defer faults()()
	return b.store.Get(key)
}

// Set writes a value of the stable store.
func (b *boltLog) Set(key, value []byte) (err error) {
	defer guard(b.path, &err)
	defer faults()()
	return b.store.Set(key, value)
}

// Close implements io.Closer.
func (b *boltLog) Close() error { return b.store.Close() }

// lockFolder takes the right to a data directory, as bbolt does, for as long
// as what it returns is open: nobody may read pages that another process writes.
func lockFolder(dir string, patience time.Duration) (io.Closer, error) {
	path := filepath.Join(dir, boltName)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(patience); ; {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline) {
			return nil, errors.Join(fmt.Errorf("%s: %w: %w", path, ErrInUse, err), f.Close())
		}
		<-time.After(lockPause)
	}
}
