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

	"keelson.dev/keelson/internal/durable"
)

// ErrInUse is returned for a data directory that another process has open.
var ErrInUse = errors.New("raftstore: data directory is in use")

// boltName is the name of the bbolt file, which contains the stable store, and with LogBolt also
// the log.
const boltName = "raft.db"

// boltLog is raft-boltdb with panics turned into errors. bbolt trusts its pages: if they are
// damaged, it panics or reads beyond its file. checkBolt verifies the pages when the file is
// opened; boltLog catches the panics that damage causes later.
type boltLog struct {
	bolt *raftboltdb.BoltStore
	path string
}

func openBolt(path string, noSync bool) (b *boltLog, err error) {
	defer recoverPanic(path, &err)
	store, err := raftboltdb.New(raftboltdb.Options{
		Path:   path,
		NoSync: noSync,
		BoltOptions: &bbolt.Options{
			// If another process has the file open, opening fails.
			Timeout: lockTimeout,
			// The list of free pages is rebuilt by a scan at the start. Writing it would double the
			// size of a small commit.
			NoFreelistSync: true,
			FreelistType:   bbolt.FreelistMapType,
		},
	})
	if err != nil {
		return nil, fmt.Errorf("opening %s: %w", path, err)
	}
	return &boltLog{bolt: store, path: path}, nil
}

// createBolt creates the bbolt file of a new replica with the given stable record, atomically and
// durably.
func createBolt(path string, rec stableRecord, noSync bool) error {
	tmp := path + durable.TempSuffix
	if err := os.RemoveAll(tmp); err != nil {
		return err
	}
	b, err := openBolt(tmp, noSync)
	if err != nil {
		return err
	}
	err = (&stableStore{records: b}).writeRecord(rec)
	if err := errors.Join(err, b.Close()); err != nil {
		return fmt.Errorf("%s: %w", tmp, err)
	}
	return durable.Rename(tmp, path)
}

// recoverPanic turns a panic into an error that names the file at path, and stores it in err. It
// also recovers from an invalid memory access (see panicOnFault). It must be deferred.
func recoverPanic(path string, err *error) {
	if p := recover(); p != nil {
		*err = fmt.Errorf("%s: reading its pages: %v: %w", path, p, ErrCorruptLog)
	}
}

// panicOnFault makes an invalid memory access in this goroutine cause a panic that can be
// recovered. The returned function restores the previous behavior.
func panicOnFault() func() {
	old := debug.SetPanicOnFault(true)
	return func() { debug.SetPanicOnFault(old) }
}

// FirstIndex implements raft.LogStore, as do the next five methods. They return an error where
// raft-boltdb panics.
func (b *boltLog) FirstIndex() (i uint64, err error) {
	defer recoverPanic(b.path, &err)
	defer panicOnFault()()
	return b.bolt.FirstIndex()
}

func (b *boltLog) LastIndex() (i uint64, err error) {
	defer recoverPanic(b.path, &err)
	defer panicOnFault()()
	return b.bolt.LastIndex()
}

func (b *boltLog) GetLog(index uint64, out *raft.Log) (err error) {
	defer recoverPanic(b.path, &err)
	defer panicOnFault()()
	return b.bolt.GetLog(index, out)
}

func (b *boltLog) StoreLog(l *raft.Log) error { return b.StoreLogs([]*raft.Log{l}) }

func (b *boltLog) StoreLogs(logs []*raft.Log) (err error) {
	if len(logs) == 0 {
		return nil
	}
	defer recoverPanic(b.path, &err)
	defer panicOnFault()()
	return b.bolt.StoreLogs(logs)
}

func (b *boltLog) DeleteRange(first, last uint64) (err error) {
	defer recoverPanic(b.path, &err)
	defer panicOnFault()()
	return b.bolt.DeleteRange(first, last)
}

// Get reads a value of the stable store.
func (b *boltLog) Get(key []byte) (v []byte, err error) {
	defer recoverPanic(b.path, &err)
	defer panicOnFault()()
	return b.bolt.Get(key)
}

// Set writes a value of the stable store.
func (b *boltLog) Set(key, value []byte) (err error) {
	defer recoverPanic(b.path, &err)
	defer panicOnFault()()
	return b.bolt.Set(key, value)
}

// Close implements io.Closer.
func (b *boltLog) Close() error { return b.bolt.Close() }

// lockDir takes the lock of a data directory that bbolt also takes, and waits for it for at most
// timeout. Without the lock, pages could be read while another process writes them. Closing the
// result releases the lock.
func lockDir(dir string, timeout time.Duration) (io.Closer, error) {
	path := filepath.Join(dir, boltName)
	f, err := os.OpenFile(path, os.O_RDWR, 0)
	if err != nil {
		return nil, err
	}
	for deadline := time.Now().Add(timeout); ; {
		err := unix.Flock(int(f.Fd()), unix.LOCK_EX|unix.LOCK_NB)
		if err == nil {
			return f, nil
		}
		if !errors.Is(err, unix.EWOULDBLOCK) || time.Now().After(deadline) {
			return nil, errors.Join(fmt.Errorf("%s: %w: %w", path, ErrInUse, err), f.Close())
		}
		<-time.After(lockInterval)
	}
}
