package server

import (
	"errors"
	"fmt"
	"os"
	"path/filepath"
	"strconv"
	"strings"
	"syscall"
)

// ErrInUse says that another program has a data folder.
var ErrInUse = errors.New("the data folder is in use")

// lock takes the data folder for this process, until release. Two programs that
// change one folder would ruin it. The kernel gives the lock back when a process dies.
func (c Config) lock() (release func(), err error) {
	path := filepath.Join(c.DataDir, lockFile)
	f, err := os.OpenFile(path, os.O_RDWR|os.O_CREATE, 0o600)
	if err != nil {
		return nil, fmt.Errorf("locking the data folder: %w", err)
	}
	err = syscall.Flock(int(f.Fd()), syscall.LOCK_EX|syscall.LOCK_NB)
	if errors.Is(err, syscall.EWOULDBLOCK) {
		raw, _ := os.ReadFile(path)
		f.Close()
		return nil, fmt.Errorf("%s: %w by process %s: stop it first", c.DataDir, ErrInUse, strings.TrimSpace(string(raw)))
	}
	if err != nil {
		f.Close()
		return nil, fmt.Errorf("locking %s: %w", path, err)
	}
	// Whose it is, for the message above. The lock itself does not depend on it.
	_ = f.Truncate(0)
	_, _ = f.WriteAt([]byte(strconv.Itoa(os.Getpid())+"\n"), 0)
	return func() { f.Close() }, nil
}

// openFolder is the beginning of every verb that works on a replica's disk:
// what Init or Join left, and the folder locked.
func (c Config) openFolder() (cluster Cluster, release func(), err error) {
	if c.DataDir == "" {
		return cluster, nil, errors.New("--data-dir: a replica needs a folder for its data")
	}
	if err := c.Store.check(); err != nil {
		return cluster, nil, err
	}
	if cluster, _, err = c.load(); err != nil {
		return cluster, nil, err
	}
	release, err = c.lock()
	return cluster, release, err
}

// TrustFolder is where the keys of a replica's cluster are.
func TrustFolder(c Config) string { return filepath.Join(c.DataDir, pkiFolder) }

// Identity is the cluster that a data folder belongs to.
func Identity(c Config) (Cluster, error) {
	cluster, _, err := c.load()
	return cluster, err
}
